# SPDX-License-Identifier: Apache-2.0
"""DDTree speculative decoding for vLLM (arXiv 2604.12989)."""

__version__ = "0.1.0"
