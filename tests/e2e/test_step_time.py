# SPDX-License-Identifier: Apache-2.0
"""An engine step of the real pair is short enough to test with on a CPU."""

import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from engines import dflash, engine
from prompts import chat_prompts
from vllm import SamplingParams

MAX_STEP_S = 1.0


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 1},
        {
            "temperature": 0.8,
            "seed": 1,
            "top_k": 50,
            "top_p": 0.9,
            "repetition_penalty": 1.1,
            "logprobs": 3,
        },
    ],
    ids=["greedy", "sampled", "everything"],
)
def test_step_with_16_rows_to_verify(
    real_target: Path, real_draft: Path, sampling: dict[str, Any]
) -> None:
    llm = engine(dflash(real_target, real_draft, 15))
    (prompt,) = chat_prompts(real_target, "humaneval", count=1)
    params = SamplingParams(max_tokens=32, ignore_eos=True, **sampling)
    llm.llm_engine.add_request("step-time", {"prompt_token_ids": prompt}, params)
    seconds = []
    while llm.llm_engine.has_unfinished_requests():
        started = time.monotonic()
        llm.llm_engine.step()
        seconds.append(time.monotonic() - started)
    # The first step is the prefill; every other verifies 15 drafts and the root.
    assert len(seconds) > 4
    assert median(seconds[1:]) <= MAX_STEP_S
