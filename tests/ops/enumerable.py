# SPDX-License-Identifier: Apache-2.0
"""A model small enough to know the exact law of everything it can write.

It writes three tokens of a vocabulary of eight. Its drafter predicts the next tokens
independently of each other, as DFlash does. Contexts are prefixes of the text; each
has its tree, in the slot of its number.
"""

import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from vllm.triton_utils import tl, triton
from vllm.v1.worker.gpu.sample.gumbel import gumbel_noised_argmax

from vllm_ddtree.ops.build import build_tree
from vllm_ddtree.ops.path_tokens import gather_path_tokens
from vllm_ddtree.ops.typical import truncate_typical, walk_typical
from vllm_ddtree.ops.walk import walk_tree
from vllm_ddtree.tree import TreeBatch

VOCAB = 8
LENGTH = 3
BUDGET = 5
MAX_DEPTH = LENGTH - 1
PREFIXES = [
    prefix
    for n in range(LENGTH)
    for prefix in itertools.product(range(VOCAB), repeat=n)
]
NUMBER = {prefix: i for i, prefix in enumerate(PREFIXES)}
TEXTS = list(itertools.product(range(VOCAB), repeat=LENGTH))

# Largest rank of a shape's drafts.
SHAPES = {"tree": VOCAB, "chain": 1, "bare_root": 0}


@dataclass
class Trees:
    """The trees of all contexts, and where each of their rows reads its logits."""

    tree: TreeBatch
    # [num_contexts, width] number of the context of each row, 0 where it has none
    row_context: np.ndarray
    # [num_contexts, width]
    row_depth: np.ndarray
    # [num_contexts]
    num_rows: np.ndarray


class EnumerableModel:
    """Random target and drafter; the drafter knows the target up to noise."""

    def __init__(self, seed: int, temperature: float, draft_noise: float = 0.5) -> None:
        rng = np.random.default_rng(seed)
        self.temperature = temperature
        # [num_contexts, VOCAB]
        self.logits = rng.normal(size=(len(PREFIXES), VOCAB)).astype(np.float32) * 1.5
        noise = rng.normal(size=(len(PREFIXES), MAX_DEPTH, VOCAB)) * draft_noise
        self.draft_logits = np.stack([self._marginals(p) for p in PREFIXES]) + noise

    @cached_property
    def probs(self) -> np.ndarray:
        """Next-token distributions `[num_contexts, VOCAB]` at the temperature."""
        scaled = self.logits.astype(np.float64) / self.temperature
        weights = np.exp(scaled - scaled.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True)

    def _marginals(self, prefix: tuple[int, ...]) -> np.ndarray:
        """Log of the law of the next two tokens, each for itself."""
        first = self.probs[NUMBER[prefix]]
        second = np.full(VOCAB, 1 / VOCAB)
        if len(prefix) < MAX_DEPTH:
            after = [self.probs[NUMBER[(*prefix, x)]] for x in range(VOCAB)]
            second = first @ np.stack(after)
        return np.log(np.stack([first, second]))

    def law(self) -> np.ndarray:
        """Probability of every text."""
        return np.array(
            [
                np.prod([self.probs[NUMBER[t[:i]], t[i]] for i in range(LENGTH)])
                for t in TEXTS
            ]
        )

    def draft_law(self) -> np.ndarray:
        """`[num_contexts, MAX_DEPTH, VOCAB]`."""
        weights = np.exp(self.draft_logits)
        return weights / weights.sum(-1, keepdims=True)

    def trees(self, shape: str) -> Trees:
        """Best-first trees of the drafter; none reaches past the text's end."""
        top_k = SHAPES[shape]
        num_contexts = len(PREFIXES)
        law = torch.from_numpy(self.draft_law()).float().log()
        log_probs, tokens = law.sort(-1, descending=True)
        tree = TreeBatch.allocate(num_contexts, BUDGET, "cpu")
        depth_left = [LENGTH - 1 - len(prefix) for prefix in PREFIXES]
        build_tree(
            tokens,
            log_probs,
            tree,
            None,
            torch.full((num_contexts,), BUDGET if top_k > 0 else 0),
            torch.tensor(depth_left),
            torch.full((num_contexts,), top_k),
        )
        return _with_contexts(tree)


