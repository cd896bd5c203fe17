# SPDX-License-Identifier: Apache-2.0
"""Typical acceptance (arXiv 2401.10774, section 3.3.1): truncation and walk."""

from __future__ import annotations

import math

import numpy as np
import torch

from vllm_ddtree.ops.reference.walk import children
from vllm_ddtree.tree import TreeBatch


def truncate_typical(
    # [num_logits, vocab_size] float32, after all logits processing; changed in place
    logits: torch.Tensor,
    epsilon: float,
    delta: float,
    # [num_logits] bool or integer; None is no greedy row
    is_greedy: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mask to -inf the tokens that are not typical of their row's distribution.

    A token x of a row with distribution p and entropy H(p) is typical iff

        p(x) > min(epsilon, delta * exp(-H(p)))

    Where the target is sure only likely tokens pass, where it is not (exp(-H) small)
    many do. The most likely token always passes, the lowest id among equals, so that
    no row is left empty; in a greedy row it alone passes. Lossy: sampling from the
    truncated logits is sampling from another distribution.

    Returns `log_z` [num_logits] float32, the log-sum-exp of each row before the
    truncation: `logits - log_z` are log-probabilities under the target.
    """
    log_z = logits.logsumexp(-1)
    log_probs = logits - log_z[:, None]
    probs = log_probs.exp()
    entropy = -torch.where(probs > 0, probs * log_probs, 0.0).sum(-1)
    threshold = (_log(delta) - entropy).clamp(max=_log(epsilon))
    keep = log_probs > threshold[:, None]
    if is_greedy is not None:
        keep &= ~is_greedy.bool()[:, None]
    keep.scatter_(1, logits.argmax(-1, keepdim=True), True)
    logits.masked_fill_(~keep, -torch.inf)
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Accept the deepest path all of whose tokens are typical.

    A node is acceptable iff its parent is (the root is) and its token survived the
    truncation in its parent's row. The deepest acceptable node ends the path; among
    equally deep ones the path of larger log-probability under the target before
    truncation, summed in float32 from the root; then the lower row. The bonus token
    is the one drawn at the last row of the path.

    Rows, arguments and results are those of `walk_tree`: `path`, `sampled` and
    `num_sampled`.
    """
    num_reqs = slots.shape[0]
    device = logits.device
    path = torch.full((num_reqs, max_depth), -1, dtype=torch.int32, device=device)
    sampled = torch.full((num_reqs, max_depth + 1), -1, device=device)
    num_sampled = torch.zeros(num_reqs, dtype=torch.int32, device=device)
    starts = cu_num_logits.tolist()
    for req_idx, slot in enumerate(slots.tolist()):
        start, end = starts[req_idx], starts[req_idx + 1]
        if start == end:
            continue
        # (path, its tokens, its log-probability) of each acceptable row
        root: tuple[list[int], list[int], np.float32] = ([], [], np.float32(0))
        acceptable = {0: root}
        if slot >= 0:
            num_nodes = end - start - 1
            if max_nodes is not None:
                num_nodes = min(num_nodes, int(max_nodes[req_idx]))
            for (parent, token), row in children(tree, slot, num_nodes).items():
                logit = logits[start + parent, token].item()
                if parent not in acceptable or logit == -math.inf:
                    continue
                rows, tokens, score = acceptable[parent]
                score += np.float32(logit) - np.float32(log_z[start + parent].item())
                if len(rows) < max_depth:
                    acceptable[row] = ([*rows, row], [*tokens, token], score)
        best = max(acceptable, key=lambda row: (*_merit(acceptable[row]), -row))
        rows, tokens, _ = acceptable[best]
        tokens = [*tokens, int(target_tokens[start + best])]
        path[req_idx, : len(rows)] = torch.tensor(rows, dtype=torch.int32)
        sampled[req_idx, : len(tokens)] = torch.tensor(tokens)
        num_sampled[req_idx] = len(tokens)
    return path, sampled, num_sampled


def _merit(entry: tuple[list[int], list[int], np.float32]) -> tuple[int, np.float32]:
    rows, _, score = entry
    return len(rows), score


def _log(x: float) -> float:
    return math.log(x) if x > 0 else -math.inf
