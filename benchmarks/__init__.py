# SPDX-License-Identifier: Apache-2.0
"""Measurements: operations, attention, engines. Each module is one command."""
