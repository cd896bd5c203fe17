# SPDX-License-Identifier: Apache-2.0
"""The vocabulary of DDTree, and the device tensors that hold a batch of trees.

A verify step of a request has 1 + B *rows*. Row 0 is the *root*, the bonus token
of the step before; row i + 1 is *node* i, a drafted token.

* budget: B, the number of drafted nodes, root excluded.
* width: the number of rows, 1 + B.
* parent: the row a node hangs from; always a smaller row.
* depth: the distance to the root; the root's depth is 0.
* ancestors of a row: the rows on the way to the root, root included.
* spine: the argmax chain, the rank-0 token at every depth.
* path: the accepted rows, in order of depth, root excluded.
* bonus: the token the target chose at the last row of the path.
* slot: the persistent place of a request in the buffers.

Nodes are stored in the order in which they were added, so parents come before
their children and the first n nodes of a tree are the tree of n nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_BUDGET = 1024
MAX_DEPTH = 63
WORD_BITS = 64


@dataclass(frozen=True)
class TreeBatch:
    """Trees of `num_slots` requests in tensors of fixed size.

    Node i of a slot is in use iff i < num_nodes[slot]; the others are padding and
    hold the padding values below, so a kernel may read them without harm.
    """

    # [num_slots, budget] int64, padding -1
    tokens: torch.Tensor
    # [num_slots, budget] int32, row of the parent, padding 0
    parents: torch.Tensor
    # [num_slots, budget] int32, 1 for the root's children, padding 0
    depths: torch.Tensor
    # [num_slots, budget] float32, cumulative log-probability, padding -inf
    scores: torch.Tensor
    # [num_slots] int32
    num_nodes: torch.Tensor
    # [num_slots, width, ceil(width / 64)] int64: bit j % 64 of word j // 64 of row i
    # says that row j is row i or one of its ancestors; padding rows see themselves
    ancestors: torch.Tensor

    def __post_init__(self) -> None:
        num_slots, budget = self.tokens.shape
        width = budget + 1
        num_words = num_ancestor_words(budget)
        expected = {
            "tokens": ((num_slots, budget), torch.int64),
            "parents": ((num_slots, budget), torch.int32),
            "depths": ((num_slots, budget), torch.int32),
            "scores": ((num_slots, budget), torch.float32),
            "num_nodes": ((num_slots,), torch.int32),
            "ancestors": ((num_slots, width, num_words), torch.int64),
        }
        for name, (shape, dtype) in expected.items():
            tensor = getattr(self, name)
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                raise ValueError(
                    f"TreeBatch.{name} is {tensor.dtype}{list(tensor.shape)}, "
                    f"expected {dtype}{list(shape)}"
                )
            if not tensor.is_contiguous():
                raise ValueError(f"TreeBatch.{name} must be contiguous")

    @property
    def num_slots(self) -> int:
        return self.tokens.shape[0]

    @property
    def budget(self) -> int:
        return self.tokens.shape[1]

    @property
    def width(self) -> int:
        return self.budget + 1

    @property
    def device(self) -> torch.device:
        return self.tokens.device

    @classmethod
    def allocate(
        cls, num_slots: int, budget: int, device: torch.device | str
    ) -> TreeBatch:
        """Make `num_slots` bare roots with room for `budget` nodes each."""
        if not 1 <= budget <= MAX_BUDGET:
            raise ValueError(f"budget={budget} is not in 1..{MAX_BUDGET}")
        shape = (num_slots, budget)
        return cls(
            tokens=torch.full(shape, -1, dtype=torch.int64, device=device),
            parents=torch.zeros(shape, dtype=torch.int32, device=device),
            depths=torch.zeros(shape, dtype=torch.int32, device=device),
            scores=torch.full(shape, -torch.inf, device=device),
            num_nodes=torch.zeros(num_slots, dtype=torch.int32, device=device),
            ancestors=own_bits(budget, device).repeat(num_slots, 1, 1),
        )


def num_ancestor_words(budget: int) -> int:
    """Number of 64-bit words in the ancestor mask of one row."""
    return -(-(budget + 1) // WORD_BITS)


def own_bits(budget: int, device: torch.device | str) -> torch.Tensor:
    """Ancestor masks `[width, num_words]` int64 in which every row sees itself only."""
    rows = torch.arange(budget + 1, device=device)
    words = torch.zeros(
        budget + 1, num_ancestor_words(budget), dtype=torch.int64, device=device
    )
    words[rows, rows // WORD_BITS] = torch.ones_like(rows) << (rows % WORD_BITS)
    return words


def check_tree(tree: TreeBatch, slot: int, *, is_best_first: bool = True) -> None:
    """Raise ValueError unless the tree of `slot` keeps every promise of TreeBatch.

    With `is_best_first` the scores must not increase from node to node, which holds
    unless the tree was built around its spine. For tests and debugging: it copies
    the slot to the host.
    """
    num_nodes = int(tree.num_nodes[slot])
    if not 0 <= num_nodes <= tree.budget:
        raise ValueError(f"slot {slot}: {num_nodes} nodes, budget {tree.budget}")
    _check_padding(tree, slot, num_nodes)
    _check_shape(tree, slot, num_nodes)
    _check_scores(tree.scores[slot, :num_nodes].tolist(), slot, is_best_first)
    _check_ancestors(tree, slot, num_nodes)


def _check_padding(tree: TreeBatch, slot: int, num_nodes: int) -> None:
    padding = (
        ("tokens", tree.tokens, -1),
        ("parents", tree.parents, 0),
        ("depths", tree.depths, 0),
        ("scores", tree.scores, -torch.inf),
    )
    for name, values, fill in padding:
        if not bool((values[slot, num_nodes:] == fill).all()):
            raise ValueError(f"slot {slot}: padding of {name} is not {fill}")


def _check_shape(tree: TreeBatch, slot: int, num_nodes: int) -> None:
    tokens = tree.tokens[slot, :num_nodes].tolist()
    parents = tree.parents[slot, :num_nodes].tolist()
    row_depths = [0, *tree.depths[slot, :num_nodes].tolist()]
    siblings = set()
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        row = node + 1
        if not 0 <= parent < row:
            raise ValueError(f"slot {slot}: row {row} has parent row {parent}")
        if row_depths[row] != row_depths[parent] + 1:
            raise ValueError(
                f"slot {slot}: row {row} has depth {row_depths[row]}, its parent "
                f"{row_depths[parent]}"
            )
        if token < 0:
            raise ValueError(f"slot {slot}: row {row} has token {token}")
        if (parent, token) in siblings:
            raise ValueError(f"slot {slot}: row {row} repeats a sibling's token")
        siblings.add((parent, token))


def _check_scores(scores: list[float], slot: int, is_best_first: bool) -> None:
    for node, score in enumerate(scores):
        if not score > -torch.inf:
            raise ValueError(f"slot {slot}: node {node} has score {score}")
        if is_best_first and node > 0 and score > scores[node - 1]:
            raise ValueError(f"slot {slot}: node {node} scores above the one before")


def _check_ancestors(tree: TreeBatch, slot: int, num_nodes: int) -> None:
    parents = tree.parents[slot, :num_nodes].tolist()
    closure = [1]
    for node, parent in enumerate(parents):
        closure.append(closure[parent] | 1 << (node + 1))
    closure += [1 << row for row in range(num_nodes + 1, tree.width)]
    for row, words in enumerate(tree.ancestors[slot].tolist()):
        seen = sum(
            (word % 2**WORD_BITS) << (WORD_BITS * i) for i, word in enumerate(words)
        )
        if seen != closure[row]:
            raise ValueError(
                f"slot {slot}: row {row} sees {seen:#x}, not its ancestors"
            )
