# SPDX-License-Identifier: Apache-2.0
"""Best-first tree construction: the heap of arXiv 2604.12989, Algorithm 1."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import torch

from vllm_ddtree.tree import TreeBatch


@dataclass(frozen=True, order=True)
class _Candidate:
    """A prefix that may enter the tree next; the smallest candidate enters first."""

    is_off_spine: bool
    neg_score: np.float32
    depth: int
    rank: int
    parent: int


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
) -> None:
    """Put the most probable prefixes of each request into its tree, best first.

    The draft's distributions q_1 .. q_D are independent, so a prefix u of length d
    has probability q(u) = q_1(u_1) ... q_d(u_d). The prefixes of largest q(u) form a
    tree, and that tree maximises the expected accepted length under q (Propositions
    1 and 2 of arXiv 2604.12989). Algorithm 1 finds them with a heap which holds, for
    every open family of siblings, the best one not yet taken:

        push the rank-0 child of the root
        repeat up to max_nodes times:
            pop the best candidate and add it to the tree
            push its next sibling, one rank lower at the same depth
            push its first child, rank 0 one level down

    Every prefix has exactly one way into the heap, so none enters twice.

    Scores are sums of log-probabilities in float32, parent plus own, in this order
    of addition for siblings too. Among equal scores the smaller depth is taken
    first, then the smaller rank, then the smaller parent row. Prefixes of score
    -inf never enter; NaN counts as -inf.

    `max_nodes`, `max_depth` and `max_rank` limit each request; a limit of 0 gives a
    bare root, `max_rank` 1 a chain. With `keep_spine` the first nodes are the spine,
    as far as the limits allow, and the rest of the budget is filled best-first.

    Writes tokens, parents, depths, scores and num_nodes of the slots, padding
    included, and leaves `ancestors` alone.
    """
    for req_idx in range(top_tokens.shape[0]):
        slot = req_idx if slots is None else int(slots[req_idx])
        if slot < 0:
            continue
        nodes = _best_first(
            top_log_probs[req_idx].cpu().numpy(),
            min(int(max_nodes[req_idx]), tree.budget),
            min(int(max_depth[req_idx]), top_tokens.shape[1]),
            min(int(max_rank[req_idx]), top_tokens.shape[2]),
            keep_spine,
        )
        _write_slot(tree, slot, nodes, top_tokens[req_idx].cpu())


def _best_first(
    # [max_depth, top_k]
    log_probs: np.ndarray,
    max_nodes: int,
    max_depth: int,
    max_rank: int,
    keep_spine: bool,
) -> list[_Candidate]:
    heap: list[_Candidate] = []
    row_scores = [np.float32(0)]

    def push(parent: int, depth: int, rank: int) -> None:
        if depth > max_depth or rank >= max_rank:
            return
        with np.errstate(over="ignore", invalid="ignore"):
            score = row_scores[parent] + log_probs[depth - 1, rank]
        # The row of a spine node is its depth, and no other rank-0 node's is.
        is_spine = keep_spine and rank == 0 and parent == depth - 1
        if score > -np.inf:
            heapq.heappush(heap, _Candidate(not is_spine, -score, depth, rank, parent))

    push(parent=0, depth=1, rank=0)
    nodes: list[_Candidate] = []
    while heap and len(nodes) < max_nodes:
        node = heapq.heappop(heap)
        nodes.append(node)
        row_scores.append(-node.neg_score)
        push(node.parent, node.depth, node.rank + 1)
        push(parent=len(nodes), depth=node.depth + 1, rank=0)
    return nodes


def _write_slot(
    tree: TreeBatch, slot: int, nodes: list[_Candidate], tokens: torch.Tensor
) -> None:
    n = len(nodes)
    tree.num_nodes[slot] = n
    columns = (
        (tree.tokens, -1, [int(tokens[c.depth - 1, c.rank]) for c in nodes]),
        (tree.parents, 0, [c.parent for c in nodes]),
        (tree.depths, 0, [c.depth for c in nodes]),
        (tree.scores, -torch.inf, [-float(c.neg_score) for c in nodes]),
    )
    for column, fill, values in columns:
        column[slot, :n] = torch.tensor(values, dtype=column.dtype)
        column[slot, n:] = fill
