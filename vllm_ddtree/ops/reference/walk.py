# SPDX-License-Identifier: Apache-2.0
"""The walk down a verified tree, one request at a time."""

from __future__ import annotations

import torch

from vllm_ddtree.tree import TreeBatch


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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Follow the target's tokens from the root for as long as they are children.

        row = root
        repeat: y = token the target chose at `row`; emit y
                if `row` has a child with token y: row = that child, accept it
                else: stop, y is the bonus token

    With argmax tokens this is the greedy walk; with tokens drawn from the target's
    processed distribution at each row it is the lossless walk of arXiv 2604.12989:
    every emitted token is an exact draw, whatever the tree, as long as the tree does
    not depend on the draws.

    The rows of request r are `cu_num_logits[r] .. cu_num_logits[r + 1]`, root first,
    node i in row i + 1. There may be fewer than the tree has (a tree cut short) or
    more (padding); nodes without a row, and rows without a node, are not used, nor
    are nodes from `max_nodes` on. A request without rows emits nothing.

    Returns `path` [num_reqs, max_depth] int32, accepted rows padded with -1;
    `sampled` [num_reqs, max_depth + 1] int64, accepted tokens and then the bonus
    token, padded with -1; `num_sampled` [num_reqs] int32, accepted + 1.
    """
    num_reqs = slots.shape[0]
    device = target_tokens.device
    path = torch.full((num_reqs, max_depth), -1, dtype=torch.int32, device=device)
    sampled = torch.full((num_reqs, max_depth + 1), -1, device=device)
    num_sampled = torch.zeros(num_reqs, dtype=torch.int32, device=device)
    starts = cu_num_logits.tolist()
    for req_idx, slot in enumerate(slots.tolist()):
        chosen = target_tokens[starts[req_idx] : starts[req_idx + 1]].tolist()
        if not chosen:
            continue
        child_of: dict[tuple[int, int], int] = {}
        if slot >= 0:
            num_nodes = len(chosen) - 1
            if max_nodes is not None:
                num_nodes = min(num_nodes, int(max_nodes[req_idx]))
            child_of = children(tree, slot, num_nodes)
        rows = [0]
        while len(rows) <= max_depth and (rows[-1], chosen[rows[-1]]) in child_of:
            rows.append(child_of[rows[-1], chosen[rows[-1]]])
        path[req_idx, : len(rows) - 1] = torch.tensor(rows[1:], dtype=torch.int32)
        sampled[req_idx, : len(rows)] = torch.tensor([chosen[row] for row in rows])
        num_sampled[req_idx] = len(rows)
    return path, sampled, num_sampled


def children(tree: TreeBatch, slot: int, max_nodes: int) -> dict[tuple[int, int], int]:
    """Map (parent row, token) to the child's row, for the first `max_nodes` nodes."""
    num_nodes = min(max_nodes, int(tree.num_nodes[slot]))
    parents = tree.parents[slot, :num_nodes].tolist()
    tokens = tree.tokens[slot, :num_nodes].tolist()
    return {key: node + 1 for node, key in enumerate(zip(parents, tokens, strict=True))}
