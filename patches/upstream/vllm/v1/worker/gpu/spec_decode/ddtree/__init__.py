# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A tree of DFlash drafts (DDTree, arXiv 2604.12989)."""
