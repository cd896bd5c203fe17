# SPDX-License-Identifier: Apache-2.0
"""Every option at and past its limits in one batch: an answer or a clear refusal."""

from pathlib import Path
from typing import Any

import pytest
from engines import EngineConfig, ddtree, engine, generate, token_ids
from prompts import random_prompts
from sampling_sets import REASONING
from vllm import LLM, RequestOutput, SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

PAIR = Path(__file__).resolve().parents[1] / "assets" / "tiny-qwen3"
TARGET, DRAFT = PAIR / "target", PAIR / "draft"
VOCAB = 128
MAX_MODEL_LEN = 96
PROMPT_LEN = 12
OPTIONS: dict[str, Any] = {
    "max_num_seqs": 6,
    "max_num_batched_tokens": 1024,
    "max_model_len": MAX_MODEL_LEN,
    "max_logprobs": -1,
    "reasoning_config": REASONING,
}

AT_THE_LIMITS: list[dict[str, Any]] = [
    {"temperature": 1e-4},
    {"temperature": 2.0},
    {"temperature": 0.0, "top_k": 1, "top_p": 1e-6, "min_p": 1.0},
    {"top_k": VOCAB + 50, "top_p": 1.0, "min_p": 0.0},
    {"top_p": 1e-9},
    {"min_p": 1.0},
    {"presence_penalty": 2.0, "frequency_penalty": 2.0, "repetition_penalty": 1e-3},
    {"presence_penalty": -2.0, "frequency_penalty": -2.0, "repetition_penalty": 1e3},
    {"repetition_penalty": 1e30, "temperature": 0.0},
    {"logit_bias": dict.fromkeys(range(VOCAB), -100.0)},
    {"logit_bias": {0: 100.0, VOCAB - 1: 100.0}},
    {"allowed_token_ids": [VOCAB - 1]},
    {"allowed_token_ids": [0], "min_tokens": 5, "stop_token_ids": [0]},
    {"allowed_token_ids": list(range(VOCAB))},
    {"min_tokens": 40, "max_tokens": 40, "stop_token_ids": list(range(VOCAB))},
    {"stop_token_ids": list(range(VOCAB))},
    {"bad_words": ["ba", "be bi bo", "tru"]},
    {"bad_words": [" ".join(["ba"] * 30)]},
    {"logprobs": -1, "prompt_logprobs": -1},
    {"logprob_token_ids": [0, VOCAB - 1]},
    {"seed": 2**63 - 1},
    {"seed": -(2**63)},
    {"max_tokens": 1},
    {"max_tokens": MAX_MODEL_LEN - PROMPT_LEN, "temperature": 0.0},
    {"thinking_token_budget": 0, "logit_bias": {5: 50.0}},
    {"thinking_token_budget": 2**31, "presence_penalty": 1.0},
    {"n": 4, "temperature": 1.0},
    {"stop": ["ba", "tru"], "include_stop_str_in_output": True},
    {"structured_outputs": StructuredOutputsParams(choice=["ba", "tru"])},
    {"structured_outputs": StructuredOutputsParams(regex="(ba|be)+"), "min_tokens": 9},
]

PAST_THE_LIMITS: list[dict[str, Any]] = [
    {"temperature": -1.0},
    {"temperature": 100.0},
    {"temperature": float("nan")},
    {"top_k": -2},
    {"top_p": 0.0},
    {"top_p": 1.5},
    {"min_p": -0.1},
    {"min_p": 1.5},
    {"presence_penalty": 2.1},
    {"frequency_penalty": -2.1},
    {"repetition_penalty": 0.0},
    {"repetition_penalty": -1.0},
    {"logit_bias": {VOCAB: 1.0}},
    {"logit_bias": {-1: 1.0}},
    {"allowed_token_ids": []},
    {"allowed_token_ids": [VOCAB]},
    # More than vLLM's worker has room for.
    {"allowed_token_ids": [5] * 1025},
    {"min_tokens": 10, "max_tokens": 5},
    {"min_tokens": -1},
    {"stop_token_ids": [VOCAB]},
    {"stop": [""]},
    {"bad_words": [""]},
    {"bad_words": ["ba"] * 129},
    {"logprobs": -2},
    {"logprobs": VOCAB + 1},
    {"prompt_logprobs": VOCAB + 1},
    {"logprob_token_ids": [VOCAB]},
    {"logprob_token_ids": [1, 2], "logprobs": 5},
    {"max_tokens": 0},
    {"thinking_token_budget": -5},
    {"n": 0},
    {"n": 2, "temperature": 0.0},
    {"structured_outputs": StructuredOutputsParams(regex="(")},
]


