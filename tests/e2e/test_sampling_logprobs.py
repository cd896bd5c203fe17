# SPDX-License-Identifier: Apache-2.0
"""Logprobs come in committed order and with plain vLLM's values."""

from pathlib import Path
from typing import Any

import pytest
from engines import EngineConfig, ddtree, generate, token_ids
from prompts import random_prompts
from vllm import RequestOutput, SamplingParams
from vllm.v1.worker.gpu.spec_decode import rejection_sampler

PAIR = Path(__file__).resolve().parents[1] / "assets" / "tiny-qwen3"
TARGET, DRAFT = PAIR / "target", PAIR / "draft"
VOCAB = 128

OPTIONS: list[dict[str, Any]] = [
    {"logprobs": 0},
    {"logprobs": 5, "temperature": 0.0},
    {},
    {"logprobs": -1, "temperature": 0.7, "top_p": 0.8},
    {"logprobs": 2, "prompt_logprobs": 3, "repetition_penalty": 1.4},
    {"logprobs": 1, "presence_penalty": 1.0, "top_k": 5},
    {"prompt_logprobs": 0, "temperature": 0.0},
    {"logprob_token_ids": [127, 2, 50]},
    {"logprob_token_ids": [9], "min_p": 0.1},
    {"logprobs": 3, "max_tokens": 1},
]


def compare(mode: str, budget: int, chunk_rows: int | None = None) -> None:
    options = {"logprobs_mode": mode, "max_logprobs": -1, "max_num_seqs": 8}
    prompts = random_prompts(TARGET, len(OPTIONS), seed=11)
    base = {"temperature": 1.0, "max_tokens": 20, "ignore_eos": True}
    params = [
        SamplingParams(seed=i, **base | chosen) for i, chosen in enumerate(OPTIONS)
    ]
    plain = generate(EngineConfig(TARGET, options=options), prompts, params)
    with pytest.MonkeyPatch.context() as patch:
        if chunk_rows is not None:
            chunk_bytes = chunk_rows * VOCAB * 4
            patch.setattr(rejection_sampler, "MAX_CHUNK_BYTES", chunk_bytes)
        outputs = generate(
            ddtree(TARGET, DRAFT, budget, options=options), prompts, params
        )
    assert token_ids(outputs) == token_ids(plain)
    for output, expected, chosen in zip(outputs, plain, OPTIONS, strict=True):
        wants_logprobs = "logprobs" in chosen or "logprob_token_ids" in chosen
        assert_same_positions(
            output.outputs[0].logprobs, expected.outputs[0].logprobs, wants_logprobs
        )
        assert_same_positions(
            output.prompt_logprobs,
            expected.prompt_logprobs,
            "prompt_logprobs" in chosen,
        )
        assert_cumulative(output, expected)


def assert_same_positions(left: Any, right: Any, is_wanted: bool) -> None:
    assert (left is not None) == (right is not None) == is_wanted
    for here, there in zip(left or [], right or [], strict=True):
        if there is None:
            assert here is None
            continue
        assert list(here) == list(there)
        for token, entry in there.items():
            assert here[token].logprob == pytest.approx(entry.logprob, abs=1e-4)
            assert here[token].rank == entry.rank
            assert here[token].decoded_token == entry.decoded_token


def assert_cumulative(output: RequestOutput, expected: RequestOutput) -> None:
    left = output.outputs[0].cumulative_logprob
    right = expected.outputs[0].cumulative_logprob
    assert left == (right if right is None else pytest.approx(right, abs=1e-3))


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_logprobs_equal_plain_vllm(mode: str) -> None:
    compare(mode, budget=15)


def test_logprobs_of_a_batch_verified_in_chunks() -> None:
    """A chunk holds one or two trees of 32 rows."""
    compare("raw_logprobs", budget=31, chunk_rows=70)


@pytest.mark.full
@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits"])
@pytest.mark.parametrize("chunk_rows", [None, 1, 70])
def test_logits_equal_plain_vllm(mode: str, chunk_rows: int | None) -> None:
    compare(mode, budget=31, chunk_rows=chunk_rows)
