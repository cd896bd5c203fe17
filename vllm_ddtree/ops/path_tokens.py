# SPDX-License-Identifier: Apache-2.0
"""The drafts on the way to every row of a batch of trees."""

import torch
from vllm.triton_utils import tl, triton

from vllm_ddtree.ops.reference.path_tokens import (
    gather_path_tokens as gather_path_tokens_reference,
)
from vllm_ddtree.tree import TreeBatch

_BLOCK_ROWS = 64


@triton.jit
def _gather_path_tokens_kernel(
    # [num_slots, BUDGET]
    tokens_ptr,
    parents_ptr,
    depths_ptr,
    # [num_slots]
    num_nodes_ptr,
    # [num_reqs]
    slots_ptr,
    # [num_reqs + 1]
    cu_num_logits_ptr,
    # [num_logits, MAX_DEPTH]
    path_tokens_ptr,
    # [num_logits]
    row_depths_ptr,
    BUDGET: tl.constexpr,
    MAX_DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
):
    req_idx = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + req_idx).to(tl.int64)
    start = tl.load(cu_num_logits_ptr + req_idx).to(tl.int64)
    num_rows = (tl.load(cu_num_logits_ptr + req_idx + 1) - start).to(tl.int32)
    num_nodes = tl.load(num_nodes_ptr + slot, mask=slot >= 0, other=0)

    rows = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    has_row = rows < num_rows
    rows = tl.where(has_row & (rows <= num_nodes), rows, 0)
    node = slot * BUDGET + rows - 1
    depths = tl.load(depths_ptr + node, mask=rows > 0, other=0)
    out_rows = start + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(row_depths_ptr + out_rows, depths, mask=has_row)

    # From each row to the root, all rows at once; -1 where a path has no token.
    levels = tl.arange(0, BLOCK_DEPTH)
    out = path_tokens_ptr + out_rows[:, None] * MAX_DEPTH + levels[None, :]
    is_padding = (levels[None, :] >= depths[:, None]) & (levels[None, :] < MAX_DEPTH)
    padding = tl.full([BLOCK, BLOCK_DEPTH], -1, dtype=tl.int64)
    tl.store(out, padding, mask=has_row[:, None] & is_padding)
    for step in range(0, tl.max(depths, axis=0)):
        node = slot * BUDGET + rows - 1
        is_node = rows > 0
        tokens = tl.load(tokens_ptr + node, mask=is_node, other=-1)
        place = path_tokens_ptr + out_rows * MAX_DEPTH + depths - 1 - step
        tl.store(place, tokens, mask=is_node)
        rows = tl.load(parents_ptr + node, mask=is_node, other=0)


def gather_path_tokens(
    tree: TreeBatch,
    # [num_reqs] slot of each request, negative for a bare root
    slots: torch.Tensor,
    # [num_reqs + 1]
    cu_num_logits: torch.Tensor,
    num_logits: int,
    max_depth: int,
    *,
    use_kernel: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of each row's path from the root's child down to the row itself.

    Row j of request r is `cu_num_logits[r] + j`; roots and rows without a node have
    an empty path. `max_depth` must not be below the depth of any node.
    Returns `path_tokens` [num_logits, max_depth] int64, padding -1, and `row_depths`
    [num_logits] int32. No host sync. CPU tensors take the reference unless
    `use_kernel`.
    """
    if slots.device.type == "cpu" and not use_kernel:
        return gather_path_tokens_reference(
            tree, slots, cu_num_logits, num_logits, max_depth
        )
    path_tokens = tree.tokens.new_empty(num_logits, max_depth)
    row_depths = tree.depths.new_empty(num_logits)
    num_reqs = slots.shape[0]
    if num_logits == 0:
        return path_tokens, row_depths
    _gather_path_tokens_kernel[(num_reqs, triton.cdiv(tree.width, _BLOCK_ROWS))](
        tree.tokens,
        tree.parents,
        tree.depths,
        tree.num_nodes,
        slots,
        cu_num_logits,
        path_tokens,
        row_depths,
        BUDGET=tree.budget,
        MAX_DEPTH=max_depth,
        BLOCK=_BLOCK_ROWS,
        BLOCK_DEPTH=triton.next_power_of_2(max_depth),
        num_warps=1,
    )
    return path_tokens, row_depths
