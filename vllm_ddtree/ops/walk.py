# SPDX-License-Identifier: Apache-2.0
"""The greedy or sampled walk down a verified tree, one program per request."""

import torch
from vllm.triton_utils import tl, triton

from vllm_ddtree.ops.reference.walk import walk_tree as walk_tree_reference
from vllm_ddtree.tree import TreeBatch


@triton.jit
def _walk_tree_kernel(
    # [num_slots, BUDGET]
    tokens_ptr,
    parents_ptr,
    # [num_slots]
    num_nodes_ptr,
    # [num_reqs]
    slots_ptr,
    # [num_logits]
    target_tokens_ptr,
    # [num_reqs + 1]
    cu_num_logits_ptr,
    # [num_reqs]
    max_nodes_ptr,
    # [num_reqs, MAX_DEPTH]
    path_ptr,
    # [num_reqs, MAX_DEPTH + 1]
    sampled_ptr,
    # [num_reqs]
    num_sampled_ptr,
    BUDGET: tl.constexpr,
    MAX_DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    HAS_MAX_NODES: tl.constexpr,
):
    req_idx = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + req_idx).to(tl.int64)
    start = tl.load(cu_num_logits_ptr + req_idx).to(tl.int64)
    num_rows = (tl.load(cu_num_logits_ptr + req_idx + 1) - start).to(tl.int32)
    num_nodes = tl.load(num_nodes_ptr + slot, mask=slot >= 0, other=0)
    num_nodes = tl.minimum(num_nodes, num_rows - 1)
    if HAS_MAX_NODES:
        max_nodes = tl.load(max_nodes_ptr + req_idx).to(tl.int32)
        num_nodes = tl.minimum(num_nodes, max_nodes)
    target_tokens_ptr += start

    rows = tl.arange(0, BLOCK) + 1
    is_node = rows <= num_nodes
    node = slot * BUDGET + rows - 1
    tokens = tl.load(tokens_ptr + node, mask=is_node, other=-1)
    parents = tl.load(parents_ptr + node, mask=is_node, other=-1)
    # The target's token at the parent is this node's: at most one child is chosen.
    chosen = tl.load(target_tokens_ptr + parents, mask=is_node, other=-1)
    parents = tl.where(is_node & (chosen == tokens), parents, -1)

    depths = tl.arange(0, BLOCK_DEPTH)
    path = tl.where((depths == 0) & (num_rows > 0), 0, -1)
    row = 0
    depth = 0
    is_walking = (num_nodes > 0) & (MAX_DEPTH > 0)
    while is_walking:
        row = tl.max(tl.where(parents == row, rows, 0), axis=0)
        is_walking = row > 0
        depth += is_walking.to(tl.int32)
        path = tl.where(is_walking & (depths == depth), row, path)
        is_walking &= depth < MAX_DEPTH

    sampled = tl.load(target_tokens_ptr + path, mask=path >= 0, other=-1)
    sampled_ptr += req_idx * (MAX_DEPTH + 1)
    tl.store(sampled_ptr + depths, sampled, mask=depths <= MAX_DEPTH)
    path_ptr += req_idx * MAX_DEPTH
    is_path = (depths > 0) & (depths <= MAX_DEPTH)
    tl.store(path_ptr + depths - 1, path, mask=is_path)
    tl.store(num_sampled_ptr + req_idx, tl.where(num_rows > 0, depth + 1, 0))


def walk_tree(
    tree: TreeBatch,
    # [num_reqs] slot of each request, negative for a bare root
    slots: torch.Tensor,
    # [num_logits] token the target chose at each row
    target_tokens: torch.Tensor,
    # [num_reqs + 1]
    cu_num_logits: torch.Tensor,
    max_depth: int,
    # [num_reqs] integer, nodes that may be accepted, 0 for none; None is no limit
    max_nodes: torch.Tensor | None = None,
    *,
    use_kernel: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Follow the target's tokens from the root for as long as they are children.

    Row j of request r is `cu_num_logits[r] + j`; nodes without a row and rows without
    a node are not used. Greedy with argmax tokens, lossless with sampled ones.

    Returns `path` [num_reqs, max_depth] int32, accepted rows padded with -1;
    `sampled` [num_reqs, max_depth + 1] int64, accepted tokens and then the bonus
    token, padded with -1; `num_sampled` [num_reqs] int32, accepted + 1, or 0 for a
    request without rows.
    No host sync; safe under CUDA graph capture. CPU tensors take the reference
    unless `use_kernel`.
    """
    if target_tokens.device.type == "cpu" and not use_kernel:
        return walk_tree_reference(
            tree, slots, target_tokens, cu_num_logits, max_depth, max_nodes
        )
    num_reqs = slots.shape[0]
    path = slots.new_empty(num_reqs, max_depth, dtype=torch.int32)
    sampled = slots.new_empty(num_reqs, max_depth + 1, dtype=torch.int64)
    num_sampled = slots.new_empty(num_reqs, dtype=torch.int32)
    if num_reqs == 0:
        return path, sampled, num_sampled
    block = triton.next_power_of_2(tree.budget)
    _walk_tree_kernel[(num_reqs,)](
        tree.tokens,
        tree.parents,
        tree.num_nodes,
        slots,
        target_tokens,
        cu_num_logits,
        max_nodes,
        path,
        sampled,
        num_sampled,
        BUDGET=tree.budget,
        MAX_DEPTH=max_depth,
        BLOCK=block,
        BLOCK_DEPTH=triton.next_power_of_2(max_depth + 1),
        HAS_MAX_NODES=max_nodes is not None,
        num_warps=max(1, block // 256),
    )
    return path, sampled, num_sampled
