# SPDX-License-Identifier: Apache-2.0
"""The top-k and top-p kernel of `vllm.v1.sample.ops.topk_topp_triton`."""

import functools
from collections.abc import Callable

import torch


def _without_num_warps(implementation: Callable[..., None]) -> Callable[..., None]:
    """Accept the launch option `num_warps`, which vLLM's registry passes on."""

    @functools.wraps(implementation)
    def launch(*args: object, num_warps: int = 0, **kwargs: object) -> None:
        implementation(*args, **kwargs)

    return launch


@_without_num_warps
def topk_topp_kernel(
    LOGITS: torch.Tensor,
    LOGITS_STRIDE_0: int,
    BUFFER: torch.Tensor,
    PERCENTILE_TO_STD_TABLE: torch.Tensor,
    NORMAL_CDF_TO_SIGMA_TABLE: torch.Tensor,
    K: torch.Tensor,
    P: torch.Tensor,
    BATCH_SIZE: int,
    VOCAB_SIZE: int,
    MASK_VALUE: float,
    BLOCK_SIZE: int,
    BLOCK_SIZE_TRUNC: int,
    TOPK_ENABLED: bool,
    TOPP_ENABLED: bool,
    SPLIT_COVERS_PONLY: bool,
) -> None:
    """Mask `LOGITS` [BATCH_SIZE, VOCAB_SIZE] in place, by vLLM's path without Triton.

    The interpreter cannot run this kernel at all. Tokens tied with the last one kept
    are kept too, where the kernel keeps some of them.
    """
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    apply_top_k_top_p_pytorch(
        LOGITS,
        K if TOPK_ENABLED else None,
        P if TOPP_ENABLED else None,
        allow_cpu_sync=True,
    )
