# SPDX-License-Identifier: Apache-2.0
"""Best-first tree construction, one program per request."""

import torch
from vllm.triton_utils import tl, triton

from vllm_ddtree.ops.reference.build import build_tree as build_tree_reference
from vllm_ddtree.ops.sort_keys import float_to_ordered, ordered_to_float
from vllm_ddtree.tree import MAX_BUDGET, MAX_DEPTH, TreeBatch


@triton.jit
def _make_key(score, depth, rank, parent):
    # Larger keys are taken first: by score, then small depth, rank and parent row.
    # 32 bits of score, 5 unused, then the complement of 6 + 10 + 11 bits.
    place = ((depth << 21) | (rank << 11) | parent) ^ 0x7FFFFFF
    key = (float_to_ordered(score).to(tl.int64) << 32) | place.to(tl.int64)
    # A NaN compares false, so it is as good as -inf.
    return tl.where(score > float("-inf"), key, -(2**63))


@triton.jit
def _key_score(key):
    return ordered_to_float((key >> 32).to(tl.int32))


@triton.jit
def _key_depth(key):
    return ((key >> 21) & 63).to(tl.int32) ^ 63


@triton.jit
def _key_rank(key):
    return ((key >> 11) & 1023).to(tl.int32) ^ 1023


@triton.jit
def _key_parent(key):
    return (key & 2047).to(tl.int32) ^ 2047


@triton.jit
def _build_tree_kernel(
    # [num_reqs, D, K]
    top_tokens_ptr,
    # [num_reqs, D, K]
    top_log_probs_ptr,
    # [num_slots, BUDGET]
    tokens_ptr,
    parents_ptr,
    depths_ptr,
    scores_ptr,
    # [num_slots]
    num_nodes_ptr,
    # [num_reqs]
    slots_ptr,
    max_nodes_ptr,
    max_depth_ptr,
    max_rank_ptr,
    D,
    K,
    BUDGET: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    KEEP_SPINE: tl.constexpr,
):
    EMPTY: tl.constexpr = -(2**63)
    req_idx = tl.program_id(0).to(tl.int64)
    slot = req_idx
    if HAS_SLOTS:
        slot = tl.load(slots_ptr + req_idx).to(tl.int64)
    if slot < 0:
        return
    node_limit = tl.minimum(tl.load(max_nodes_ptr + req_idx), BUDGET).to(tl.int32)
    depth_limit = tl.minimum(tl.load(max_depth_ptr + req_idx), D).to(tl.int32)
    rank_limit = tl.minimum(tl.load(max_rank_ptr + req_idx), K).to(tl.int32)
    top_tokens_ptr += req_idx * D * K
    top_log_probs_ptr += req_idx * D * K

    # The candidates are one per family of siblings, and row i's children live in
    # entry i: a popped entry takes the next sibling, a new row opens its own entry.
    offs = tl.arange(0, BLOCK)
    is_rooted = (depth_limit > 0) & (rank_limit > 0)
    root_child = tl.load(top_log_probs_ptr, mask=is_rooted, other=float("-inf"))
    parent_scores = tl.zeros([BLOCK], dtype=tl.float32)
    frontier = _make_key(parent_scores + root_child, 1, 0, offs)
    frontier = tl.where(offs == 0, frontier, EMPTY)
    nodes = tl.full([BLOCK], EMPTY, dtype=tl.int64)
    spine_row = 0
    for node in range(0, node_limit):
        if KEEP_SPINE:
            may_pop = (offs == spine_row) | (spine_row < 0)
            best = tl.max(tl.where(may_pop, frontier, EMPTY), axis=0)
        else:
            best = tl.max(frontier, axis=0)
        is_open = best != EMPTY
        score = _key_score(best)
        depth = _key_depth(best)
        rank = _key_rank(best)
        nodes = tl.where(offs == node, best, nodes)

        has_sibling = is_open & (rank + 1 < rank_limit)
        sibling = tl.load(
            top_log_probs_ptr + (depth - 1) * K + rank + 1,
            mask=has_sibling,
            other=float("-inf"),
        )
        has_child = is_open & (depth < depth_limit)
        child = tl.load(
            top_log_probs_ptr + depth * K, mask=has_child, other=float("-inf")
        )
        sibling_keys = _make_key(parent_scores + sibling, depth, rank + 1, offs)
        frontier = tl.where(is_open & (frontier == best), sibling_keys, frontier)
        child_key = _make_key(score + child, depth + 1, 0, node + 1)
        frontier = tl.where(offs == node + 1, child_key, frontier)
        parent_scores = tl.where(offs == node + 1, score, parent_scores)
        if KEEP_SPINE:
            is_spine = (spine_row == node) & (child_key != EMPTY)
            spine_row = tl.where(is_spine, node + 1, -1)

    is_node = nodes != EMPTY
    in_budget = offs < BUDGET
    depths = tl.where(is_node, _key_depth(nodes), 0)
    place = tl.where(is_node, (depths - 1) * K + _key_rank(nodes), 0)
    tokens = tl.load(top_tokens_ptr + place, mask=is_node, other=-1)
    parents = tl.where(is_node, _key_parent(nodes), 0)
    scores = tl.where(is_node, _key_score(nodes), float("-inf"))
    out = slot * BUDGET + offs
    tl.store(tokens_ptr + out, tokens, mask=in_budget)
    tl.store(parents_ptr + out, parents, mask=in_budget)
    tl.store(depths_ptr + out, depths, mask=in_budget)
    tl.store(scores_ptr + out, scores, mask=in_budget)
    tl.store(num_nodes_ptr + slot, tl.sum(is_node.to(tl.int32), axis=0))


