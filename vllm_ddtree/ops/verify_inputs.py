# SPDX-License-Identifier: Apache-2.0
"""Turn a batch of chains, as the runner prepared it, into a batch of trees."""

import torch
from vllm.triton_utils import tl, triton

from vllm_ddtree.ops.reference import verify_inputs as reference
from vllm_ddtree.tree import TreeBatch


@triton.jit
def _prepare_verify_inputs_kernel(
    # [max_num_reqs]
    tree_slots_ptr,
    # [num_tokens]
    positions_ptr,
    # [num_slots, budget]
    depths_ptr,
    depths_stride,
    # [num_slots]
    prefill_len_ptr,
    # [num_reqs]
    idx_mapping_ptr,
    # [num_reqs + 1]
    query_start_loc_ptr,
    # [num_reqs + 1]
    cu_num_logits_ptr,
    num_reqs,
    BLOCK_SIZE: tl.constexpr,
):
    req_idx = tl.program_id(0)
    if req_idx >= num_reqs:
        tl.store(tree_slots_ptr + req_idx, -1)
        return
    num_rows = tl.load(cu_num_logits_ptr + req_idx + 1) - tl.load(
        cu_num_logits_ptr + req_idx
    )
    root = tl.load(query_start_loc_ptr + req_idx + 1) - num_rows
    slot = tl.load(idx_mapping_ptr + req_idx)
    root_pos = tl.load(positions_ptr + root)
    # A request still inside its prompt has no tree: drafts there are placeholders.
    if (num_rows < 2) | (root_pos < tl.load(prefill_len_ptr + slot)):
        tl.store(tree_slots_ptr + req_idx, -1)
        return
    tl.store(tree_slots_ptr + req_idx, slot.to(tl.int32))
    for start in range(0, num_rows - 1, BLOCK_SIZE):
        node = start + tl.arange(0, BLOCK_SIZE)
        mask = node < num_rows - 1
        depth = tl.load(depths_ptr + slot * depths_stride + node, mask=mask, other=0)
        tl.store(positions_ptr + root + 1 + node, root_pos + depth, mask=mask)


def prepare_verify_inputs(
    tree: TreeBatch,
    # [max_num_reqs] int32, written: slot of the tree of each batch row, or -1
    tree_slots: torch.Tensor,
    # [num_tokens] int64, rewritten in place: storage position -> depth position
    positions: torch.Tensor,
    # [num_reqs] int64
    idx_mapping: torch.Tensor,
    # [num_reqs + 1] int32
    query_start_loc: torch.Tensor,
    # [num_reqs + 1] int32
    cu_num_logits: torch.Tensor,
    # [max_num_reqs] int32
    prefill_len: torch.Tensor,
    *,
    use_kernel: bool = False,
) -> None:
    """Mark the tree requests of a batch and move their rows to depth positions.

    The rows of a request are its last `cu_num_logits` query rows. Row i of a tree
    request gets position L + depth(i), L being the root's. No host sync.
    """
    if not (use_kernel or positions.is_cuda):
        reference.prepare_verify_inputs(
            tree,
            tree_slots,
            positions,
            idx_mapping,
            query_start_loc,
            cu_num_logits,
            prefill_len,
        )
        return
    _prepare_verify_inputs_kernel[(tree_slots.shape[0],)](
        tree_slots,
        positions,
        tree.depths,
        tree.depths.stride(0),
        prefill_len,
        idx_mapping,
        query_start_loc,
        cu_num_logits,
        idx_mapping.shape[0],
        BLOCK_SIZE=triton.next_power_of_2(tree.budget),
        num_warps=1,
    )


@triton.jit
def _restore_positions_kernel(
    # [num_tokens]
    positions_ptr,
    # [num_reqs + 1]
    query_start_loc_ptr,
    # [num_reqs + 1]
    cu_num_logits_ptr,
    BLOCK_SIZE: tl.constexpr,
):
    req_idx = tl.program_id(0)
    num_rows = tl.load(cu_num_logits_ptr + req_idx + 1) - tl.load(
        cu_num_logits_ptr + req_idx
    )
    root = tl.load(query_start_loc_ptr + req_idx + 1) - num_rows
    root_pos = tl.load(positions_ptr + root)
    for start in range(0, num_rows, BLOCK_SIZE):
        row = start + tl.arange(0, BLOCK_SIZE)
        tl.store(positions_ptr + root + row, root_pos + row, mask=row < num_rows)


def restore_positions(
    # [num_tokens] int64, rewritten in place: depth position -> storage position
    positions: torch.Tensor,
    # [num_reqs + 1] int32
    query_start_loc: torch.Tensor,
    # [num_reqs + 1] int32
    cu_num_logits: torch.Tensor,
    budget: int,
    *,
    use_kernel: bool = False,
) -> None:
    """Undo `prepare_verify_inputs`: row i of every request is at L + i again."""
    if not (use_kernel or positions.is_cuda):
        reference.restore_positions(positions, query_start_loc, cu_num_logits, budget)
        return
    _restore_positions_kernel[(cu_num_logits.shape[0] - 1,)](
        positions,
        query_start_loc,
        cu_num_logits,
        BLOCK_SIZE=triton.next_power_of_2(budget + 1),
        num_warps=1,
    )
