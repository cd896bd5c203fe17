# SPDX-License-Identifier: Apache-2.0
"""Tree construction: the kernel is the heap, and the heap builds the best tree."""

import itertools

import numpy as np
import pytest
import torch
from cases import (
    assert_same_trees,
    copy_tree,
    draw_ints,
    draw_log_probs,
    draw_tokens,
    draw_top_k,
    property_of,
    small_or,
    stale_tree,
)
from hypothesis import strategies as st

from vllm_ddtree.ops.ancestors import compute_ancestors
from vllm_ddtree.ops.build import build_tree
from vllm_ddtree.ops.reference.build import build_tree as build_tree_reference
from vllm_ddtree.tree import TreeBatch, check_tree

NUM_REQS = 4


def full(value: int, num_reqs: int, device: str) -> torch.Tensor:
    return torch.full((num_reqs,), value, dtype=torch.int32, device=device)


def build_full(
    top: tuple[torch.Tensor, torch.Tensor],
    max_nodes: int,
    device: str,
    keep_spine: bool = False,
) -> TreeBatch:
    """Build without other limits: the reference on the CPU, the kernel on a GPU."""
    num_reqs, depth, top_k = top[0].shape
    tree = TreeBatch.allocate(num_reqs, max_nodes, device)
    limits = [full(limit, num_reqs, device) for limit in (max_nodes, depth, top_k)]
    tokens, log_probs = (tensor.to(device) for tensor in top)
    build_tree(tokens, log_probs, tree, None, *limits, keep_spine)
    return tree


@property_of(NUM_REQS, keep_spine=st.booleans(), has_slots=st.booleans())
def test_kernel_equals_reference(device, rng, keep_spine, has_slots):
    depth, top_k = small_or(rng, 6, 16), small_or(rng, 6, 16)
    budget = small_or(rng, 16, 256)
    tokens, log_probs = draw_top_k(rng, NUM_REQS, depth, top_k)
    limits = [
        draw_ints(rng, low, high + 2, NUM_REQS, device)
        for low, high in ((0, budget), (0, depth), (0, top_k))
    ]
    slots = None
    if has_slots:
        order = rng.permutation(2 * NUM_REQS)[:NUM_REQS]
        order[rng.random(NUM_REQS) < 0.2] = -1
        slots = torch.from_numpy(order).to(device)
    built = stale_tree(rng, 2 * NUM_REQS, budget, device)
    expected = copy_tree(built)
    top = (tokens.to(device), log_probs.to(device))
    build_tree(*top, built, slots, *limits, keep_spine, use_kernel=True)
    build_tree_reference(*top, expected, slots, *limits, keep_spine)
    assert_same_trees(built, expected)


@property_of(NUM_REQS, keep_spine=st.booleans())
def test_tree_is_valid(device, rng, keep_spine):
    """Prefix-closed, no equal siblings, sorted scores, inert padding."""
    depth, top_k = small_or(rng, 15, 63), small_or(rng, 16, 64)
    budget = small_or(rng, 64, 256)
    top = draw_top_k(rng, NUM_REQS, depth, top_k)
    tree = build_full(top, budget, device, keep_spine)
    compute_ancestors(tree)
    for slot in range(NUM_REQS):
        check_tree(tree, slot, is_best_first=not keep_spine)


@property_of(NUM_REQS, keep_spine=st.booleans())
def test_trees_are_nested(device, rng, keep_spine):
    """The tree of n nodes is the first n nodes of any larger tree."""
    top = draw_top_k(rng, NUM_REQS, small_or(rng, 8, 15), small_or(rng, 8, 16))
    large = small_or(rng, 32, 128) + 1
    small = int(rng.integers(1, large))
    small_tree = build_full(top, small, device, keep_spine)
    large_tree = build_full(top, large, device, keep_spine)
    for name in ("tokens", "parents", "depths", "scores"):
        head = getattr(large_tree, name)[:, :small]
        assert torch.equal(getattr(small_tree, name), head), name
    assert torch.equal(small_tree.num_nodes, large_tree.num_nodes.clamp(max=small))


