# SPDX-License-Identifier: Apache-2.0
"""Every step of the engine is the step of arXiv 2604.12989, simulated beside it."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import EngineConfig, ddtree, engine, generate, token_ids
from prompts import random_prompts
from vllm import SamplingParams
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

ASSETS = Path(__file__).resolve().parents[1] / "assets"
# Sums of float32 log-probabilities in another order.
SCORE_ERROR = 1e-4


@dataclass(frozen=True)
class Step:
    """A request's verify step: what went in, and what the engine made of it."""

    # [num_draft_steps, vocab_size] log-probabilities
    draft: torch.Tensor
    # [num_rows, vocab_size] processed logits
    target: torch.Tensor
    tokens: list[int]
    parents: list[int]
    scores: list[float]
    path: list[int]

    @property
    def prefixes(self) -> list[tuple[int, ...]]:
        """The engine's rows as the tokens from the root to each."""
        prefixes: list[tuple[int, ...]] = [()]
        for token, parent in zip(self.tokens, self.parents, strict=True):
            prefixes.append((*prefixes[parent], token))
        return prefixes


@dataclass
class Log:
    """What drafter and target said, in the order of the steps."""

    drafts: list[torch.Tensor] = field(default_factory=list)
    targets: list[torch.Tensor] = field(default_factory=list)


def paper_tree(
    log_probs: torch.Tensor, budget: int, max_depth: int
) -> list[tuple[tuple[int, ...], float]]:
    """Algorithm 1: the `budget` most probable prefixes, the best first.

    A node is the tuple of the ranks of its tokens, (r_1, ..., r_d). Popping it pushes
    its next sibling (..., r_d + 1) and its first child (..., r_d, 1), so that each
    prefix enters the heap once. Here ranks begin at 0. Returns the tokens of each
    prefix and its log-probability.
    """
    sorted_log_probs, sorted_tokens = log_probs.sort(dim=1, descending=True)
    values, tokens = sorted_log_probs.tolist(), sorted_tokens.tolist()

    def entry(ranks: tuple[int, ...]) -> tuple[float, tuple[int, ...]]:
        return -sum(values[d][rank] for d, rank in enumerate(ranks)), ranks

    heap = [entry((0,))] if max_depth > 0 else []
    nodes = []
    while heap and len(nodes) < budget:
        cost, ranks = heapq.heappop(heap)
        prefix = tuple(tokens[d][rank] for d, rank in enumerate(ranks))
        nodes.append((prefix, -cost))
        if ranks[-1] + 1 < len(values[0]):
            heapq.heappush(heap, entry((*ranks[:-1], ranks[-1] + 1)))
        if len(ranks) < max_depth:
            heapq.heappush(heap, entry((*ranks, 0)))
    return nodes


def paper_walk(prefixes: set[tuple[int, ...]], choice: Callable) -> list[int]:
    """Tokens a step emits: the target's own, for as long as the tree has them."""
    path: tuple[int, ...] = ()
    while True:
        token = choice(path)
        path = (*path, token)
        if path not in prefixes:
            return list(path)


def record(config: EngineConfig, patch: pytest.MonkeyPatch) -> Log:
    """Take down logits while the engine runs one request."""
    core = engine(config).llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    head, verifier = runner.speculator.draft_head, runner.rejection_sampler
    top_k, sample = head.top_k, verifier._sample
    weight = runner.speculator.model.lm_head.weight[: runner.vocab_size].double()
    log = Log()

    def record_draft(hidden_states: torch.Tensor, temperature: Any, k: int) -> Any:
        logits = hidden_states.double() @ weight.T
        if temperature is not None:
            logits /= torch.where(temperature > 0, temperature, 1.0)[:, None]
        log.drafts.append(logits.log_softmax(dim=1))
        return top_k(hidden_states, temperature, k)

    def record_target(logits: torch.Tensor, *args: Any) -> torch.Tensor:
        log.targets.append(logits.clone())
        return sample(logits, *args)

    patch.setattr(head, "top_k", record_draft)
    patch.setattr(verifier, "_sample", record_target)
    return log


