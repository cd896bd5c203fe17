# SPDX-License-Identifier: Apache-2.0
"""Ancestor masks: the transitive closure of the parent relation."""

from __future__ import annotations

import torch

from vllm_ddtree.tree import WORD_BITS, TreeBatch, own_bits


def compute_ancestors(tree: TreeBatch, slots: torch.Tensor | None = None) -> None:
    """Fill `tree.ancestors` of the slots from `tree.parents` and `tree.num_nodes`.

    A row sees itself, the root, and every row on the way between them: exactly the
    visibility of arXiv 2604.12989, vis(i) = vis(parent(i)) with i added. Bit j % 64
    of word j // 64 of row i is set iff row i sees row j. Rows past the last node see
    only themselves. Parents precede their children, so one pass over the rows is
    enough. `slots` [num_reqs] are the rows of `tree` to fill, negative to skip; None
    is all of them.
    """
    own = own_bits(tree.budget, tree.device)
    for slot in range(tree.num_slots) if slots is None else slots.tolist():
        if slot < 0:
            continue
        masks = tree.ancestors[slot]
        masks.copy_(own)
        parents = tree.parents[slot, : int(tree.num_nodes[slot])].tolist()
        for row, parent in enumerate(parents, start=1):
            masks[row] |= masks[parent]


def is_ancestor(tree: TreeBatch, slot: int) -> torch.Tensor:
    """Unpack the masks of a slot: `[width, width]` bool, row i sees row j."""
    shifts = torch.arange(WORD_BITS, device=tree.device)
    bits = (tree.ancestors[slot][:, :, None] >> shifts) & 1
    return bits.flatten(1)[:, : tree.width].bool()