@property_of(1)
def test_tree_is_optimal(device, rng):
    """No set of as many prefixes has more probability: brute force over all of them."""
    depth, top_k = int(rng.integers(1, 5)), int(rng.integers(1, 4))
    budget = int(rng.integers(1, 13))
    kind = str(rng.choice(["random", "tied", "uniform", "one_token", "minus_inf"]))
    rows = [draw_log_probs(rng, kind, top_k) for _ in range(depth)]
    tokens = np.stack([draw_tokens(rng, top_k) for _ in range(depth)])
    top = (torch.from_numpy(tokens)[None], torch.from_numpy(np.stack(rows))[None])
    tree = build_full(top, budget, device)
    prefixes = (
        sum(float(rows[d][rank]) for d, rank in enumerate(ranks))
        for length in range(1, depth + 1)
        for ranks in itertools.product(range(top_k), repeat=length)
    )
    best = sorted((np.exp(score) for score in prefixes), reverse=True)[:budget]
    found = tree.scores[0].double().exp().sum().item()
    assert found == pytest.approx(sum(best), abs=1e-6)
    assert int(tree.num_nodes[0]) == sum(q > 0 for q in best)


@property_of(NUM_REQS)
def test_spine_is_kept(device, rng):
    """With keep_spine the first nodes are the rank-0 tokens, depth after depth."""
    depth, top_k = small_or(rng, 8, 15), small_or(rng, 4, 16)
    budget = small_or(rng, 20, 64)
    tokens, log_probs = draw_top_k(rng, NUM_REQS, depth, top_k)
    log_probs[:, :, 0].nan_to_num_(nan=-1.0, neginf=-1.0)
    log_probs.clamp_(min=-1e6)
    tree = build_full((tokens, log_probs), budget, device, keep_spine=True)
    length = min(depth, budget)
    expected = tokens[:, :length, 0].to(device)
    assert torch.equal(tree.tokens[:, :length], expected)
    assert torch.equal(tree.parents[0, :length].cpu(), torch.arange(length).int())


@property_of(NUM_REQS)
def test_one_rank_is_the_chain(device, rng):
    """A chain runs to the limits, or to the first depth without probability."""
    depth, budget = small_or(rng, 15, 63), small_or(rng, 20, 64)
    tokens, log_probs = draw_top_k(rng, NUM_REQS, depth, 1)
    log_probs = torch.where(log_probs < -1e6, -torch.inf, log_probs)
    tree = build_full((tokens, log_probs), budget, device)
    for req_idx in range(NUM_REQS):
        is_dead = ~(log_probs[req_idx, :, 0] > -torch.inf)
        length = int(is_dead.int().argmax()) if is_dead.any() else depth
        length = min(length, budget)
        assert int(tree.num_nodes[req_idx]) == length
        assert (
            tree.tokens[req_idx, :length].tolist()
            == tokens[req_idx, :length, 0].tolist()
        )
        assert tree.parents[req_idx, :length].tolist() == list(range(length))


@pytest.mark.parametrize("limit", ["max_nodes", "max_depth", "max_rank"])
def test_limit_zero_is_a_bare_root(device, limit):
    rng = np.random.default_rng(0)
    tokens, log_probs = draw_top_k(rng, 1, 3, 4)
    tree = stale_tree(rng, 1, 8, device)
    limits = {"max_nodes": 8, "max_depth": 3, "max_rank": 4, limit: 0}
    build_tree(
        tokens.to(device),
        log_probs.to(device),
        tree,
        None,
        *[full(value, 1, device) for value in limits.values()],
        use_kernel=True,
    )
    compute_ancestors(tree, use_kernel=True)
    assert_same_trees(tree, TreeBatch.allocate(1, 8, device))


@pytest.mark.parametrize(("depth", "top_k", "budget"), [(63, 2, 70), (2, 1024, 1024)])
def test_ends_of_the_key_fields(device, depth, top_k, budget):
    """Depth 63 and rank 1023 fit the packed key."""
    tokens = torch.arange(depth * top_k, device=device).view(1, depth, top_k)
    log_probs = torch.full((1, depth, top_k), -1e-3, device=device)
    if depth == 63:
        log_probs[:, :, 1:] = -100.0
    limits = [full(value, 1, device) for value in (budget, depth, top_k)]
    built = TreeBatch.allocate(1, budget, device)
    expected = TreeBatch.allocate(1, budget, device)
    build_tree(tokens, log_probs, built, None, *limits, use_kernel=True)
    build_tree_reference(tokens, log_probs, expected, None, *limits)
    assert_same_trees(built, expected)
    assert int(built.num_nodes[0]) == budget


@pytest.mark.parametrize(("depth", "top_k"), [(64, 2), (2, 1025)])
def test_too_large_for_the_key_is_refused(device, depth, top_k):
    tree = TreeBatch.allocate(1, 4, device)
    tokens = torch.zeros(1, depth, top_k, dtype=torch.int64, device=device)
    limits = [full(1, 1, device)] * 3
    with pytest.raises(ValueError, match="the most are 63 and 1024"):
        build_tree(tokens, tokens.float(), tree, None, *limits)
