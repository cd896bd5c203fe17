# SPDX-License-Identifier: Apache-2.0
"""Stock `method: dflash` on the CPU engine, the yardstick of everything else."""

import json
from pathlib import Path

import pytest
from engines import EngineConfig, acceptance_length, dflash, generate, token_ids
from own_process import (
    TENSOR_PARALLEL_2,
    TENSOR_PARALLEL_2_ENV,
    generate_in_own_process,
)
from prompts import chat_prompts, random_prompts
from vllm import SamplingParams

ASSETS = Path(__file__).resolve().parents[1] / "assets"
TINY_PAIRS = [
    # The CPU has no MLA attention that a drafter can read from.
    pytest.param(pair, marks=pytest.mark.gpu) if "deepseek" in pair.name else pair
    for pair in sorted(ASSETS.glob("tiny-*"))
]

GREEDY = {"temperature": 0.0, "max_tokens": 32, "ignore_eos": True}


def tiny_dflash(pair: Path) -> EngineConfig:
    draft_config = json.loads((pair / "draft" / "config.json").read_text())
    return dflash(pair / "target", pair / "draft", draft_config["block_size"] - 1)


@pytest.mark.parametrize("pair", TINY_PAIRS, ids=lambda pair: pair.name)
def test_tiny_pair_gives_the_tokens_of_no_speculation(pair: Path) -> None:
    prompts = random_prompts(pair / "target", count=6)
    params = SamplingParams(**GREEDY)
    drafted = generate(tiny_dflash(pair), prompts, params)
    plain = generate(EngineConfig(pair / "target"), prompts, params)
    assert token_ids(drafted) == token_ids(plain)
    assert 1.5 <= acceptance_length(drafted) <= 6


def test_real_pair_gives_the_tokens_of_no_speculation(
    real_target: Path, real_draft: Path
) -> None:
    prompts = chat_prompts(real_target, "humaneval", count=4)
    params = SamplingParams(temperature=0.0, max_tokens=40)
    drafted = generate(dflash(real_target, real_draft, 15), prompts, params)
    plain = generate(EngineConfig(real_target), prompts, params)
    assert token_ids(drafted) == token_ids(plain)
    assert acceptance_length(drafted) >= 2.5


def test_two_tensor_parallel_workers_give_the_same_tokens() -> None:
    pair = ASSETS / "tiny-qwen3"
    prompts = random_prompts(pair / "target", count=3)
    config = tiny_dflash(pair)
    parallel = generate_in_own_process(
        EngineConfig(config.model, config.speculative, TENSOR_PARALLEL_2),
        prompts,
        GREEDY,
        TENSOR_PARALLEL_2_ENV,
    )
    plain = EngineConfig(pair / "target")
    assert parallel == token_ids(generate(plain, prompts, SamplingParams(**GREEDY)))
