# SPDX-License-Identifier: Apache-2.0
"""Kernels of `spec_decode.rejection_sampler_utils` over the whole vocabulary."""

import numpy as np
import torch

from .blocks import block_argmax, block_logsumexp_parts, float_row
from .sampling import noised_argmax


def compute_local_logits_stats_kernel(
    target_local_argmax_ptr: torch.Tensor,
    target_local_argmax_stride: int,
    target_local_max_ptr: torch.Tensor,
    target_local_max_stride: int,
    target_local_sumexp_ptr: torch.Tensor,
    target_local_sumexp_stride: int,
    draft_local_max_ptr: torch.Tensor,
    draft_local_max_stride: int,
    draft_local_sumexp_ptr: torch.Tensor,
    draft_local_sumexp_stride: int,
    target_logits_ptr: torch.Tensor,
    target_logits_stride: int,
    draft_logits_ptr: torch.Tensor | None,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
    vocab_size: int,
    num_speculative_steps: int,
    BLOCK_SIZE: int,
    HAS_DRAFT_LOGITS: bool,
) -> None:
    temps = temp_ptr.to(torch.float32).numpy()
    steps = expanded_local_pos_ptr.tolist()
    num_logits = target_local_max_ptr.shape[0]
    idx_mapping = expanded_idx_mapping_ptr[:num_logits].tolist()
    for logit_idx, req_state_idx in enumerate(idx_mapping):
        step = steps[logit_idx]
        if step >= num_speculative_steps:
            continue
        temp = temps[req_state_idx]
        target_row = float_row(target_logits_ptr[logit_idx, :vocab_size])
        if temp == 0.0:
            maxes, token_ids = block_argmax(target_row, BLOCK_SIZE)
            target_local_argmax_ptr[logit_idx] = torch.from_numpy(token_ids)
            target_local_max_ptr[logit_idx] = torch.from_numpy(maxes)
            continue
        maxes, sums = block_logsumexp_parts(target_row, BLOCK_SIZE)
        target_local_max_ptr[logit_idx] = torch.from_numpy(maxes)
        target_local_sumexp_ptr[logit_idx] = torch.from_numpy(sums)
        if draft_logits_ptr is not None:
            draft_row = float_row(draft_logits_ptr[req_state_idx, step, :vocab_size])
            maxes, sums = block_logsumexp_parts(draft_row / temp, BLOCK_SIZE)
            draft_local_max_ptr[logit_idx] = torch.from_numpy(maxes)
            draft_local_sumexp_ptr[logit_idx] = torch.from_numpy(sums)


def resample_kernel(
    resampled_local_argmax_ptr: torch.Tensor,
    resampled_local_argmax_stride: int,
    resampled_local_max_ptr: torch.Tensor,
    resampled_local_max_stride: int,
    target_logits_ptr: torch.Tensor,
    target_logits_stride: int,
    target_rejected_logsumexp_ptr: torch.Tensor,
    draft_logits_ptr: torch.Tensor | None,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    draft_rejected_logsumexp_ptr: torch.Tensor,
    rejected_step_ptr: torch.Tensor,
    cu_num_logits_ptr: torch.Tensor,
    expanded_idx_mapping_ptr: torch.Tensor,
    draft_sampled_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
    seed_ptr: torch.Tensor,
    pos_ptr: torch.Tensor,
    cumulative_log_p_ptr: torch.Tensor | None,
    contexts_ptr: torch.Tensor | None,
    contexts_stride: int,
    watermarking_ptr: torch.Tensor | None,
    watermarking_skip_mask_ptr: torch.Tensor | None,
    watermark_key_0: int,
    watermark_key_1: int,
    vocab_size: int,
    BLOCK_SIZE: int,
    HAS_DRAFT_LOGITS: bool,
    USE_FP64: bool,
    USE_BLOCK_VERIFICATION: bool,
    CONTEXT_WIDTH: int,
    WATERMARK: bool,
    DEDUPLICATE_CONTEXTS: bool,
) -> None:
    if WATERMARK:
        raise NotImplementedError("The CPU engine does not sample with watermarks.")
    cu_num_logits = cu_num_logits_ptr.tolist()
    for req_idx, step in enumerate(rejected_step_ptr.tolist()):
        row_idx = cu_num_logits[req_idx] + step
        req_state_idx = int(expanded_idx_mapping_ptr[row_idx])
        temp = np.float32(temp_ptr[req_state_idx])
        is_bonus = row_idx == cu_num_logits[req_idx + 1] - 1
        if temp == 0.0 and not is_bonus:
            continue
        rejected = 0 if is_bonus else int(draft_sampled_ptr[row_idx + 1])
        logits = float_row(target_logits_ptr[row_idx, :vocab_size])
        if is_bonus or rejected < 0:
            residual = logits
        elif draft_logits_ptr is None:
            residual = logits.copy()
            residual[rejected] = -np.inf
        else:
            target_logprobs = logits - np.float32(
                target_rejected_logsumexp_ptr[req_idx]
            )
            if USE_BLOCK_VERIFICATION and step > 0:
                assert cumulative_log_p_ptr is not None
                target_logprobs += np.float32(cumulative_log_p_ptr[row_idx - 1])
            draft_row = float_row(draft_logits_ptr[req_state_idx, step, :vocab_size])
            draft_logprobs = draft_row / temp - np.float32(
                draft_rejected_logsumexp_ptr[req_idx]
            )
            residual = _residual_logits(target_logprobs, draft_logprobs)
        values, token_ids = noised_argmax(
            residual,
            seed=int(seed_ptr[req_state_idx]),
            pos=int(pos_ptr[row_idx]),
            temp=float(temp),
            block_size=BLOCK_SIZE,
            is_drafting=False,
            use_fp64=USE_FP64,
            apply_temperature=False,
        )
        resampled_local_argmax_ptr[req_idx] = torch.from_numpy(token_ids)
        resampled_local_max_ptr[req_idx] = torch.from_numpy(values)


def _residual_logits(
    target_logprobs: np.ndarray, draft_logprobs: np.ndarray
) -> np.ndarray:
    """log(max(p - q, 0)) of two rows of log probabilities."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        ratio = np.exp(draft_logprobs - target_logprobs)
        residual = target_logprobs + np.log1p(-ratio)
    return np.where(ratio < 1.0, residual, np.float32(-np.inf))
