# SPDX-License-Identifier: Apache-2.0
"""Ancestor bit masks, one lane per row and word."""

import torch
from vllm.triton_utils import tl, triton

from vllm_ddtree.ops.reference.ancestors import (
    compute_ancestors as compute_ancestors_reference,
)
from vllm_ddtree.tree import TreeBatch, num_ancestor_words

_BLOCK_ROWS = 32


@triton.jit
def _compute_ancestors_kernel(
    # [num_slots, BUDGET]
    parents_ptr,
    depths_ptr,
    # [num_slots]
    num_nodes_ptr,
    # [num_slots, BUDGET + 1, NUM_WORDS]
    ancestors_ptr,
    # [num_reqs]
    slots_ptr,
    BUDGET: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
):
    slot = tl.program_id(0).to(tl.int64)
    if HAS_SLOTS:
        slot = tl.load(slots_ptr + slot).to(tl.int64)
    if slot < 0:
        return
    rows = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    words = tl.arange(0, BLOCK_WORDS)
    num_nodes = tl.load(num_nodes_ptr + slot)
    parents_ptr += slot * BUDGET
    depths_ptr += slot * BUDGET

    is_node = (rows > 0) & (rows <= num_nodes)
    depths = tl.load(depths_ptr + rows - 1, mask=is_node, other=0)
    one = tl.full([BLOCK_ROWS, BLOCK_WORDS], 1, dtype=tl.int64)
    mask = tl.zeros([BLOCK_ROWS, BLOCK_WORDS], dtype=tl.int64)
    row = rows
    for _ in range(0, tl.max(depths, axis=0) + 1):
        is_word = (row >> 6)[:, None] == words[None, :]
        bit = one << (row & 63)[:, None].to(tl.int64)
        mask |= tl.where(is_word, bit, 0)
        # The root and padding stay where they are and set their bit again.
        parent = tl.load(parents_ptr + row - 1, mask=is_node & (row > 0), other=0)
        row = tl.where(is_node, parent, row)
    out = (slot * (BUDGET + 1) + rows)[:, None] * NUM_WORDS + words[None, :]
    in_bounds = (rows <= BUDGET)[:, None] & (words < NUM_WORDS)[None, :]
    tl.store(ancestors_ptr + out, mask, mask=in_bounds)


def compute_ancestors(
    tree: TreeBatch,
    # [num_reqs] rows of `tree` to fill, negative to skip; None is all of them
    slots: torch.Tensor | None = None,
    *,
    use_kernel: bool = False,
) -> None:
    """Fill `tree.ancestors` of the slots from parents, depths and num_nodes.

    Rows past the last node see only themselves. One launch, no host sync, safe under
    CUDA graph capture. CPU tensors take the reference unless `use_kernel`.
    """
    if tree.device.type == "cpu" and not use_kernel:
        compute_ancestors_reference(tree, slots)
        return
    num_reqs = tree.num_slots if slots is None else slots.shape[0]
    if num_reqs == 0:
        return
    num_words = num_ancestor_words(tree.budget)
    _compute_ancestors_kernel[(num_reqs, triton.cdiv(tree.width, _BLOCK_ROWS))](
        tree.parents,
        tree.depths,
        tree.num_nodes,
        tree.ancestors,
        slots,
        BUDGET=tree.budget,
        NUM_WORDS=num_words,
        BLOCK_ROWS=_BLOCK_ROWS,
        BLOCK_WORDS=triton.next_power_of_2(num_words),
        HAS_SLOTS=slots is not None,
        num_warps=1,
    )
