# SPDX-License-Identifier: Apache-2.0
"""Tree operations: one operation per file, its Triton kernel before its wrapper."""
