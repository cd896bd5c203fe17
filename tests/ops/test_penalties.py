# SPDX-License-Identifier: Apache-2.0
"""Penalties of a row count its path, bit for bit as vLLM counts a chain."""

from dataclasses import dataclass

import numpy as np
import torch
from cases import property_of
from histories import (
    MAX_DEPTH,
    NUM_REQS,
    NUM_SLOTS,
    Batch,
    assert_equal_bits,
    chain_rows,
    draw_batch,
)
from hypothesis import strategies as st
from vllm.v1.worker.gpu.sample.penalties import apply_penalties

from vllm_ddtree.ops.path_tokens import gather_path_tokens
from vllm_ddtree.ops.penalties import penalize_path

vocab_sizes = st.integers(2, 70)


@dataclass
class Penalties:
    # [num_slots] each
    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor
    # [num_slots, cdiv(vocab_size, 32)]
    prompt_bin_mask: torch.Tensor
    # [num_slots, vocab_size]
    output_bin_counts: torch.Tensor

    def args(self) -> tuple[torch.Tensor, ...]:
        return (
            self.repetition,
            self.frequency,
            self.presence,
            self.prompt_bin_mask,
            self.output_bin_counts,
        )


def draw_penalties(rng: np.random.Generator, batch: Batch) -> Penalties:
    """Each off in some requests, and at the ends of its range in others."""
    device = batch.logits.device
    vocab_size = batch.logits.shape[1]

    def draw(neutral: float, *ends: float) -> torch.Tensor:
        inner = rng.uniform(min(ends), max(ends))
        values = rng.choice([neutral, neutral, inner, *ends], size=NUM_SLOTS)
        return torch.from_numpy(values.astype(np.float32)).to(device)

    def draw_ints(low: int, high: int, width: int) -> torch.Tensor:
        values = rng.integers(low, high, size=(NUM_SLOTS, width))
        return torch.from_numpy(values.astype(np.int32)).to(device)

    return Penalties(
        draw(1.0, 0.01, 2.0, 100.0),
        draw(0.0, -2.0, 2.0),
        draw(0.0, -2.0, 2.0),
        draw_ints(-(2**31), 2**31, -(-vocab_size // 32)),
        draw_ints(0, 3, vocab_size) * draw_ints(0, 2, vocab_size),
    )


def penalize(batch: Batch, penalties: Penalties, use_kernel: bool) -> torch.Tensor:
    """vLLM's kernel for the committed tokens, then ours for the path."""
    path_tokens, row_depths = gather_path_tokens(
        batch.tree, batch.slots, batch.cu_num_logits, batch.num_logits, MAX_DEPTH
    )
    logits = batch.logits.clone()
    raw = logits.gather(1, path_tokens.clamp(min=0))
    tokens, local_pos = chain_rows(batch)
    committed_only = torch.zeros_like(local_pos)
    apply_penalties(
        logits,
        batch.expanded_idx_mapping,
        tokens,
        committed_only,
        *penalties.args(),
    )
    penalize_path(
        logits,
        raw,
        path_tokens,
        row_depths,
        batch.expanded_idx_mapping,
        *penalties.args(),
        use_kernel=use_kernel,
    )
    return logits


@property_of(NUM_REQS, vocab_size=vocab_sizes)
def test_a_chain_is_penalized_as_by_vllm(device, rng, vocab_size):
    batch = draw_batch(rng, vocab_size, device, is_chain=True)
    batch.slots = batch.req_state_idx.int()
    penalties = draw_penalties(rng, batch)
    expected = batch.logits.clone()
    apply_penalties(
        expected, batch.expanded_idx_mapping, *chain_rows(batch), *penalties.args()
    )
    for use_kernel in (True, False):
        assert_equal_bits(penalize(batch, penalties, use_kernel), expected)


@property_of(NUM_REQS, vocab_size=vocab_sizes)
def test_every_row_is_penalized_as_if_its_path_were_committed(device, rng, vocab_size):
    """One vLLM call per row, with the path added to the request's counts."""
    batch = draw_batch(rng, vocab_size, device, max_budget=8)
    penalties = draw_penalties(rng, batch)
    expected = batch.logits.clone()
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    rows = batch.expanded_idx_mapping.split(1)
    for row, (slot, path) in enumerate(zip(rows, batch.paths(), strict=True)):
        counts = penalties.output_bin_counts.clone()
        for token in path:
            counts[int(slot), token] += 1
        apply_penalties(
            expected[row : row + 1], slot, zero, zero, *penalties.args()[:4], counts
        )
    for use_kernel in (True, False):
        assert_equal_bits(penalize(batch, penalties, use_kernel), expected)
