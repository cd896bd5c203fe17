# SPDX-License-Identifier: Apache-2.0
"""Repetition, frequency and presence penalties of the drafts before a row."""

import torch
from vllm.triton_utils import tl, triton

from vllm_ddtree.ops.reference.penalties import (
    penalize_path as penalize_path_reference,
)


@triton.jit
def _penalize_path_kernel(
    # [num_logits, vocab_size]
    logits_ptr,
    logits_stride,
    # [num_logits, MAX_DEPTH]
    raw_ptr,
    path_tokens_ptr,
    # [num_logits]
    row_depths_ptr,
    expanded_idx_mapping_ptr,
    # [max_num_reqs]
    repetition_penalty_ptr,
    frequency_penalty_ptr,
    presence_penalty_ptr,
    # [max_num_reqs, cdiv(vocab_size, 32)]
    prompt_bin_mask_ptr,
    prompt_bin_mask_stride,
    # [max_num_reqs, vocab_size]
    output_bin_counts_ptr,
    output_bin_counts_stride,
    MAX_DEPTH: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    req_state_idx = tl.load(expanded_idx_mapping_ptr + row).to(tl.int64)
    repetition = tl.load(repetition_penalty_ptr + req_state_idx)
    frequency = tl.load(frequency_penalty_ptr + req_state_idx)
    presence = tl.load(presence_penalty_ptr + req_state_idx)
    depth = tl.load(row_depths_ptr + row)
    if (repetition == 1.0) & (frequency == 0.0) & (presence == 0.0):
        depth = 0
    levels = tl.arange(0, BLOCK_DEPTH)
    is_path = levels < depth
    place = row * MAX_DEPTH + levels
    tokens = tl.load(path_tokens_ptr + place, mask=is_path, other=-1)
    logits = tl.load(raw_ptr + place, mask=is_path, other=0.0)

    # A token that the path repeats is written several times, with the same value.
    is_same = (tokens[:, None] == tokens[None, :]) & is_path[None, :]
    in_path = tl.sum(is_same.to(tl.int32), axis=1)
    counts = output_bin_counts_ptr + req_state_idx * output_bin_counts_stride + tokens
    counts = tl.load(counts, mask=is_path, other=0) + in_path
    is_output = counts > 0

    # The operations of vLLM's kernel in its order, so that the rounding agrees.
    if repetition != 1.0:
        word = req_state_idx * prompt_bin_mask_stride + tokens // 32
        word = tl.load(prompt_bin_mask_ptr + word, mask=is_path, other=0)
        is_prompt = ((word >> (tokens % 32).to(tl.int32)) & 1) != 0
        scale = tl.where(is_prompt | is_output, repetition, 1.0)
        logits *= tl.where(logits > 0, 1.0 / scale, scale)
    logits -= frequency * counts
    logits -= presence * is_output
    tl.store(logits_ptr + row * logits_stride + tokens, logits, mask=is_path)


def penalize_path(
    # [num_logits, vocab_size] float32, penalized for the committed tokens; changed
    # in place at the tokens of each row's path
    logits: torch.Tensor,
    # [num_logits, max_depth] float32, the path tokens' logits before penalties
    raw: torch.Tensor,
    # [num_logits, max_depth] int64, padding -1
    path_tokens: torch.Tensor,
    # [num_logits] int32
    row_depths: torch.Tensor,
    # [num_logits]
    expanded_idx_mapping: torch.Tensor,
    # [max_num_reqs] float32, each
    repetition_penalty: torch.Tensor,
    frequency_penalty: torch.Tensor,
    presence_penalty: torch.Tensor,
    # [max_num_reqs, cdiv(vocab_size, 32)] int32, bits of the tokens in the prompt
    prompt_bin_mask: torch.Tensor,
    # [max_num_reqs, vocab_size] int32, committed output tokens
    output_bin_counts: torch.Tensor,
    *,
    use_kernel: bool = False,
) -> None:
    """Count a row's own path as output, too.

    Only the tokens of the path change their counts, so only their logits are
    computed anew. No host sync. CPU tensors take the reference unless `use_kernel`.
    """
    args = (logits, raw, path_tokens, row_depths, expanded_idx_mapping)
    penalties = (repetition_penalty, frequency_penalty, presence_penalty)
    if logits.device.type == "cpu" and not use_kernel:
        penalize_path_reference(*args, *penalties, prompt_bin_mask, output_bin_counts)
        return
    assert logits.stride(-1) == 1
    assert raw.is_contiguous() and path_tokens.is_contiguous()
    num_logits, max_depth = path_tokens.shape
    _penalize_path_kernel[(num_logits,)](
        logits,
        logits.stride(0),
        raw,
        path_tokens,
        row_depths,
        expanded_idx_mapping,
        *penalties,
        prompt_bin_mask,
        prompt_bin_mask.stride(0),
        output_bin_counts,
        output_bin_counts.stride(0),
        MAX_DEPTH=max_depth,
        BLOCK_DEPTH=triton.next_power_of_2(max_depth),
        num_warps=1,
    )
