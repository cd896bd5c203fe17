# SPDX-License-Identifier: Apache-2.0
"""Samples rows of vocabulary-sharded logits without gathering them.

A greedy choice and a Gumbel-max draw are both an argmax over the vocabulary, so each
rank takes its own and the ranks reduce (value, token) pairs.
"""

import torch
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.triton_utils import tl, triton
from vllm.v1.worker.gpu.sample.gumbel import _gumbel_sample_kernel, gumbel_noised_argmax

_BLOCK_SIZE = 1024


@triton.jit
def _sample_shard_kernel(
    # [num_rows, num_blocks] float32
    values_ptr,
    # [num_rows, num_blocks] int64
    tokens_ptr,
    num_blocks,
    # [num_rows, shard_size]
    logits_ptr,
    logits_stride,
    # [num_rows]
    expanded_idx_mapping_ptr,
    # [max_num_reqs]
    temperature_ptr,
    # [max_num_reqs]
    seeds_ptr,
    # [num_rows]
    pos_ptr,
    vocab_start,
    shard_size,
    BLOCK_SIZE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block_idx = tl.program_id(1)
    cols = block_idx * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = cols < shard_size
    logits = tl.load(
        logits_ptr + row * logits_stride + cols, mask=mask, other=float("-inf")
    ).to(tl.float32)
    req_state_idx = tl.load(expanded_idx_mapping_ptr + row)
    # The noise is keyed by the token's id in the whole vocabulary.
    value, idx = gumbel_noised_argmax(
        logits,
        vocab_start + cols,
        mask,
        tl.load(seeds_ptr + req_state_idx),
        tl.load(pos_ptr + row),
        tl.load(temperature_ptr + req_state_idx).to(tl.float32),
        IS_DRAFTING=False,
        USE_FP64=False,
    )
    out = row * num_blocks + block_idx
    tl.store(values_ptr + out, value)
    tl.store(tokens_ptr + out, vocab_start + block_idx * BLOCK_SIZE + idx)


def sample_shards(
    # [num_rows, shard_size] this rank's logits, without padding
    logits: torch.Tensor,
    # [num_rows]
    expanded_idx_mapping: torch.Tensor,
    # [max_num_reqs]
    temperature: torch.Tensor,
    # [max_num_reqs]
    seeds: torch.Tensor,
    # [num_rows]
    pos: torch.Tensor,
    vocab_start: int,
    tp_size: int,
) -> torch.Tensor:
    """The token `[num_rows]` int64 that vLLM's sampler would take of whole rows.

    One all-gather of two numbers a row; the lowest token wins a tie, as in vLLM.
    """
    blocks = _sample_blocks if logits.is_cuda else _sample_whole_rows
    values, tokens = blocks(
        logits, expanded_idx_mapping, temperature, seeds, pos, vocab_start
    )
    best = values.argmax(dim=-1, keepdim=True)
    value, token = values.gather(1, best), tokens.gather(1, best).int()
    if tp_size > 1:
        pair = torch.cat([value, token.view(torch.float32)], dim=1)
        pairs = tensor_model_parallel_all_gather(pair, dim=-1)
        pairs = pairs.view(-1, tp_size, 2)
        best = pairs[..., 0].argmax(dim=-1, keepdim=True)
        token = pairs[..., 1].gather(1, best).view(torch.int32)
    return token.squeeze(1).long()


def _sample_blocks(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    pos: torch.Tensor,
    vocab_start: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Best value and token of every block of the shard."""
    num_rows, shard_size = logits.shape
    num_blocks = max(1, triton.cdiv(shard_size, _BLOCK_SIZE))
    values = logits.new_empty(num_rows, num_blocks, dtype=torch.float32)
    tokens = logits.new_empty(num_rows, num_blocks, dtype=torch.int64)
    _sample_shard_kernel[(num_rows, num_blocks)](
        values,
        tokens,
        num_blocks,
        logits,
        logits.stride(0),
        expanded_idx_mapping,
        temperature,
        seeds,
        pos,
        vocab_start,
        shard_size,
        BLOCK_SIZE=_BLOCK_SIZE,
    )
    return values, tokens


def _sample_whole_rows(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    pos: torch.Tensor,
    vocab_start: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by vLLM's own kernel, over rows that are -inf outside of the shard."""
    num_rows, shard_size = logits.shape
    vocab_end = vocab_start + shard_size
    rows = logits.new_full((num_rows, max(1, vocab_end)), -torch.inf)
    rows[:, vocab_start:vocab_end] = logits
    num_blocks = triton.cdiv(rows.shape[1], _BLOCK_SIZE)
    values = rows.new_empty(num_rows, num_blocks, dtype=torch.float32)
    tokens = rows.new_empty(num_rows, num_blocks, dtype=torch.int64)
    _gumbel_sample_kernel[(num_rows, num_blocks)](
        tokens,
        tokens.stride(0),
        values,
        values.stride(0),
        None,
        0,
        0,
        None,
        None,
        0,
        rows,
        rows.stride(0),
        expanded_idx_mapping,
        seeds,
        pos,
        temperature,
        rows.shape[1],
        BLOCK_SIZE=_BLOCK_SIZE,
        IS_DRAFTING=False,
        APPLY_TEMPERATURE=True,
        USE_FP64=False,
        PER_TOKEN_COL=False,
    )
    return values, tokens