def _with_contexts(tree: TreeBatch) -> Trees:
    num_rows = tree.num_nodes.numpy() + 1
    cu_num_logits = torch.from_numpy(np.concatenate([[0], num_rows.cumsum()]))
    total = int(num_rows.sum())
    slots = torch.arange(tree.num_slots)
    paths, depths = gather_path_tokens(tree, slots, cu_num_logits, total, MAX_DEPTH)
    row_context = np.zeros((tree.num_slots, tree.width), dtype=np.int64)
    row_depth = np.zeros((tree.num_slots, tree.width), dtype=np.int64)
    flat = iter(zip(paths.tolist(), depths.tolist(), strict=True))
    for context, prefix in enumerate(PREFIXES):
        for row in range(num_rows[context]):
            path, depth = next(flat)
            row_context[context, row] = NUMBER[(*prefix, *path[:depth])]
            row_depth[context, row] = depth
    return Trees(tree, row_context, row_depth, num_rows)


@triton.jit
def _noised_argmax_kernel(
    # [VOCAB, num_rows]
    logits_ptr,
    # [num_rows]
    seeds_ptr,
    pos_ptr,
    out_ptr,
    num_rows,
    temperature,
    VOCAB_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keys = tl.arange(0, VOCAB_SIZE)[:, None]
    mask = rows < num_rows
    logits = tl.load(logits_ptr + keys * num_rows + rows[None, :], mask=mask[None, :])
    _, token = gumbel_noised_argmax(
        logits,
        keys,
        keys < VOCAB_SIZE,
        tl.load(seeds_ptr + rows, mask=mask)[None, :],
        tl.load(pos_ptr + rows, mask=mask)[None, :],
        temperature,
        IS_DRAFTING=False,
        USE_FP64=False,
    )
    tl.store(out_ptr + rows, token, mask=mask)


def sample_rows(
    # [num_rows, VOCAB] float32
    logits: np.ndarray,
    # [num_rows] int64
    seeds: np.ndarray,
    # [num_rows] int64
    pos: np.ndarray,
    temperature: float,
) -> np.ndarray:
    """Tokens `[num_rows]` that vLLM's sampler draws, many rows to a program."""
    num_rows = len(logits)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    out = torch.empty(num_rows, dtype=torch.int64, device=device)
    block = 256 if device == "cuda" else 1 << 14
    _noised_argmax_kernel[(triton.cdiv(num_rows, block),)](
        torch.from_numpy(np.ascontiguousarray(logits.T)).to(device),
        torch.from_numpy(seeds).to(device),
        torch.from_numpy(pos).to(device),
        out,
        num_rows,
        temperature,
        VOCAB_SIZE=VOCAB,
        BLOCK=block,
    )
    return out.cpu().numpy()


@dataclass
class Requests:
    """Texts in the making, one for each seed."""

    # [num_reqs]
    seeds: np.ndarray
    # [num_reqs] number of the context
    context: np.ndarray
    # [num_reqs, LENGTH]
    texts: np.ndarray
    # [num_reqs]
    lengths: np.ndarray
    num_accepted: int = 0
    num_steps: int = 0

    @classmethod
    def start(cls, seeds: np.ndarray) -> "Requests":
        count = len(seeds)
        return cls(
            seeds,
            np.zeros(count, dtype=np.int64),
            np.full((count, LENGTH), -1),
            np.zeros(count, dtype=np.int64),
        )

    def append(self, live: np.ndarray, sampled: np.ndarray, count: np.ndarray) -> None:
        """Take `sampled` [num_live, n], of which `count` tokens are meant."""
        self.num_steps += len(live)
        self.num_accepted += int((count - 1).sum())
        for i in range(sampled.shape[1]):
            reqs = live[(count > i) & (self.lengths[live] < LENGTH)]
            tokens = sampled[(count > i) & (self.lengths[live] < LENGTH), i]
            self.texts[reqs, self.lengths[reqs]] = tokens
            self.lengths[reqs] += 1
        unfinished = live[self.lengths[live] < LENGTH]
        texts, lengths = self.texts[unfinished], self.lengths[unfinished]
        # Contexts are numbered by length, then alphabetically.
        number = np.zeros(len(unfinished), dtype=np.int64)
        for i in range(LENGTH - 1):
            number = np.where(lengths > i, number * VOCAB + texts[:, i] + 1, number)
        self.context[unfinished] = number


def write(
    model: EnumerableModel, trees: Trees, seeds: np.ndarray, *, pos_of_depth=lambda d: d
) -> Requests:
    """Write a text for each seed: sample every row, walk, repeat until all are full."""
    requests = Requests.start(seeds)
    while len(live := np.flatnonzero(requests.lengths < LENGTH)):
        context = requests.context[live]
        width = int(trees.num_rows[context].max())
        rows = model.logits[trees.row_context[context, :width]].reshape(-1, VOCAB)
        depth = pos_of_depth(trees.row_depth[context, :width])
        pos = (requests.lengths[live][:, None] + depth).reshape(-1)
        tokens = sample_rows(
            rows, np.repeat(requests.seeds[live], width), pos, model.temperature
        )
        sampled, count = walk(trees, context, tokens.reshape(-1, width))
        requests.append(live, sampled, count)
    return requests


def walk(
    trees: Trees, context: np.ndarray, tokens: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """`walk_tree` in one batch; requests that agree in everything share a walk."""
    columns = np.arange(tokens.shape[1])
    tokens = np.where(columns < trees.num_rows[context][:, None], tokens, 0)
    key = context * VOCAB ** len(columns) + tokens @ VOCAB**columns
    _, first, where = np.unique(key, return_index=True, return_inverse=True)
    num_rows = trees.num_rows[context[first]]
    has_row = columns < num_rows[:, None]
    _, sampled, count = walk_tree(
        trees.tree,
        torch.from_numpy(context[first]),
        torch.from_numpy(tokens[first][has_row]),
        torch.from_numpy(np.concatenate([[0], num_rows.cumsum()])),
        MAX_DEPTH,
    )
    return sampled.numpy()[where], count.numpy()[where]


@dataclass
class TypicalLaw:
    """What typical acceptance writes, exactly."""

    # [VOCAB ** LENGTH]
    law: np.ndarray
    # mean over the first steps of all texts, which is the first context's
    num_accepted: int


def typical_law(
    model: EnumerableModel, trees: Trees, epsilon: float, delta: float
) -> TypicalLaw:
    """The accepted path is no draw: only the token after it is, from the truncation."""
    bonus = []
    paths = []
    for context in range(len(PREFIXES)):
        num_rows = trees.num_rows[context]
        logits = model.logits[trees.row_context[context, :num_rows]]
        truncated = torch.from_numpy(logits) / model.temperature
        log_z = truncate_typical(truncated, epsilon, delta)
        path, sampled, count = walk_typical(
            trees.tree,
            torch.tensor([context]),
            truncated,
            log_z,
            torch.zeros(num_rows, dtype=torch.int64),
            torch.tensor([0, num_rows]),
            MAX_DEPTH,
        )
        accepted = int(count) - 1
        paths.append(sampled[0, :accepted].tolist())
        last_row = int(path[0, accepted - 1]) if accepted else 0
        bonus.append(truncated[last_row].double().softmax(-1).tolist())

    def probability(text: tuple[int, ...], length: int) -> float:
        """Of what follows the first `length` tokens of a text."""
        if length >= LENGTH:
            return 1.0
        context = NUMBER[text[:length]]
        path = paths[context]
        end = length + len(path)
        if list(text[length:end]) != path[: LENGTH - length]:
            return 0.0
        if end >= LENGTH:
            return 1.0
        return bonus[context][text[end]] * probability(text, end + 1)

    law = np.array([probability(text, 0) for text in TEXTS])
    return TypicalLaw(law, len(paths[0]))
