# SPDX-License-Identifier: Apache-2.0
"""`AsyncLLM`: the engine in a process of its own, its client in ours."""

import asyncio
from pathlib import Path

import pytest
from engines import EngineConfig, ddtree, generate, token_ids
from prompts import random_prompts
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

PAIR = Path(__file__).resolve().parents[1] / "assets" / "tiny-qwen3"
TARGET, DRAFT = PAIR / "target", PAIR / "draft"
NUM_ABORTED = 2


def params(i: int) -> SamplingParams:
    return SamplingParams(
        temperature=i % 2,
        seed=i,
        max_tokens=30,
        ignore_eos=True,
        output_kind=RequestOutputKind.CUMULATIVE,
    )


async def consume(llm: AsyncLLM, i: int, prompt: list[int]) -> list[int]:
    """The tokens of a request; the first few stop listening at their first output."""
    tokens: list[int] = []
    request = llm.generate({"prompt_token_ids": prompt}, params(i), f"request-{i}")
    async for output in request:
        tokens = list(output.outputs[0].token_ids)
        if i < NUM_ABORTED:
            break
    return tokens


async def generate_async(prompts: list[list[int]]) -> list[list[int]]:
    arguments = ddtree(TARGET, DRAFT, 31).llm_arguments()
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    try:
        requests = (consume(llm, i, prompt) for i, prompt in enumerate(prompts))
        return await asyncio.gather(*requests)
    finally:
        llm.shutdown()


# `vllm serve` is on top of it, and tested always.
@pytest.mark.full
def test_the_async_engine_gives_the_tokens_of_plain_vllm() -> None:
    prompts = random_prompts(TARGET, 8, seed=60)
    outputs = asyncio.run(generate_async(prompts))
    every = [params(i) for i in range(len(prompts))]
    expected = token_ids(generate(EngineConfig(TARGET), prompts, every))
    assert outputs[NUM_ABORTED:] == expected[NUM_ABORTED:]
    for got, whole in zip(outputs[:NUM_ABORTED], expected, strict=False):
        assert got == whole[: len(got)]
