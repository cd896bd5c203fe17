# SPDX-License-Identifier: Apache-2.0
"""Ancestor masks are the transitive closure of the parents."""

import numpy as np
import pytest
import torch
from cases import (
    assert_same_trees,
    closure_of,
    copy_tree,
    draw_tree,
    poison,
    property_of,
)
from hypothesis import strategies as st

from vllm_ddtree.ops.ancestors import compute_ancestors
from vllm_ddtree.ops.reference.ancestors import (
    compute_ancestors as compute_ancestors_reference,
)
from vllm_ddtree.ops.reference.ancestors import is_ancestor
from vllm_ddtree.tree import TreeBatch

WORD_EDGES = (2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257)


def assert_closure(tree: TreeBatch, slot: int) -> None:
    parents = tree.parents[slot, : int(tree.num_nodes[slot])].tolist()
    expected = closure_of(parents, tree.width)
    assert torch.equal(is_ancestor(tree, slot).cpu(), expected)


@property_of(2, width=st.integers(2, 66), has_slots=st.booleans())
def test_kernel_equals_reference_and_closure(device, rng, width, has_slots):
    tree = draw_tree(rng, 3, width - 1, vocab_size=20, device=device)
    poison(tree.ancestors)
    expected = copy_tree(tree)
    slots = torch.tensor([2, -1, 0], device=device) if has_slots else None
    compute_ancestors(tree, slots, use_kernel=True)
    compute_ancestors_reference(expected, slots)
    assert_same_trees(tree, expected)
    for slot in (0, 2):
        assert_closure(tree, slot)


@pytest.mark.parametrize("width", WORD_EDGES)
def test_kernel_at_the_edges_of_words(device, width):
    tree = draw_tree(np.random.default_rng(width), 1, width - 1, 40, device)
    poison(tree.ancestors)
    compute_ancestors(tree, use_kernel=True)
    assert_closure(tree, 0)


def test_every_width_up_to_260(device):
    """The reference on the CPU, the kernel on a GPU; width 1 is a bare root."""
    for width in range(2, 261):
        tree = draw_tree(np.random.default_rng(width), 2, width - 1, 40, device)
        tree.num_nodes[0] = 0
        compute_ancestors(tree)
        for slot in range(2):
            assert_closure(tree, slot)


@pytest.mark.parametrize("budget", [63, 1024])
def test_a_chain_of_full_depth(device, budget):
    tree = TreeBatch.allocate(1, budget, device)
    depth = 63
    tree.parents[0, :depth] = torch.arange(depth, device=device).int()
    tree.depths[0, :depth] = torch.arange(1, depth + 1, device=device).int()
    tree.num_nodes[0] = depth
    compute_ancestors(tree, use_kernel=True)
    assert_closure(tree, 0)
