# SPDX-License-Identifier: Apache-2.0
"""Typical acceptance: greedy at temperature 0, more accepted as epsilon falls."""

from pathlib import Path

import pytest
from engines import EngineConfig, acceptance_length, ddtree, generate, token_ids
from prompts import random_prompts
from vllm import SamplingParams

PAIR = Path(__file__).resolve().parents[1] / "assets" / "tiny-qwen3"
TARGET, DRAFT = PAIR / "target", PAIR / "draft"
OPTIONS = {"max_num_seqs": 8}


def typical(epsilon: float) -> EngineConfig:
    return ddtree(
        TARGET,
        DRAFT,
        15,
        options=OPTIONS,
        ddtree_acceptance="typical",
        ddtree_typical_epsilon=epsilon,
    )


def test_temperature_zero_is_greedy() -> None:
    prompts = random_prompts(TARGET, 6, seed=31)
    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=24,
            ignore_eos=True,
            presence_penalty=0.4 * (i % 2),
            logprobs=1,
        )
        for i in range(len(prompts))
    ]
    outputs = generate(typical(0.09), prompts, params)
    plain = generate(EngineConfig(TARGET, options=OPTIONS), prompts, params)
    assert token_ids(outputs) == token_ids(plain)
    for output, expected in zip(outputs, plain, strict=True):
        left, right = output.outputs[0], expected.outputs[0]
        assert left.cumulative_logprob == pytest.approx(
            right.cumulative_logprob, abs=1e-3
        )


def test_acceptance_grows_as_epsilon_falls() -> None:
    prompts = random_prompts(TARGET, 8, seed=32)
    params = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=40, ignore_eos=True)
        for i in range(len(prompts))
    ]
    lossless = ddtree(TARGET, DRAFT, 15, options=OPTIONS)
    configs = [lossless, typical(0.3), typical(0.01)]
    lengths = [
        acceptance_length(generate(config, prompts, params)) for config in configs
    ]
    assert lengths == sorted(lengths)
    assert lengths[-1] > lengths[0]
