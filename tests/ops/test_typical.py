# SPDX-License-Identifier: Apache-2.0
"""Typical acceptance: truncation by definition, walk by brute force."""

import itertools
import math

import numpy as np
import torch
from cases import draw_tree, move_tree, property_of, small_or
from hypothesis import strategies as st
from test_walk import draw_max_nodes, draw_rows, path_to

from vllm_ddtree.ops.reference import typical as reference
from vllm_ddtree.ops.typical import truncate_typical, walk_typical
from vllm_ddtree.ops.walk import walk_tree

NUM_REQS = 4
NUM_ROWS = 5
KINDS = ("random", "tied", "equal", "one_token", "minus_inf", "all_dead")
thresholds = st.sampled_from([0.0, 0.01, 0.09, 0.3, 1.0, 2.0])


def draw_logits(rng, num_rows: int, vocab_size: int) -> torch.Tensor:
    rows = np.empty((num_rows, vocab_size), dtype=np.float32)
    for row in rows:
        row[:] = rng.normal(size=vocab_size) * rng.choice([0.3, 1.0, 4.0])
        kind = rng.choice(KINDS)
        if kind == "tied":
            row[:] = np.round(row)
        elif kind == "equal":
            row[:] = rng.normal()
        elif kind == "one_token":
            row[:] = -np.inf
            row[rng.integers(vocab_size)] = 3.0
        elif kind == "minus_inf":
            row[rng.random(vocab_size) < 0.5] = -np.inf
        elif kind == "all_dead":
            row[:] = -np.inf
    return torch.from_numpy(rows)


def margins(row: np.ndarray, epsilon: float, delta: float) -> np.ndarray:
    """Log of p(x) over the threshold, in float64: positive for typical tokens."""
    row = row.astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        log_p = row - np.log(np.exp(row - row.max()).sum()) - row.max()
        p = np.exp(log_p)
        entropy = -np.where(p > 0, p * log_p, 0.0).sum()
        threshold = np.minimum(np.log(epsilon), np.log(delta) - entropy)
        return np.where(np.isneginf(log_p), -np.inf, log_p - threshold)


@property_of(
    NUM_ROWS,
    vocab_size=st.integers(1, 60) | st.integers(4090, 6000),
    epsilon=thresholds,
    delta=thresholds,
    has_greedy=st.booleans(),
)
def test_truncation_by_definition(device, rng, vocab_size, epsilon, delta, has_greedy):
    logits = draw_logits(rng, NUM_ROWS, vocab_size).to(device)
    is_greedy = torch.from_numpy(rng.random(NUM_ROWS) < 0.3).to(device)
    args = (epsilon, delta, is_greedy if has_greedy else None)
    truncated, expected = logits.clone(), logits.clone()
    log_z = truncate_typical(truncated, *args, use_kernel=True)
    expected_log_z = reference.truncate_typical(expected, *args)
    torch.testing.assert_close(log_z, expected_log_z, rtol=1e-6, atol=1e-5)
    for row in range(NUM_ROWS):
        before = logits[row].cpu().numpy()
        top = int(before.argmax())
        margin = margins(before, epsilon, delta)
        keep = margin > 0
        # Within rounding of the threshold either answer is right.
        is_clear = ~(np.abs(margin) < 1e-4)
        if (has_greedy and is_greedy[row]) or np.isneginf(before).all():
            keep, is_clear = np.zeros_like(keep), np.ones_like(is_clear)
        keep[top], is_clear[top] = True, True
        for result in (truncated, expected):
            after = result[row].cpu().numpy()
            is_kept = after == before
            assert (is_kept | np.isneginf(after)).all()
            kept = is_kept & ~np.isneginf(before)
            assert (kept == (keep & ~np.isneginf(before)))[is_clear].all()


@property_of(NUM_ROWS, delta=thresholds)
def test_more_tokens_pass_as_epsilon_falls(device, rng, delta):
    logits = draw_logits(rng, NUM_ROWS, small_or(rng, 60, 500)).to(device)
    kept = torch.zeros_like(logits, dtype=torch.bool)
    for epsilon in (1.0, 0.3, 0.09, 0.01, 0.0):
        truncated = logits.clone()
        truncate_typical(truncated, epsilon, delta)
        now_kept = truncated > -torch.inf
        assert (now_kept | ~kept).all()
        kept = now_kept
    assert torch.equal(kept, logits > -torch.inf)