def submit(llm: LLM, prompt: list[int], options: dict[str, Any], name: str) -> str:
    """Empty if the engine took the request, else its message."""
    arguments = {"max_tokens": 20, "ignore_eos": True, "seed": 7} | options
    try:
        params = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, **arguments)
        llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)
    except (VLLMClientError, ValueError) as error:
        return str(error) or "no message"
    return ""


def finish(llm: LLM) -> dict[str, RequestOutput]:
    outputs = {}
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            if output.finished:
                outputs[output.request_id] = output
    return outputs


@pytest.mark.parametrize(
    "acceptance", ["rejection", pytest.param("typical", marks=pytest.mark.full)]
)
def test_hostile_batch(acceptance: str) -> None:
    config = ddtree(TARGET, DRAFT, 63, options=OPTIONS, ddtree_acceptance=acceptance)
    llm = engine(config)
    cases = AT_THE_LIMITS + PAST_THE_LIMITS
    prompts = [
        (prompt * 3)[:PROMPT_LEN] for prompt in random_prompts(TARGET, len(cases), 41)
    ]
    prompts[0] = [VOCAB - 1] * PROMPT_LEN
    prompts[1] = [0] * PROMPT_LEN
    refused = {}
    for i, (prompt, case) in enumerate(zip(prompts, cases, strict=True)):
        if message := submit(llm, prompt, case, str(i)):
            refused[i] = message
    outputs = finish(llm)
    for i, case in enumerate(cases):
        assert (i in refused) != (str(i) in outputs), case
    assert {i for i in refused if i < len(AT_THE_LIMITS)} == set()
    for i, message in refused.items():
        assert len(message) > 10, (cases[i], message)
    for i in range(len(AT_THE_LIMITS)):
        check_answer(cases[i], outputs[str(i)])
    # The engine lives, and is as good as new.
    sane = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    after = generate(config, prompts[2:5], sane)
    plain = engine(EngineConfig(TARGET, options=OPTIONS))
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts[2:5]]
    assert token_ids(after) == token_ids(plain.generate(inputs, sane, use_tqdm=False))
    if acceptance == "rejection":
        for i in range(len(AT_THE_LIMITS)):
            assert submit(plain, prompts[i], cases[i], str(i)) == ""
        expected = finish(plain)
        different = [
            cases[i]
            for i in range(len(AT_THE_LIMITS))
            if tokens_of(outputs[str(i)]) != tokens_of(expected[str(i)])
        ]
        assert different == []


def tokens_of(output: RequestOutput) -> list[list[int]]:
    return [list(completion.token_ids) for completion in output.outputs]


def check_answer(case: dict[str, Any], output: RequestOutput) -> None:
    most = case.get("max_tokens", 20)
    assert len(output.outputs) == case.get("n", 1)
    allowed = set(case.get("allowed_token_ids", range(VOCAB)))
    for completion in output.outputs:
        assert 1 <= len(completion.token_ids) <= most
        assert set(completion.token_ids) <= allowed
        # Where no token is left, the first one comes, and may be a stop token.
        if allowed - set(case.get("stop_token_ids", [])):
            assert len(completion.token_ids) >= min(case.get("min_tokens", 1), most)
    for word in case.get("bad_words", []):
        assert f" {word} " not in f" {output.outputs[0].text} "
