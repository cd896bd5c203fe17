# SPDX-License-Identifier: Apache-2.0
"""Method ddtree gives the tokens of no speculation, whatever the engine is doing."""

import random
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from engines import (
    EngineConfig,
    acceptance_length,
    ddtree,
    dflash,
    engine,
    generate,
    token_ids,
)
from prompts import chat_prompts, random_prompts
from vllm import SamplingParams

ASSETS = Path(__file__).resolve().parents[1] / "assets"
BUDGETS = [1, 7, 15, 31, 63]
NUM_REQUESTS = 12


@dataclass(frozen=True)
class Setting:
    """An engine configuration under which trees must change nothing."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    long_prompts: bool = False
    max_tokens: tuple[int, ...] = (1, 2, 5, 17, 40, 64)


SETTINGS = [
    # More requests than seats: arrivals and lengths are staggered.
    Setting("staggered", {"max_num_seqs": 8}),
    Setting("one-by-one", {"max_num_seqs": 1}),
    Setting(
        "prefix-cache-and-chunks",
        {
            "enable_prefix_caching": True,
            "block_size": 32,
            # Smaller than the prompts, and than a batch of full trees.
            "max_num_batched_tokens": 112,
        },
        long_prompts=True,
    ),
    Setting(
        "preemption",
        {"block_size": 32, "num_gpu_blocks_override": 18, "max_num_seqs": 6},
        max_tokens=(60, 100, 140),
    ),
]


def pair_of(name: str) -> tuple[Path, Path]:
    pair = ASSETS / name
    return pair / "target", pair / "draft"


def workload(
    target: Path, setting: Setting, seed: int = 0
) -> tuple[list[list[int]], list[SamplingParams]]:
    """Greedy requests of many lengths; the limits are met inside of trees."""
    chooser = random.Random(seed)
    prompts = random_prompts(target, NUM_REQUESTS, seed)
    if setting.long_prompts:
        shared = random_prompts(target, 5, seed + 1)
        start = [token for prompt in shared for token in prompt]
        prompts = [start + prompt for prompt in prompts]
    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=chooser.choice(setting.max_tokens),
            ignore_eos=chooser.random() < 0.5,
        )
        for _ in prompts
    ]
    return prompts, params


def check_equal(pair: str, budget: int, setting: Setting) -> None:
    target, draft = pair_of(pair)
    prompts, params = workload(target, setting)
    config = ddtree(target, draft, budget, options=setting.options)
    with pytest.MonkeyPatch.context() as patch:
        preempted = count_preemptions(config, patch)
        outputs = generate(config, prompts, params)
    assert bool(preempted) == (setting.name == "preemption")
    plain = generate(EngineConfig(target), prompts, params)
    assert token_ids(outputs) == token_ids(plain)
    reasons = [output.outputs[0].finish_reason for output in outputs]
    assert reasons == [output.outputs[0].finish_reason for output in plain]


def count_preemptions(config: EngineConfig, patch: pytest.MonkeyPatch) -> list[str]:
    """A list that grows by the id of every request that is preempted from now on."""
    scheduler = engine(config).llm_engine.engine_core.engine_core.scheduler
    preempted: list[str] = []
    preempt = scheduler._preempt_request

    def record(request, *args, **kwargs):
        preempted.append(request.request_id)
        return preempt(request, *args, **kwargs)

    patch.setattr(scheduler, "_preempt_request", record)
    return preempted


SAMPLE = [
    ("tiny-qwen3", 63, SETTINGS[0]),
    ("tiny-qwen3", 7, SETTINGS[2]),
    ("tiny-qwen3", 31, SETTINGS[3]),
    ("tiny-llama", 31, SETTINGS[2]),
    ("tiny-qwen3-moe", 15, SETTINGS[0]),
]


@pytest.mark.parametrize(
    "pair, budget, setting",
    SAMPLE,
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_greedy_tokens_equal_no_speculation(
    pair: str, budget: int, setting: Setting
) -> None:
    check_equal(pair, budget, setting)


@pytest.mark.full
@pytest.mark.parametrize("pair", ["tiny-qwen3", "tiny-llama", "tiny-qwen3-moe"])
def test_greedy_tokens_equal_no_speculation_in_every_setting(pair: str) -> None:
    """12 requests in each of 5 budgets and 4 settings: 240 per pair, 720 in all."""
    for budget, setting in product(BUDGETS, SETTINGS):
        check_equal(pair, budget, setting)


def test_acceptance_grows_with_the_budget() -> None:
    """Trees are nested, so a larger one never accepts less; 15 nodes beat a chain."""
    target, draft = pair_of("tiny-qwen3")
    prompts = random_prompts(target, 4, seed=3)
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    chain = acceptance_length(generate(dflash(target, draft, 15), prompts, params))
    lengths = [
        acceptance_length(generate(ddtree(target, draft, budget), prompts, params))
        for budget in (1, 7, 15, 63)
    ]
    assert lengths == sorted(lengths)
    assert lengths[2] >= chain


def check_real_pair(target: Path, draft: Path, budget: int, count: int) -> None:
    prompts = chat_prompts(target, "humaneval", count)
    params = SamplingParams(temperature=0.0, max_tokens=32)
    outputs = generate(ddtree(target, draft, budget), prompts, params)
    plain = generate(EngineConfig(target), prompts, params)
    assert token_ids(outputs) == token_ids(plain)
    assert acceptance_length(outputs) > 2.5


def test_real_pair(real_target: Path, real_draft: Path) -> None:
    check_real_pair(real_target, real_draft, 31, count=3)


@pytest.mark.full
@pytest.mark.parametrize("budget", BUDGETS[1:])
def test_real_pair_with_every_budget(
    real_target: Path, real_draft: Path, budget: int
) -> None:
    check_real_pair(real_target, real_draft, budget, count=4)


def test_counters_say_what_was_drafted_and_accepted() -> None:
    target, draft = pair_of("tiny-qwen3")
    prompts = random_prompts(target, 2, seed=5)
    params = SamplingParams(temperature=0.0, max_tokens=33, ignore_eos=True)
    for output in generate(ddtree(target, draft, 31), prompts, params):
        metrics = output.outputs[0].spec_decode_metrics
        steps = sum(metrics.histogram)
        accepted = sum(n * times for n, times in enumerate(metrics.histogram))
        assert metrics.num_draft_tokens == 31 * steps
        # No path is longer than the draft block.
        assert sum(metrics.histogram[16:]) == 0
        # Every step but the prompt's emits the accepted tokens and one more; the
        # last may be cut by max_tokens, and what was cut is not counted.
        assert accepted + steps + 1 == len(output.outputs[0].token_ids)