def walk_by_brute_force(
    tree,
    slot: int,
    logits: np.ndarray,
    log_z: np.ndarray,
    max_depth: int,
    max_nodes: int,
) -> list[int]:
    """The best of all acceptable paths by (depth, log-probability, lower row)."""
    best: tuple[int, np.float32, int, list[int]] = (0, np.float32(0), 0, [])
    num_nodes = 0 if slot < 0 else min(int(tree.num_nodes[slot]), len(logits) - 1)
    for row in range(1, min(num_nodes, max_nodes) + 1):
        path = path_to(tree, slot, row)
        score = np.float32(0)
        for parent, child in itertools.pairwise([0, *path]):
            value = logits[parent, int(tree.tokens[slot, child - 1])]
            score += value - log_z[parent] if value > -np.inf else np.float32(-np.inf)
        if score > -np.inf and len(path) <= max_depth:
            best = max(best, (len(path), score, -row, path))
    return best[3]


def draw_verified(device, rng, vocab_size: int, is_greedy_share: float):
    """A tree, its truncated logits, and the arguments of the walks."""
    tree = draw_tree(rng, NUM_REQS + 1, small_or(rng, 24, 128), vocab_size, "cpu")
    slots, num_rows = draw_rows(rng, tree, NUM_REQS)
    num_logits = sum(num_rows)
    logits = draw_logits(rng, num_logits, vocab_size)
    # Flat rows leave many paths of equal depth, alike rows of equal probability too.
    kind = rng.choice(["as drawn", "flat", "alike"])
    if kind == "flat":
        logits = torch.from_numpy(rng.normal(0.5, 0.2, size=logits.shape)).float()
    elif kind == "alike":
        logits[:] = 0.5
    logits = logits.to(device)
    is_greedy = torch.from_numpy(rng.random(num_logits) < is_greedy_share).to(device)
    log_z = truncate_typical(logits, 0.09, 0.3, is_greedy)
    drawn = logits.argmax(-1)
    cu_num_logits = torch.tensor([0, *num_rows]).cumsum(0).int().to(device)
    tree = move_tree(tree, device)
    return tree, slots.to(device), logits, log_z, drawn, cu_num_logits


@property_of(NUM_REQS, vocab_size=st.integers(2, 30), has_max_nodes=st.booleans())
def test_walk_equals_brute_force(device, rng, vocab_size, has_max_nodes):
    verified = draw_verified(device, rng, vocab_size, is_greedy_share=0.1)
    tree, slots, logits, log_z, drawn, cu_num_logits = verified
    max_nodes = draw_max_nodes(rng, tree.budget).to(device)
    max_depth = int(rng.integers(0, 17))
    args = (*verified, max_depth, max_nodes if has_max_nodes else None)
    walked = walk_typical(*args, use_kernel=True)
    for result, expected in zip(walked, reference.walk_typical(*args), strict=True):
        assert result.dtype == expected.dtype
        assert torch.equal(result, expected)

    path, sampled, num_sampled = (result.tolist() for result in walked)
    tree, logits, log_z = move_tree(tree, "cpu"), logits.cpu(), log_z.cpu()
    starts = cu_num_logits.tolist()
    for req_idx, (start, end) in enumerate(itertools.pairwise(starts)):
        slot = int(slots[req_idx])
        limit = int(max_nodes[req_idx]) if has_max_nodes else tree.budget
        rows, tokens = [], []
        if end > start:
            request = (logits[start:end].numpy(), log_z[start:end].numpy())
            rows = walk_by_brute_force(tree, slot, *request, max_depth, limit)
            tokens = [int(tree.tokens[slot, row - 1]) for row in rows]
            tokens.append(int(drawn[start + (rows[-1] if rows else 0)]))
        assert path[req_idx] == rows + [-1] * (max_depth - len(rows))
        assert sampled[req_idx] == tokens + [-1] * (max_depth + 1 - len(tokens))
        assert num_sampled[req_idx] == len(tokens)


@property_of(NUM_REQS, vocab_size=st.integers(2, 30))
def test_greedy_rows_walk_greedily(device, rng, vocab_size):
    """At temperature 0 the typical walk is the greedy walk."""
    verified = draw_verified(device, rng, vocab_size, is_greedy_share=1.0)
    tree, slots, logits, _, drawn, cu_num_logits = verified
    # A row without any probability has no argmax to accept.
    logits[(logits == -torch.inf).all(-1), 0] = 0.0
    typical = walk_typical(*verified, 15)
    greedy = walk_tree(tree, slots, drawn, cu_num_logits, 15)
    for result, expected in zip(typical, greedy, strict=True):
        assert torch.equal(result, expected)


def test_thresholds_of_zero_and_above_one():
    """log(0) is -inf, not an error; above 1 nothing but the argmax is typical."""
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    for epsilon, delta, expected in ((0.0, 0.3, 3), (0.09, 0.0, 3), (2.0, 99.0, 1)):
        truncated = logits.clone()
        truncate_typical(truncated, epsilon, delta)
        assert int((truncated > -math.inf).sum()) == expected
