# SPDX-License-Identifier: Apache-2.0
"""Sampling kernels of `vllm.v1.worker.gpu.sample` over the whole vocabulary.

The parameters are those of the kernels, so that vLLM's registry can pass its launch
arguments on. Pointers are the tensors themselves; strides are theirs.
"""

import numpy as np
import torch

from .blocks import block_argmax, float_row
from .noise import gumbel_noise


def _rows(logits: torch.Tensor, expanded_idx_mapping: torch.Tensor) -> list[int]:
    """The request of each row; the mapping may be padded for a captured graph."""
    return expanded_idx_mapping[: logits.shape[0]].tolist()


def temperature_kernel(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    temperature_ptr: torch.Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
) -> None:
    temperature = temperature_ptr.numpy()
    for token_idx, req_state_idx in enumerate(
        _rows(logits_ptr, expanded_idx_mapping_ptr)
    ):
        temp = np.float32(temperature[req_state_idx])
        if temp not in (0.0, 1.0):
            row = logits_ptr[token_idx, :vocab_size]
            row.copy_(torch.from_numpy(float_row(row) / temp))


def min_p_kernel(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    min_p_ptr: torch.Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
) -> None:
    min_p = min_p_ptr.numpy()
    for token_idx, req_state_idx in enumerate(
        _rows(logits_ptr, expanded_idx_mapping_ptr)
    ):
        if min_p[req_state_idx] == 0.0:
            continue
        row = logits_ptr[token_idx, :vocab_size]
        values = float_row(row)
        threshold = np.fmax.reduce(values) + np.log(np.float32(min_p[req_state_idx]))
        row.masked_fill_(torch.from_numpy(values < threshold), float("-inf"))


def penalties_kernel(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    token_ids_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
    repetition_penalty_ptr: torch.Tensor,
    frequency_penalty_ptr: torch.Tensor,
    presence_penalty_ptr: torch.Tensor,
    prompt_bin_mask_ptr: torch.Tensor,
    prompt_bin_mask_stride: int,
    output_bin_counts_ptr: torch.Tensor,
    output_bin_counts_stride: int,
    vocab_size: int,
    BLOCK_SIZE: int,
    # Of a vLLM with `patches/`: drafts by row, that many apart; 0 for a chain.
    PATH_STRIDE: int = 0,
) -> None:
    token_ids = token_ids_ptr.flatten().numpy()
    local_pos = expanded_local_pos_ptr.tolist()
    for token_idx, req_state_idx in enumerate(
        _rows(logits_ptr, expanded_idx_mapping_ptr)
    ):
        repetition, frequency, presence = (
            np.float32(penalty.numpy()[req_state_idx])
            for penalty in (
                repetition_penalty_ptr,
                frequency_penalty_ptr,
                presence_penalty_ptr,
            )
        )
        if repetition == 1.0 and frequency == 0.0 and presence == 0.0:
            continue
        counts = output_bin_counts_ptr[req_state_idx, :vocab_size].numpy().copy()
        # The drafts before this row: the rows that follow the request's first.
        num_drafts = local_pos[token_idx]
        begin = token_idx * PATH_STRIDE if PATH_STRIDE else token_idx - num_drafts + 1
        drafts = token_ids[begin : begin + num_drafts]
        np.add.at(counts, drafts[(drafts >= 0) & (drafts < vocab_size)], 1)
        row = logits_ptr[token_idx, :vocab_size]
        values = float_row(row)
        if repetition != 1.0:
            packed = prompt_bin_mask_ptr[req_state_idx].numpy()
            in_prompt = _unpack_bits(packed)[:vocab_size]
            scale = np.where(in_prompt | (counts > 0), repetition, np.float32(1.0))
            values = values * np.where(values > 0, np.float32(1.0) / scale, scale)
        values = values - frequency * counts.astype(np.float32)
        values = values - presence * (counts > 0).astype(np.float32)
        row.copy_(torch.from_numpy(values))


def _unpack_bits(packed: np.ndarray) -> np.ndarray:
    """[N] int32 -> [32 * N] bool, lowest bit first."""
    return np.unpackbits(packed.view(np.uint8), bitorder="little").astype(bool)


def gumbel_sample_kernel(
    local_argmax_ptr: torch.Tensor,
    local_argmax_stride: int,
    local_max_ptr: torch.Tensor,
    local_max_stride: int,
    logits_cache_ptr: torch.Tensor | None,
    logits_cache_stride_0: int,
    logits_cache_stride_1: int,
    logits_cache_col_ptr: torch.Tensor | None,
    logits_cache_source_ptr: torch.Tensor | None,
    logits_cache_source_stride: int,
    logits_ptr: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    seeds_ptr: torch.Tensor,
    pos_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
    IS_DRAFTING: bool,
    APPLY_TEMPERATURE: bool,
    USE_FP64: bool,
    PER_TOKEN_COL: bool,
) -> None:
    positions = pos_ptr.tolist()
    for token_idx, req_state_idx in enumerate(
        _rows(logits_ptr, expanded_idx_mapping_ptr)
    ):
        is_valid = req_state_idx >= 0
        if logits_cache_ptr is not None and is_valid:
            assert logits_cache_col_ptr is not None
            assert logits_cache_source_ptr is not None
            col = logits_cache_col_ptr.view(-1)[token_idx if PER_TOKEN_COL else 0]
            logits_cache_ptr[req_state_idx, col, :vocab_size] = logits_cache_source_ptr[
                token_idx, :vocab_size
            ]
        values, token_ids = noised_argmax(
            float_row(logits_ptr[token_idx, :vocab_size]),
            seed=int(seeds_ptr[req_state_idx]) if is_valid else 0,
            pos=positions[token_idx],
            temp=float(temp_ptr[req_state_idx]) if is_valid else 0.0,
            block_size=BLOCK_SIZE,
            is_drafting=IS_DRAFTING,
            use_fp64=USE_FP64,
            apply_temperature=APPLY_TEMPERATURE,
        )
        local_argmax_ptr[token_idx] = torch.from_numpy(token_ids)
        local_max_ptr[token_idx] = torch.from_numpy(values)


def noised_argmax(
    # [vocab_size] float32
    logits: np.ndarray,
    seed: int,
    pos: int,
    temp: float,
    block_size: int,
    is_drafting: bool,
    use_fp64: bool,
    apply_temperature: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Maximum of each block under keyed Gumbel noise, and the token it belongs to."""
    if temp != 0.0 and apply_temperature:
        logits = logits / np.float32(temp)
    if use_fp64:
        logits = logits.astype(np.float64)
    if temp != 0.0:
        logits = logits + gumbel_noise(seed, pos, len(logits), is_drafting, use_fp64)
    return block_argmax(logits, block_size)
