# SPDX-License-Identifier: Apache-2.0
"""Typical acceptance (arXiv 2401.10774, section 3.3.1): truncation and walk."""

import math

import torch
from vllm.triton_utils import tl, triton

from vllm_ddtree.ops.reference.typical import (
    truncate_typical as truncate_typical_reference,
)
from vllm_ddtree.ops.reference.typical import walk_typical as walk_typical_reference
from vllm_ddtree.ops.sort_keys import float_to_ordered
from vllm_ddtree.tree import TreeBatch

_BLOCK_VOCAB = 4096


@triton.jit
def _truncate_typical_kernel(
    # [num_logits, vocab_size]
    logits_ptr,
    logits_stride,
    # [num_logits]
    log_z_ptr,
    # [num_logits]
    is_greedy_ptr,
    vocab_size,
    log_epsilon,
    log_delta,
    BLOCK_VOCAB: tl.constexpr,
    HAS_IS_GREEDY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    offs = tl.arange(0, BLOCK_VOCAB)

    # One pass for the maximum and, relative to it, sum of exp(x) and of x * exp(x).
    top = float("-inf")
    top_id = 0
    total = 0.0
    weighted = 0.0
    for begin in range(0, vocab_size, BLOCK_VOCAB):
        token_ids = begin + offs
        mask = token_ids < vocab_size
        x = tl.load(logits_ptr + token_ids, mask=mask, other=float("-inf"))
        block_top, block_id = tl.max(x, axis=0, return_indices=True)
        top_id = tl.where(block_top > top, begin + block_id, top_id)
        new_top = tl.maximum(top, block_top)
        fall = tl.where(top > float("-inf"), top - new_top, 0.0)
        scale = tl.where(top > float("-inf"), tl.exp(fall), 0.0)
        gap = tl.where(x > float("-inf"), x - new_top, 0.0)
        mass = tl.where(x > float("-inf"), tl.exp(gap), 0.0)
        weighted = scale * (weighted + fall * total) + tl.sum(mass * gap, axis=0)
        total = scale * total + tl.sum(mass, axis=0)
        top = new_top
    log_total = tl.log(total)
    log_z = top + log_total
    tl.store(log_z_ptr + row, log_z)

    entropy = log_total - weighted / total
    threshold = tl.minimum(log_epsilon, log_delta - entropy)
    if HAS_IS_GREEDY:
        is_greedy = tl.load(is_greedy_ptr + row) != 0
        threshold = tl.where(is_greedy, float("inf"), threshold)
    for begin in range(0, vocab_size, BLOCK_VOCAB):
        token_ids = begin + offs
        mask = token_ids < vocab_size
        x = tl.load(logits_ptr + token_ids, mask=mask, other=float("-inf"))
        keep = (x - log_z > threshold) | (token_ids == top_id)
        dropped = tl.full([BLOCK_VOCAB], float("-inf"), dtype=tl.float32)
        tl.store(logits_ptr + token_ids, dropped, mask=mask & (keep == 0))


@triton.jit
def _walk_typical_kernel(
    # [num_slots, BUDGET]
    tokens_ptr,
    parents_ptr,
    depths_ptr,
    # [num_slots]
    num_nodes_ptr,
    # [num_reqs]
    slots_ptr,
    # [num_logits, vocab_size]
    logits_ptr,
    logits_stride,
    # [num_logits]
    log_z_ptr,
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

    rows = tl.arange(0, BLOCK)
    is_node = (rows > 0) & (rows <= num_nodes)
    node = slot * BUDGET + rows - 1
    tokens = tl.load(tokens_ptr + node, mask=is_node, other=0)
    parents = tl.load(parents_ptr + node, mask=is_node, other=0)
    depths = tl.load(depths_ptr + node, mask=is_node, other=0)
    logit = logits_ptr + (start + parents) * logits_stride + tokens
    logit = tl.load(logit, mask=is_node, other=float("-inf"))
    log_z = tl.load(log_z_ptr + start + parents, mask=is_node, other=0.0)
    log_probs = tl.where(logit > float("-inf"), logit - log_z, float("-inf"))

    # Level by level; a score of -inf marks a row that is not acceptable.
    scores = tl.where(rows == 0, 0.0, float("-inf"))
    for depth in range(1, tl.minimum(tl.max(depths, axis=0), MAX_DEPTH) + 1):
        parent_scores = tl.gather(scores, parents, 0)
        is_level = is_node & (depths == depth)
        scores = tl.where(is_level, parent_scores + log_probs, scores)
    merit = (float_to_ordered(scores).to(tl.int64) + 2**31) << 11
    merit |= (depths.to(tl.int64) << 43) | (rows ^ 2047).to(tl.int64)
    best = tl.max(tl.where(scores > float("-inf"), merit, -1), axis=0)
    num_accepted = (best >> 43).to(tl.int32)
    last_row = (best & 2047).to(tl.int32) ^ 2047

    levels = tl.arange(0, BLOCK_DEPTH)
    path = tl.where((levels == 0) & (num_rows > 0), 0, -1)
    row = last_row
    for step in range(0, num_accepted):
        path = tl.where(levels == num_accepted - step, row, path)
        row = tl.max(tl.where(rows == row, parents, 0), axis=0)

    is_path = (levels > 0) & (levels <= num_accepted)
    path_ptr += req_idx * MAX_DEPTH + levels - 1
    tl.store(path_ptr, path, mask=(levels > 0) & (levels <= MAX_DEPTH))
    accepted = tl.load(tokens_ptr + slot * BUDGET + path - 1, mask=is_path, other=-1)
    sampled_ptr += req_idx * (MAX_DEPTH + 1)
    tl.store(sampled_ptr + levels - 1, accepted, mask=is_path)
    bonus = tl.load(target_tokens_ptr + start + last_row, mask=num_rows > 0, other=-1)
    rest = tl.where(levels == num_accepted, bonus, -1)
    is_rest = (levels >= num_accepted) & (levels <= MAX_DEPTH)
    tl.store(sampled_ptr + levels, rest, mask=is_rest)
    num_sampled = tl.where(num_rows > 0, num_accepted + 1, 0)
    tl.store(num_sampled_ptr + req_idx, num_sampled)


def truncate_typical(
    # [num_logits, vocab_size] float32, after all logits processing; changed in place
    logits: torch.Tensor,
    epsilon: float,
    delta: float,
    # [num_logits] bool or integer; None is no greedy row
    is_greedy: torch.Tensor | None = None,
    *,
    use_kernel: bool = False,
) -> torch.Tensor:
    """Mask to -inf each token x with p(x) <= min(epsilon, delta * exp(-H(p))).

    The most likely token of a row always stays (the lowest id among equals); in a
    greedy row it alone stays. Returns `log_z` [num_logits] float32, the log-sum-exp
    of each row before the truncation.
    No host sync; safe under CUDA graph capture. CPU tensors take the reference
    unless `use_kernel`.
    """
    if logits.device.type == "cpu" and not use_kernel:
        return truncate_typical_reference(logits, epsilon, delta, is_greedy)
    assert logits.dtype == torch.float32 and logits.stride(-1) == 1
    num_logits, vocab_size = logits.shape
    log_z = logits.new_empty(num_logits)
    if num_logits == 0:
        return log_z
    _truncate_typical_kernel[(num_logits,)](
        logits,
        logits.stride(0),
        log_z,
        is_greedy,
        vocab_size,
        math.log(epsilon) if epsilon > 0 else -math.inf,
        math.log(delta) if delta > 0 else -math.inf,
        BLOCK_VOCAB=min(_BLOCK_VOCAB, triton.next_power_of_2(vocab_size)),
        HAS_IS_GREEDY=is_greedy is not None,
        num_warps=8,
    )
    return log_z


def walk_typical(
    tree: TreeBatch,
    # [num_reqs] slot of each request, negative for a bare root
    slots: torch.Tensor,
    # [num_logits, vocab_size] float32, truncated
    logits: torch.Tensor,
    # [num_logits] float32, from truncate_typical
    log_z: torch.Tensor,
    # [num_logits] token drawn from the truncated logits of each row
    target_tokens: torch.Tensor,
    # [num_reqs + 1]
    cu_num_logits: torch.Tensor,
    max_depth: int,
    # [num_reqs] integer, nodes that may be accepted, 0 for none; None is no limit
    max_nodes: torch.Tensor | None = None,
    *,
    use_kernel: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Accept the deepest path all of whose tokens survived the truncation.

    Ties go to the larger log-probability before truncation, then to the lower row;
    the bonus token is the target's at the last row of the path. Returns `path`,
    `sampled` and `num_sampled` as `walk_tree` does.
    No host sync; safe under CUDA graph capture. CPU tensors take the reference
    unless `use_kernel`.
    """
    rows = (logits, log_z, target_tokens, cu_num_logits)
    if logits.device.type == "cpu" and not use_kernel:
        return walk_typical_reference(tree, slots, *rows, max_depth, max_nodes)
    assert logits.dtype == torch.float32 and logits.stride(-1) == 1
    num_reqs = slots.shape[0]
    path = slots.new_empty(num_reqs, max_depth, dtype=torch.int32)
    sampled = slots.new_empty(num_reqs, max_depth + 1, dtype=torch.int64)
    num_sampled = slots.new_empty(num_reqs, dtype=torch.int32)
    if num_reqs == 0:
        return path, sampled, num_sampled
    block = triton.next_power_of_2(tree.width)
    _walk_typical_kernel[(num_reqs,)](
        tree.tokens,
        tree.parents,
        tree.depths,
        tree.num_nodes,
        slots,
        logits,
        logits.stride(0),
        log_z,
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
