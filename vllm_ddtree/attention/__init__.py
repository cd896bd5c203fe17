# SPDX-License-Identifier: Apache-2.0
"""Tree attention for the target's layers, chosen by platform."""

from vllm.platforms import current_platform

if current_platform.is_cuda():
    from vllm_ddtree.attention.cuda import CUDATreeAttentionBackend as backend
else:
    from vllm_ddtree.attention.cpu import CPUTreeAttentionBackend as backend

TreeAttentionBackend = backend

__all__ = ["TreeAttentionBackend"]
