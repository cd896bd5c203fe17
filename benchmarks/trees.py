# SPDX-License-Identifier: Apache-2.0
"""Trees and paths like those of a drafter that is fairly sure of itself."""

import math

import torch

from vllm_ddtree.ops.ancestors import compute_ancestors
from vllm_ddtree.ops.build import build_tree
from vllm_ddtree.tree import TreeBatch

# Ranks of a position fall off like rank^-1.5; the first has about half of the mass.
_DECAY = 1.5
_MARGIN = 20.0


def draw_log_probs(
    num_reqs: int, depth: int, top_k: int, generator: torch.Generator
) -> torch.Tensor:
    """`[num_reqs, depth, top_k]` float32, descending, on the CPU."""
    ranks = torch.arange(1, top_k + 1, dtype=torch.float32)
    logits = -_DECAY * ranks.log()
    noise = 0.5 * torch.randn(num_reqs, depth, top_k, generator=generator)
    log_probs = (logits + noise).log_softmax(-1)
    return log_probs.sort(-1, descending=True).values


def draw_logits(
    num_rows: int, vocab_size: int, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """`[num_rows, vocab_size]` logits whose best ranks fall off as above."""
    logits = torch.randn(num_rows, vocab_size, device=device)
    num_peaks = min(512, vocab_size // 2)
    ranks = torch.arange(1, num_peaks + 1, device=device)
    peaks = torch.randint(vocab_size, (num_rows, num_peaks), device=device)
    heights = (_MARGIN - _DECAY * ranks.log()).expand_as(peaks)
    return logits.scatter_(1, peaks, heights).to(dtype)


def draw_trees(
    num_reqs: int, budget: int, depth: int, device: torch.device, seed: int = 0
) -> TreeBatch:
    """Best-first trees with their ancestor masks."""
    generator = torch.Generator().manual_seed(seed)
    log_probs = draw_log_probs(num_reqs, depth, budget, generator).to(device)
    tokens = torch.arange(budget, device=device).expand(num_reqs, depth, -1)
    tree = TreeBatch.allocate(num_reqs, budget, device)
    limits = [
        torch.full((num_reqs,), n, dtype=torch.int32, device=device)
        for n in (budget, depth, budget)
    ]
    build_tree(tokens.contiguous(), log_probs, tree, None, *limits)
    compute_ancestors(tree)
    return tree


def deepest_detour(parents: list[int], depths: list[int]) -> list[int]:
    """Rows of the deepest path whose rows must move to be committed.

    The deepest path at all where every one is an identity path, as in a chain.
    """
    paths = []
    for node in range(len(parents)):
        row, path = node + 1, []
        while row > 0:
            path.append(row)
            row = parents[row - 1]
        path.reverse()
        moves = sum(row != place + 1 for place, row in enumerate(path))
        paths.append((depths[node] if moves else -math.inf, depths[node], path))
    return max(paths)[2]
