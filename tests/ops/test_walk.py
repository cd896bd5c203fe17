# SPDX-License-Identifier: Apache-2.0
"""The walk takes the path that brute force over all nodes finds."""

import itertools

import numpy as np
import torch
from cases import draw_tree, move_tree, property_of, small_or
from hypothesis import strategies as st

from vllm_ddtree.ops.reference.walk import walk_tree as walk_tree_reference
from vllm_ddtree.ops.walk import walk_tree
from vllm_ddtree.tree import TreeBatch

NUM_REQS = 4


def path_to(tree: TreeBatch, slot: int, row: int) -> list[int]:
    """Rows from the root's child down to `row`."""
    path = []
    while row > 0:
        path.append(row)
        row = int(tree.parents[slot, row - 1])
    return path[::-1]


def walk_by_brute_force(
    tree: TreeBatch, slot: int, chosen: list[int], max_depth: int, max_nodes: int
) -> tuple[list[int], list[int]]:
    """The longest path whose every token is the choice at its parent, and tokens."""
    best: list[int] = []
    num_nodes = 0 if slot < 0 else min(int(tree.num_nodes[slot]), len(chosen) - 1)
    for row in range(1, min(num_nodes, max_nodes) + 1):
        path = path_to(tree, slot, row)
        tokens = [int(tree.tokens[slot, r - 1]) for r in path]
        parents = [0, *path[:-1]]
        if tokens == [chosen[p] for p in parents] and len(path) > len(best):
            best = path
    best = best[:max_depth]
    return best, [chosen[row] for row in [0, *best]]


def draw_rows(rng, tree: TreeBatch, num_reqs: int) -> tuple[torch.Tensor, list[int]]:
    """Slots of the requests, and how many verify rows each has."""
    slots = rng.permutation(tree.num_slots)[:num_reqs]
    num_rows = []
    for slot in slots:
        n = int(tree.num_nodes[slot]) + 1
        num_rows.append(int(rng.choice([n, n, n, rng.integers(0, n + 3), 1, 0])))
    slots[rng.random(num_reqs) < 0.1] = -1
    return torch.from_numpy(slots), num_rows


def draw_max_nodes(rng, budget: int) -> torch.Tensor:
    """Limits of the nodes to use, none and more than there are among them."""
    limits = rng.integers(0, budget + 2, size=NUM_REQS)
    limits[rng.random(NUM_REQS) < 0.3] = rng.choice([0, 1, 2**31 - 1])
    return torch.from_numpy(limits.astype(np.int32))


def draw_choices(rng, tree: TreeBatch, slot: int, num_rows: int, vocab_size: int):
    """Target tokens that often are a child's."""
    chosen = rng.integers(-1, vocab_size, size=num_rows)
    if slot >= 0:
        for node in rng.permutation(int(tree.num_nodes[slot])):
            parent = int(tree.parents[slot, node])
            if parent < num_rows and rng.random() < 0.7:
                chosen[parent] = int(tree.tokens[slot, node])
    return chosen.tolist()


@property_of(NUM_REQS, vocab_size=st.integers(2, 30), has_max_nodes=st.booleans())
def test_walk_equals_brute_force(device, rng, vocab_size, has_max_nodes):
    budget = small_or(rng, 32, 256)
    drawn = draw_tree(rng, NUM_REQS + 1, budget, vocab_size, "cpu")
    slots, num_rows = draw_rows(rng, drawn, NUM_REQS)
    choices = [
        draw_choices(rng, drawn, slot, n, vocab_size)
        for slot, n in zip(slots.tolist(), num_rows, strict=True)
    ]
    cu_num_logits = torch.tensor([0, *num_rows]).cumsum(0).int().to(device)
    target_tokens = torch.tensor([*itertools.chain(*choices)], device=device).long()
    max_nodes = draw_max_nodes(rng, budget).to(device)
    max_depth = int(rng.integers(0, 17))
    tree = move_tree(drawn, device)
    args = (tree, slots.to(device), target_tokens, cu_num_logits, max_depth)
    args += (max_nodes if has_max_nodes else None,)
    walked = walk_tree(*args, use_kernel=True)
    for result, expected in zip(walked, walk_tree_reference(*args), strict=True):
        assert result.dtype == expected.dtype
        assert torch.equal(result, expected)

    path, sampled, num_sampled = (result.tolist() for result in walked)
    for req_idx, chosen in enumerate(choices):
        slot = int(slots[req_idx])
        limit = int(max_nodes[req_idx]) if has_max_nodes else budget
        rows, tokens = [], []
        if chosen:
            rows, tokens = walk_by_brute_force(drawn, slot, chosen, max_depth, limit)
        assert path[req_idx] == rows + [-1] * (max_depth - len(rows))
        assert sampled[req_idx] == tokens + [-1] * (max_depth + 1 - len(tokens))
        assert num_sampled[req_idx] == len(tokens)


def test_a_placeholder_is_not_the_token_of_padding(device):
    """Target token -1 must not match the -1 that pads a tree."""
    tree = TreeBatch.allocate(1, 4, device)
    rows = torch.full((5,), -1, device=device)
    cu_num_logits = torch.tensor([0, 5], dtype=torch.int32, device=device)
    slots = torch.zeros(1, dtype=torch.int64, device=device)
    path, sampled, num_sampled = walk_tree(
        tree, slots, rows, cu_num_logits, 3, use_kernel=True
    )
    assert path.tolist() == [[-1] * 3]
    assert sampled.tolist() == [[-1] * 4]
    assert num_sampled.tolist() == [1]
