# SPDX-License-Identifier: Apache-2.0
"""Logprob kernels of `vllm.v1.worker.gpu.sample.logprob`."""

import numpy as np
import torch

from .blocks import float_row, split_blocks


def topk_log_softmax_kernel(
    output_ptr: torch.Tensor,
    logits_ptr: torch.Tensor,
    logits_stride: int,
    topk_ids_ptr: torch.Tensor,
    topk_ids_stride: int,
    topk: int,
    vocab_size: int,
    BLOCK_SIZE: int,
    TOPK_BLOCK_SIZE: int,
) -> None:
    for row_idx in range(output_ptr.shape[0]):
        row = float_row(logits_ptr[row_idx, :vocab_size])
        maximum = np.fmax.reduce(row)
        sums = np.exp(split_blocks(row, BLOCK_SIZE) - maximum).sum(axis=1)
        # Block by block, as the kernel adds; a pairwise sum rounds differently.
        logsumexp = np.log(np.add.accumulate(sums)[-1])
        # A row past the last sampled token may hold any id; it is never read.
        token_ids = topk_ids_ptr[row_idx].numpy().clip(0, vocab_size - 1)
        scores = row[token_ids] - maximum - logsumexp
        output_ptr[row_idx] = torch.from_numpy(scores)


def ranks_kernel(
    output_ptr: torch.Tensor,
    logits_ptr: torch.Tensor,
    logits_stride: int,
    token_ids_ptr: torch.Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
) -> None:
    logits = logits_ptr[:, :vocab_size]
    token_ids = token_ids_ptr.to(torch.int64).clamp(0, vocab_size - 1)
    chosen = logits.gather(1, token_ids.view(-1, 1))
    ranks = (logits >= chosen).sum(dim=1)
    # The kernel counts its last block's padding too, where it reads -inf.
    padding = -vocab_size % BLOCK_SIZE
    output_ptr.copy_(ranks + padding * (chosen[:, 0] == float("-inf")))
