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
    # [num_reqs] bool or integer, zero for a bare root; None is all trees
    is_tree: torch.Tensor | None = None,
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
    more (padding); nodes without a row, and rows without a node, are not used. A
    request without rows emits nothing.

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
        if slot >= 0 and (is_tree is None or bool(is_tree[req_idx])):
            child_of = children(tree, slot, num_rows=len(chosen))
        rows = [0]
        while len(rows) <= max_depth and (rows[-1], chosen[rows[-1]]) in child_of:
            rows.append(child_of[rows[-1], chosen[rows[-1]]])
        path[req_idx, : len(rows) - 1] = torch.tensor(rows[1:], dtype=torch.int32)
        sampled[req_idx, : len(rows)] = torch.tensor([chosen[row] for row in rows])
        num_sampled[req_idx] = len(rows)
    return path, sampled, num_sampled


def children(tree: TreeBatch, slot: int, num_rows: int) -> dict[tuple[int, int], int]:
    """Map (parent row, token) to the child's row, for the nodes that have a row."""
    num_nodes = min(num_rows - 1, int(tree.num_nodes[slot]))
    parents = tree.parents[slot, :num_nodes].tolist()
    tokens = tree.tokens[slot, :num_nodes].tolist()
    return {key: node + 1 for node, key in enumerate(zip(parents, tokens, strict=True))}
