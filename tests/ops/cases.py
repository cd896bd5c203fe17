# SPDX-License-Identifier: Apache-2.0
"""Generated inputs, and the count of them.

Hypothesis chooses shapes, kinds and a seed; NumPy fills the tensors from the seed.
A batch holds several independent requests, each with its own data and limits, and
each is one case.
"""

import functools
import math
import os
from collections import Counter
from collections.abc import Callable

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ddtree.tree import TreeBatch

DEFAULT_CASES = 20_000 if torch.cuda.is_available() else 100
NUM_CASES = int(os.environ.get("DDTREE_EXAMPLES", DEFAULT_CASES))
KINDS = ("random", "tied", "uniform", "one_token", "minus_inf", "nan", "extreme")
COUNTS: Counter[str] = Counter()

seeds = st.integers(0, 2**63 - 1).map(np.random.default_rng)


def property_of(num_cases: int, **strategies: st.SearchStrategy) -> Callable:
    """Run a test on NUM_CASES generated cases, `num_cases` of them per example.

    The test takes a generator `rng` besides what the strategies give.
    """

    def decorate(test: Callable) -> Callable:
        @functools.wraps(test)
        def counted(*args, **kwargs) -> None:
            test(*args, **kwargs)
            COUNTS[f"{test.__module__}::{test.__name__}"] += num_cases

        run = given(rng=seeds, **strategies)(counted)
        return settings(max_examples=math.ceil(NUM_CASES / num_cases))(run)

    return decorate


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a tensor with values that no kernel should ever write."""
    if tensor.is_floating_point():
        return tensor.fill_(torch.nan)
    if tensor.dtype == torch.bool:
        return tensor
    return tensor.fill_(torch.iinfo(tensor.dtype).max)


def small_or(rng: np.random.Generator, small: int, large: int) -> int:
    """1 .. small mostly, 1 .. large sometimes: large cases are slow to interpret."""
    return int(rng.integers(1, (large if rng.random() < 0.1 else small) + 1))


def draw_log_probs(rng: np.random.Generator, kind: str, top_k: int) -> np.ndarray:
    """One row `[top_k]` float32 of descending log-probabilities."""
    logits = rng.normal(size=top_k) * rng.choice([0.3, 1.0, 4.0])
    row = logits - np.log(np.exp(logits).sum() * rng.uniform(1, 2))
    if kind == "tied":
        row = np.round(row * 2) / 2
    elif kind == "uniform":
        row = np.full(top_k, -np.log(np.float32(top_k)))
    elif kind == "one_token":
        row = np.where(np.arange(top_k) == 0, 0.0, -np.inf)
    elif kind == "minus_inf":
        row = np.where(rng.random(top_k) < 0.5, -np.inf, row)
    elif kind == "extreme":
        row = -rng.choice([0.0, 1e-45, 1e-30, 1.0, 1 + 2**-23, 1e30, 3e38], size=top_k)
    row = -np.sort(-row.astype(np.float32))
    if kind == "nan":
        row[rng.random(top_k) < 0.3] = np.nan
    return row


def draw_tokens(rng: np.random.Generator, top_k: int) -> np.ndarray:
    """`[top_k]` distinct token ids, as a row of a top-k has them."""
    return rng.choice(max(2 * top_k, 50), size=top_k, replace=False).astype(np.int64)


def draw_top_k(
    rng: np.random.Generator, num_reqs: int, depth: int, top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`tokens` and `log_probs` [num_reqs, depth, top_k], a kind for each request."""
    tokens = np.empty((num_reqs, depth, top_k), dtype=np.int64)
    log_probs = np.empty((num_reqs, depth, top_k), dtype=np.float32)
    for req_idx in range(num_reqs):
        kind = str(rng.choice(KINDS))
        for d in range(depth):
            tokens[req_idx, d] = draw_tokens(rng, top_k)
            log_probs[req_idx, d] = draw_log_probs(rng, kind, top_k)
    return torch.from_numpy(tokens), torch.from_numpy(log_probs)


def draw_ints(
    rng: np.random.Generator, low: int, high: int, size: int, device: str
) -> torch.Tensor:
    """`[size]` int32 in low .. high, the ends more often than the rest."""
    values = rng.integers(low, high + 1, size=size)
    ends = rng.choice([low, high, high], size=size)
    values = np.where(rng.random(size) < 0.5, ends, values)
    return torch.from_numpy(values.astype(np.int32)).to(device)


def stale_tree(
    rng: np.random.Generator, num_slots: int, budget: int, device: str
) -> TreeBatch:
    """Trees full of what earlier requests might have left behind."""
    tree = TreeBatch.allocate(num_slots, budget, device)
    for name, tensor in vars(tree).items():
        if name == "num_nodes":
            tensor.fill_(int(rng.integers(0, budget + 1)))
        else:
            poison(tensor)
    return tree


def move_tree(tree: TreeBatch, device: str) -> TreeBatch:
    return TreeBatch(**{name: t.to(device) for name, t in vars(tree).items()})


def copy_tree(tree: TreeBatch) -> TreeBatch:
    return TreeBatch(**{name: tensor.clone() for name, tensor in vars(tree).items()})


def assert_same_trees(left: TreeBatch, right: TreeBatch) -> None:
    """Bit for bit, poison included."""
    for name in vars(left):
        a, b = getattr(left, name), getattr(right, name)
        if a.is_floating_point():
            a, b = a.view(torch.int32), b.view(torch.int32)
        assert torch.equal(a, b), name


def draw_tree(
    rng: np.random.Generator, num_slots: int, budget: int, vocab_size: int, device: str
) -> TreeBatch:
    """Random trees: random recursive, bushy, or deep; siblings differ in token."""
    tree = TreeBatch.allocate(num_slots, budget, "cpu")
    for slot in range(num_slots):
        num_nodes = int(rng.choice([0, 1, budget, rng.integers(0, budget + 1)]))
        reach = int(rng.choice([1, 2, 4, budget + 1]))
        depths = [0]
        siblings: set[tuple[int, int]] = set()
        while len(depths) <= num_nodes:
            row = len(depths)
            parent = int(rng.integers(max(0, row - reach), row))
            token = int(rng.integers(vocab_size))
            if (parent, token) in siblings or depths[parent] == 15:
                # Full families and full depth: start anew nearer to the root.
                reach = budget + 1
                if len(siblings) >= vocab_size * row:
                    break
                continue
            siblings.add((parent, token))
            tree.tokens[slot, row - 1] = token
            tree.parents[slot, row - 1] = parent
            tree.depths[slot, row - 1] = depths[parent] + 1
            tree.scores[slot, row - 1] = -float(row)
            depths.append(depths[parent] + 1)
        tree.num_nodes[slot] = len(depths) - 1
    return move_tree(tree, device)


def closure_of(parents: list[int], width: int) -> torch.Tensor:
    """`[width, width]` bool reachability by squaring the adjacency matrix."""
    reach = torch.eye(width, dtype=torch.float64)
    for node, parent in enumerate(parents):
        reach[node + 1, parent] = 1
    for _ in range(max(1, width.bit_length())):
        reach = (reach @ reach).clamp(max=1)
    return reach.bool()