def run(
    config: EngineConfig, prompt: list[int], params: SamplingParams
) -> tuple[list[Step], list[int]]:
    """The verify steps of a request that has the engine for itself, and its tokens."""
    with pytest.MonkeyPatch.context() as patch:
        log = record(config, patch)
        engine(config).collective_rpc("ddtree_start_trace")
        outputs = generate(config, [prompt], params)
        (traces,) = engine(config).collective_rpc("ddtree_stop_trace")
    (tokens,) = token_ids(outputs)
    keys = ("tokens", "parents", "scores", "path")
    assert len(log.targets) == len(traces)
    # The last drafts nobody verifies.
    logs = zip(log.drafts, log.targets, traces, strict=False)
    steps = [
        Step(draft, target, *(trace[key] for key in keys))
        for draft, target, trace in logs
    ]
    return steps, tokens


def choose(logits: torch.Tensor, params: SamplingParams, pos: int) -> int:
    """The target's token after position `pos`, with plain decoding's noise there."""
    if params.temperature == 0:
        return int(logits.argmax())
    tokens = gumbel_sample(
        logits[None],
        torch.zeros(1, dtype=torch.int32),
        torch.tensor([params.temperature]),
        torch.tensor([params.seed]),
        torch.tensor([pos]),
        apply_temperature=False,
        is_drafting=False,
    )
    return int(tokens)


def check_tree(step: Step, budget: int, max_depth: int) -> None:
    """The engine's nodes are the paper's, node by node, but for ties."""
    # Behind the last node may be one that ties with it.
    known = dict(paper_tree(step.draft, budget + 8, max_depth))
    expected = list(known.items())[:budget]
    prefixes = step.prefixes[1:]
    assert len(prefixes) == len(expected) == len(set(prefixes))
    for prefix, score, (other, best) in zip(
        prefixes, step.scores, expected, strict=True
    ):
        assert score == pytest.approx(best, abs=SCORE_ERROR)
        assert prefix == other or known[prefix] == pytest.approx(best, abs=SCORE_ERROR)


def check_request(
    config: EngineConfig, budget: int, prompt: list[int], params: SamplingParams
) -> int:
    """Every step of a request; returns how many tokens were accepted."""
    steps, tokens = run(config, prompt, params)
    # The first token is the prompt's.
    num_tokens = 1
    for step in steps:
        # A path and the token after it do not exceed the request's length.
        num_draft_steps = step.draft.shape[0]
        check_tree(step, budget, min(num_draft_steps, len(tokens) - num_tokens - 1))
        row_of = {prefix: row for row, prefix in enumerate(step.prefixes)}
        root_pos = len(prompt) + num_tokens - 1
        emitted = paper_walk(
            set(row_of),
            lambda path, step=step, row_of=row_of, root_pos=root_pos: choose(
                step.target[row_of[path]], params, root_pos + len(path)
            ),
        )
        depths = range(1, len(emitted))
        assert step.path == [row_of[tuple(emitted[:depth])] for depth in depths]
        assert tokens[num_tokens : num_tokens + len(emitted)] == emitted
        num_tokens += len(emitted)
    assert num_tokens == len(tokens) == params.max_tokens
    return num_tokens - 1 - len(steps)


def check_requests(pair: str, budget: int, count: int, max_tokens: int) -> None:
    target, draft = ASSETS / pair / "target", ASSETS / pair / "draft"
    config = ddtree(target, draft, budget)
    accepted = 0
    for i, prompt in enumerate(random_prompts(target, count, seed=50)):
        params = SamplingParams(
            temperature=(0.0, 1.0, 0.6)[i % 3],
            seed=i,
            max_tokens=max_tokens,
            ignore_eos=True,
        )
        accepted += check_request(config, budget, prompt, params)
    assert accepted > count


def test_every_step_is_the_papers() -> None:
    check_requests("tiny-qwen3", 31, count=4, max_tokens=30)


@pytest.mark.full
@pytest.mark.parametrize("pair", ["tiny-qwen3", "tiny-llama", "tiny-qwen3-moe"])
@pytest.mark.parametrize("budget", [1, 7, 31, 63])
def test_every_step_is_the_papers_with_every_budget(pair: str, budget: int) -> None:
    check_requests(pair, budget, count=9, max_tokens=64)
