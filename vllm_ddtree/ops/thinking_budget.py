# SPDX-License-Identifier: Apache-2.0
"""Ends a reasoning section that reached its token budget, at every node of a tree."""

import torch
from vllm.triton_utils import tl, triton

from vllm_ddtree.ops.reference.thinking_budget import FORCED_LOGIT
from vllm_ddtree.ops.reference.thinking_budget import (
    force_reasoning_end as force_reasoning_end_reference,
)

_FORCED_LOGIT = tl.constexpr(FORCED_LOGIT)


@triton.jit
def _load_history(
    committed_ptr,
    path_ptr,
    total_len,
    # positions, before `history_len` of the row
    pos,
    mask,
):
    """Tokens of committed text and then path; -1 where masked."""
    in_path = mask & (pos >= total_len)
    path_tokens = tl.load(path_ptr + pos - total_len, mask=in_path, other=-1)
    in_text = mask & (pos < total_len)
    tokens = tl.load(committed_ptr + pos, mask=in_text, other=-1)
    return tl.where(in_path, path_tokens, tokens.to(tl.int64))


@triton.jit
def _find_last_marker(
    committed_ptr,
    path_ptr,
    total_len,
    history_len,
    marker_ptr,
    MARKER_LEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Start of the last marker that ends in the path, or -1."""
    first = tl.maximum(total_len - MARKER_LEN + 1, 0)
    begin = first + tl.arange(0, BLOCK)
    is_marker = begin + MARKER_LEN <= history_len
    for i in tl.static_range(0, MARKER_LEN):
        pos = begin + i
        mask = pos < history_len
        tokens = _load_history(committed_ptr, path_ptr, total_len, pos, mask)
        is_marker &= tokens == tl.load(marker_ptr + i)
    return tl.max(tl.where(is_marker, begin, -1), axis=0)


@triton.jit
def _force_reasoning_end_kernel(
    # [num_logits, vocab_size]
    logits_ptr,
    logits_stride,
    # [num_logits, MAX_DEPTH]
    path_tokens_ptr,
    # [num_logits]
    row_depths_ptr,
    expanded_idx_mapping_ptr,
    # [max_num_reqs]
    budgets_ptr,
    # [max_num_reqs, max_model_len]
    all_token_ids_ptr,
    all_token_ids_stride,
    # [max_num_reqs]
    total_len_ptr,
    last_start_ptr,
    last_end_ptr,
    # [START_LEN], [NATURAL_END_LEN], [END_LEN]
    start_ids_ptr,
    natural_end_ids_ptr,
    end_ids_ptr,
    MAX_DEPTH: tl.constexpr,
    START_LEN: tl.constexpr,
    NATURAL_END_LEN: tl.constexpr,
    END_LEN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_END: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    req_state_idx = tl.load(expanded_idx_mapping_ptr + row).to(tl.int64)
    budget = tl.load(budgets_ptr + req_state_idx)
    if budget < 0:
        return
    committed_ptr = all_token_ids_ptr + req_state_idx * all_token_ids_stride
    path_ptr = path_tokens_ptr + row * MAX_DEPTH
    total_len = tl.load(total_len_ptr + req_state_idx)
    history_len = total_len + tl.load(row_depths_ptr + row)

    start = tl.load(last_start_ptr + req_state_idx)
    found = _find_last_marker(
        committed_ptr, path_ptr, total_len, history_len, start_ids_ptr, START_LEN, BLOCK
    )
    start = tl.maximum(start, found)
    end = tl.load(last_end_ptr + req_state_idx)
    found = _find_last_marker(
        committed_ptr,
        path_ptr,
        total_len,
        history_len,
        natural_end_ids_ptr,
        NATURAL_END_LEN,
        BLOCK,
    )
    end = tl.maximum(end, found)
    is_over = history_len - (start + START_LEN) >= budget
    if (start < 0) | (start <= end) | (is_over == 0):
        return

    # Continue an end sequence that the history already began.
    num_begun = 0
    offs = tl.arange(0, BLOCK_END)
    for length in tl.static_range(1, END_LEN):
        mask = offs < tl.where(history_len >= length, length, 0)
        pos = history_len - length + offs
        tokens = _load_history(committed_ptr, path_ptr, total_len, pos, mask)
        expected = tl.load(end_ids_ptr + offs, mask=mask, other=-1)
        num_unlike = tl.sum((tokens != expected).to(tl.int32), axis=0)
        is_begun = (num_unlike == 0) & (history_len >= length)
        num_begun = tl.where(is_begun, length, num_begun)
    token = tl.load(end_ids_ptr + num_begun)
    tl.store(logits_ptr + row * logits_stride + token, _FORCED_LOGIT)


def force_reasoning_end(
    # [num_logits, vocab_size] float32, changed in place
    logits: torch.Tensor,
    # [num_logits, max_depth] int64, padding -1
    path_tokens: torch.Tensor,
    # [num_logits] int32
    row_depths: torch.Tensor,
    # [num_logits]
    expanded_idx_mapping: torch.Tensor,
    # [max_num_reqs] int32, negative for no budget
    budgets: torch.Tensor,
    # [max_num_reqs, max_model_len] int32, prompt and committed output
    all_token_ids: torch.Tensor,
    # [max_num_reqs] int32, the root's token included
    total_len: torch.Tensor,
    # [max_num_reqs] int32, start of the last marker in the committed text, or -1
    last_start: torch.Tensor,
    last_end: torch.Tensor,
    # [any length] int32, each
    start_ids: torch.Tensor,
    natural_end_ids: torch.Tensor,
    end_ids: torch.Tensor,
    *,
    use_kernel: bool = False,
) -> None:
    """Make the next token of the end sequence certain where the budget is used up.

    A row's history is the committed text and then its path; either marker may span
    both. No host sync. CPU tensors take the reference unless `use_kernel`.
    """
    rows = (logits, path_tokens, row_depths, expanded_idx_mapping)
    state = (budgets, all_token_ids, total_len, last_start, last_end)
    markers = (start_ids, natural_end_ids, end_ids)
    if logits.device.type == "cpu" and not use_kernel:
        force_reasoning_end_reference(*rows, *state, *markers)
        return
    assert logits.stride(-1) == 1 and path_tokens.is_contiguous()
    num_logits, max_depth = path_tokens.shape
    marker_len = max(start_ids.shape[0], natural_end_ids.shape[0])
    _force_reasoning_end_kernel[(num_logits,)](
        logits,
        logits.stride(0),
        path_tokens,
        row_depths,
        expanded_idx_mapping,
        budgets,
        all_token_ids,
        all_token_ids.stride(0),
        total_len,
        last_start,
        last_end,
        *markers,
        MAX_DEPTH=max_depth,
        START_LEN=start_ids.shape[0],
        NATURAL_END_LEN=natural_end_ids.shape[0],
        END_LEN=end_ids.shape[0],
        BLOCK=triton.next_power_of_2(max_depth + marker_len),
        BLOCK_END=triton.next_power_of_2(end_ids.shape[0]),
        num_warps=1,
    )
