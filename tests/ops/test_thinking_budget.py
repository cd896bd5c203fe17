# SPDX-License-Identifier: Apache-2.0
"""Reasoning ends at its budget at every node, as vLLM ends it in plain decoding."""

import numpy as np
import torch
from cases import property_of
from histories import (
    MAX_DEPTH,
    MAX_MODEL_LEN,
    NUM_REQS,
    NUM_SLOTS,
    Batch,
    assert_equal_bits,
    chain_rows,
    draw_batch,
)
from hypothesis import strategies as st
from vllm.v1.worker.gpu.sample.thinking_budget import apply_thinking_budget

from vllm_ddtree.ops.path_tokens import gather_path_tokens
from vllm_ddtree.ops.thinking_budget import force_reasoning_end

vocab_sizes = st.integers(3, 5)


def draw_markers(rng: np.random.Generator, batch: Batch) -> tuple[torch.Tensor, ...]:
    """Start, natural end and forced end sequences of 1 to 4 tokens."""
    vocab_size = batch.logits.shape[1]
    return tuple(
        torch.from_numpy(
            rng.integers(vocab_size, size=rng.integers(1, 5)).astype(np.int32)
        ).to(batch.logits.device)
        for _ in range(3)
    )


def draw_budgets(rng: np.random.Generator, device: str) -> torch.Tensor:
    budgets = rng.choice([-1, 0, 1, 2, 5, 10, 2**31 - 1], size=NUM_SLOTS)
    return torch.from_numpy(budgets.astype(np.int32)).to(device)


def empty_cache(device: str) -> tuple[torch.Tensor, ...]:
    """Last start, last end and scan position as vLLM initialises them."""
    return tuple(
        torch.full((NUM_SLOTS,), value, dtype=torch.int32, device=device)
        for value in (-1, -1, 0)
    )


def force(batch, budgets, cache, markers, use_kernel: bool) -> torch.Tensor:
    logits = batch.logits.clone()
    paths = gather_path_tokens(
        batch.tree, batch.slots, batch.cu_num_logits, batch.num_logits, MAX_DEPTH
    )
    state = (budgets, batch.all_token_ids, batch.total_len, *cache[:2])
    rows = batch.expanded_idx_mapping
    force_reasoning_end(logits, *paths, rows, *state, *markers, use_kernel=use_kernel)
    return logits


@property_of(NUM_REQS, vocab_size=vocab_sizes)
def test_a_chain_is_forced_as_by_vllm(device, rng, vocab_size):
    batch = draw_batch(rng, vocab_size, device, max_budget=8, is_chain=True)
    batch.slots = batch.req_state_idx.int()
    budgets, markers = draw_budgets(rng, device), draw_markers(rng, batch)
    # vLLM's call also finds the markers of the committed text.
    cache = empty_cache(device)
    expected = batch.logits.clone()
    apply_thinking_budget(
        expected,
        batch.req_state_idx,
        batch.expanded_idx_mapping,
        budgets,
        batch.all_token_ids,
        batch.total_len,
        *chain_rows(batch),
        *cache,
        *markers,
    )
    for use_kernel in (True, False):
        forced = force(batch, budgets, cache, markers, use_kernel)
        assert_equal_bits(forced, expected)


@property_of(NUM_REQS, vocab_size=vocab_sizes)
def test_every_row_is_forced_as_if_its_path_were_committed(device, rng, vocab_size):
    """One vLLM call per row, with the path behind the request's text."""
    batch = draw_batch(rng, vocab_size, device, max_budget=6)
    budgets, markers = draw_budgets(rng, device), draw_markers(rng, batch)
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    cache = empty_cache(device)
    history = (batch.all_token_ids, batch.total_len)
    rows = batch.expanded_idx_mapping
    # No rows: only the markers of the committed text are found.
    apply_thinking_budget(
        batch.logits[:0],
        batch.req_state_idx,
        rows,
        budgets,
        *history,
        zero,
        zero,
        *cache,
        *markers,
    )
    text = torch.zeros(
        NUM_SLOTS, MAX_MODEL_LEN + MAX_DEPTH, dtype=torch.int32, device=device
    )
    text[:, :MAX_MODEL_LEN] = batch.all_token_ids
    expected = batch.logits.clone()
    for row, path in enumerate(batch.paths()):
        slot = int(rows[row])
        length = int(batch.total_len[slot])
        row_text, row_len = text.clone(), batch.total_len.clone()
        row_text[slot, length : length + len(path)] = torch.tensor(path)
        row_len[slot] += len(path)
        apply_thinking_budget(
            expected[row : row + 1],
            rows[row : row + 1],
            rows[row : row + 1],
            budgets,
            row_text,
            row_len,
            zero,
            zero,
            *empty_cache(device),
            *markers,
        )
    for use_kernel in (True, False):
        forced = force(batch, budgets, cache, markers, use_kernel)
        assert_equal_bits(forced, expected)
