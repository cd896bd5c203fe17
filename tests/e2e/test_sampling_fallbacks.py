# SPDX-License-Identifier: Apache-2.0
"""Grammars and custom logits processors verify chains, losslessly."""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import EngineConfig, acceptance_length, ddtree, engine, generate, token_ids
from prompts import random_prompts
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.worker.gpu.sample.logits_processor.interface import (
    LogitsContext,
    LogitsProcessor,
)

PAIR = Path(__file__).resolve().parents[1] / "assets" / "tiny-qwen3"
TARGET, DRAFT = PAIR / "target", PAIR / "draft"
# Runs of syllables that the tiny language knows, ended by one of two marks.
GRAMMAR = r"((ba|be|bi|bo|bu|da|de|di|do|du|ka|ke|ki|ko|ku){2}(\.|!)){1,8}"


def metrics(config: EngineConfig) -> dict[str, int]:
    (values,) = engine(config).collective_rpc("ddtree_metrics")
    return dict(values["vllm:ddtree_chain_requests_total"])


def mixed_with_grammars(count: int) -> list[SamplingParams]:
    """Every other request has a grammar; temperatures differ."""
    return [
        SamplingParams(
            temperature=(0.0, 0.7, 1.0)[i % 3],
            seed=i,
            max_tokens=30,
            repetition_penalty=1.2 if i % 4 == 0 else 1.0,
            structured_outputs=(
                StructuredOutputsParams(regex=GRAMMAR) if i % 2 == 0 else None
            ),
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("budget", [7, 31])
def test_structured_output_is_valid_and_equal_beside_trees(budget: int) -> None:
    options = {"max_num_seqs": 8}
    config = ddtree(TARGET, DRAFT, budget, options=options)
    prompts = random_prompts(TARGET, 12, seed=21)
    params = mixed_with_grammars(len(prompts))
    outputs = generate(config, prompts, params)
    plain = generate(EngineConfig(TARGET, options=options), prompts, params)
    assert token_ids(outputs) == token_ids(plain)
    for output, chosen in zip(outputs, params, strict=True):
        completion = output.outputs[0]
        if chosen.structured_outputs is not None:
            text = completion.text.replace(" ", "")
            assert completion.finish_reason == "stop"
            assert re.fullmatch(GRAMMAR, text), text
    assert metrics(config) == {"structured_outputs": 6}
    assert acceptance_length(outputs[::2]) > 1.1


class ForbidRepeat(LogitsProcessor):
    """The token before must not come again; reads drafts as vLLM lays them out."""

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        rows = torch.arange(logits.shape[0])
        logits[rows, ctx.input_ids[: logits.shape[0]].long()] = -torch.inf
        return logits


def test_custom_processors_make_every_request_a_chain() -> None:
    options: dict[str, Any] = {
        "max_num_seqs": 4,
        "logits_processors": [f"{__name__}:ForbidRepeat"],
    }
    config = ddtree(TARGET, DRAFT, 31, options=options)
    prompts = random_prompts(TARGET, 4, seed=22)
    params = [
        SamplingParams(
            temperature=1.0,
            seed=i,
            max_tokens=24,
            ignore_eos=True,
            presence_penalty=0.5,
        )
        for i in range(len(prompts))
    ]
    outputs = generate(config, prompts, params)
    plain = generate(EngineConfig(TARGET, options=options), prompts, params)
    assert token_ids(outputs) == token_ids(plain)
    assert metrics(config) == {"custom_logits_processors": 4}
    for tokens in token_ids(outputs):
        assert all(a != b for a, b in itertools.pairwise(tokens))