def build_tree(
    # [num_reqs, max_depth, top_k] int64
    top_tokens: torch.Tensor,
    # [num_reqs, max_depth, top_k] float32, descending in the last dimension
    top_log_probs: torch.Tensor,
    tree: TreeBatch,
    # [num_reqs] row of `tree` to write, negative to skip; None is 0, 1, 2, ...
    slots: torch.Tensor | None,
    # [num_reqs]
    max_nodes: torch.Tensor,
    # [num_reqs]
    max_depth: torch.Tensor,
    # [num_reqs]
    max_rank: torch.Tensor,
    keep_spine: bool = False,
    *,
    use_kernel: bool = False,
) -> None:
    """Put the most probable prefixes of each request into its tree, best first.

    Equals Algorithm 1 of arXiv 2604.12989, ties broken by depth, rank and parent row.
    Writes tokens, parents, depths, scores and num_nodes of the slots, padding
    included, and leaves `ancestors` alone. A limit of 0 gives a bare root,
    `max_rank` 1 a chain; with `keep_spine` the spine comes first.
    No host sync; safe under CUDA graph capture. CPU tensors take the reference
    unless `use_kernel`.
    """
    num_reqs, depth, top_k = top_log_probs.shape
    if depth > MAX_DEPTH or top_k > MAX_BUDGET:
        raise ValueError(
            f"top_log_probs has depth {depth} and {top_k} ranks, the most are "
            f"{MAX_DEPTH} and {MAX_BUDGET}"
        )
    args = (top_tokens, top_log_probs, tree, slots, max_nodes, max_depth, max_rank)
    if tree.device.type == "cpu" and not use_kernel:
        build_tree_reference(*args, keep_spine)
        return
    assert top_tokens.is_contiguous() and top_log_probs.is_contiguous()
    if num_reqs == 0:
        return
    block = max(32, triton.next_power_of_2(tree.budget))
    _build_tree_kernel[(num_reqs,)](
        top_tokens,
        top_log_probs,
        tree.tokens,
        tree.parents,
        tree.depths,
        tree.scores,
        tree.num_nodes,
        slots,
        max_nodes,
        max_depth,
        max_rank,
        depth,
        top_k,
        BUDGET=tree.budget,
        BLOCK=block,
        HAS_SLOTS=slots is not None,
        KEEP_SPINE=keep_spine,
        num_warps=max(1, block // 256),
    )
