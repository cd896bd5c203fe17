# SPDX-License-Identifier: Apache-2.0
"""The tree buffers, and validators that catch what they are there to catch."""

from collections.abc import Callable

import pytest
import torch

from vllm_ddtree.ops.ancestors import compute_ancestors
from vllm_ddtree.ops.build import build_tree
from vllm_ddtree.tree import (
    MAX_BUDGET,
    TreeBatch,
    check_tree,
    num_ancestor_words,
    own_bits,
)

NUM_NODES = 6
BUDGET = 70
SLOT = 1


def make_tree() -> TreeBatch:
    """Slot 1 has six nodes: two depths of three ranks, the best of them."""
    log_probs = torch.tensor([[[0.5, 0.3, 0.2], [0.6, 0.3, 0.1]]]).log()
    tokens = torch.tensor([[[7, 3, 5], [4, 8, 2]]])
    tree = TreeBatch.allocate(2, BUDGET, "cpu")
    limits = [torch.tensor([limit]) for limit in (NUM_NODES, 2, 3)]
    build_tree(tokens, log_probs, tree, torch.tensor([SLOT]), *limits)
    compute_ancestors(tree)
    return tree


def test_a_built_tree_passes() -> None:
    check_tree(make_tree(), SLOT)


@pytest.mark.parametrize("budget", [1, 62, 63, 64, 127, 128, MAX_BUDGET])
def test_allocation_is_bare_roots(budget: int) -> None:
    tree = TreeBatch.allocate(3, budget, "cpu")
    assert (tree.num_slots, tree.budget, tree.width) == (3, budget, budget + 1)
    assert tree.ancestors.shape[-1] == num_ancestor_words(budget) == budget // 64 + 1
    for slot in range(3):
        check_tree(tree, slot)


@pytest.mark.parametrize("budget", [0, MAX_BUDGET + 1])
def test_a_budget_out_of_range_is_refused(budget: int) -> None:
    with pytest.raises(ValueError, match=f"budget={budget} is not in"):
        TreeBatch.allocate(1, budget, "cpu")


def test_own_bits_are_one_per_row() -> None:
    words = own_bits(64, "cpu")
    assert words[63].tolist() == [-(2**63), 0]
    assert words[64].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("parents", torch.zeros(2, BUDGET + 1, dtype=torch.int32), "parents is"),
        ("scores", torch.zeros(2, BUDGET, dtype=torch.float64), "scores is"),
        ("num_nodes", torch.zeros(4, dtype=torch.int32)[::2], "must be contiguous"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    name: str, value: torch.Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        TreeBatch(**{**vars(make_tree()), name: value})


def swap_first_two(tree: TreeBatch) -> None:
    """Scores no longer descend; both are children of the root."""
    tree.scores[SLOT, :2] = tree.scores[SLOT, :2].flip(0)


def repeat_sibling(tree: TreeBatch) -> None:
    rows = (tree.parents[SLOT, :NUM_NODES] == 0).nonzero()[:, 0]
    tree.tokens[SLOT, rows[1]] = tree.tokens[SLOT, rows[0]]


def hang_from_itself(tree: TreeBatch) -> None:
    tree.parents[SLOT, 2] = 3


def deepen(tree: TreeBatch) -> None:
    tree.depths[SLOT, 3] += 1


def forget_a_token(tree: TreeBatch) -> None:
    tree.tokens[SLOT, 0] = -1


def see_a_stranger(tree: TreeBatch) -> None:
    tree.ancestors[SLOT, 2, 1] |= 1


def lose_sight_of_the_root(tree: TreeBatch) -> None:
    tree.ancestors[SLOT, 2, 0] &= ~1


def wake_padding(tree: TreeBatch) -> None:
    tree.parents[SLOT, NUM_NODES] = 2


def have_no_chance(tree: TreeBatch) -> None:
    tree.scores[SLOT, NUM_NODES - 1] = -torch.inf


def overflow(tree: TreeBatch) -> None:
    tree.num_nodes[SLOT] = BUDGET + 1


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (swap_first_two, "scores above"),
        (repeat_sibling, "repeats a sibling's token"),
        (hang_from_itself, "has parent row 3"),
        (deepen, "has depth"),
        (forget_a_token, "has token -1"),
        (see_a_stranger, "not its ancestors"),
        (lose_sight_of_the_root, "not its ancestors"),
        (wake_padding, "padding of parents"),
        (have_no_chance, "has score -inf"),
        (overflow, "71 nodes, budget 70"),
    ],
)
def test_each_corruption_is_caught(
    corrupt: Callable[[TreeBatch], None], message: str
) -> None:
    tree = make_tree()
    corrupt(tree)
    with pytest.raises(ValueError, match=message):
        check_tree(tree, SLOT)
    check_tree(tree, slot=0)


def test_a_tree_around_its_spine_need_not_descend() -> None:
    tree = make_tree()
    swap_first_two(tree)
    check_tree(tree, SLOT, is_best_first=False)
