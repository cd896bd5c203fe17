# SPDX-License-Identifier: Apache-2.0
"""A real server process with method ddtree, and the real OpenAI client."""

import asyncio
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from engines import EngineConfig, generate
from prompts import random_prompts
from server import Server, serving
from vllm import CompletionOutput, SamplingParams

ROOT = Path(__file__).resolve().parents[2]
PAIR = ROOT / "tests" / "assets" / "tiny-qwen3"
TARGET, DRAFT = PAIR / "target", PAIR / "draft"
MODEL = "tiny"
BUDGET = 31
DRAFT_DEPTH = 15

COMMAND = [
    ROOT / "examples" / "serve.sh",
    *[TARGET, DRAFT, BUDGET],
    *["--served-model-name", MODEL],
    *["--dtype", "float32"],
    "--enforce-eager",
    *["--max-model-len", 512],
    *["--max-num-seqs", 16],
    # Less than the batch at its largest, and than the long prompt: chunks.
    *["--max-num-batched-tokens", 384],
    "--enable-prefix-caching",
    "--disable-uvicorn-access-log",
]
PLAIN = EngineConfig(
    TARGET, options={"max_num_seqs": 32, "max_num_batched_tokens": 1024}
)

DRAFTS = "vllm:spec_decode_num_drafts_total"
DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
ACCEPTED_PER_POS = "vllm:spec_decode_num_accepted_tokens_per_pos_total"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(COMMAND, tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def complete(client: openai.OpenAI, prompt: list[int], **arguments: Any) -> Any:
    extra = {"return_token_ids": True, **arguments.pop("extra_body", {})}
    return client.completions.create(
        model=MODEL, prompt=prompt, extra_body=extra, **arguments
    )


def plain(prompts: list[list[int]], *params: SamplingParams) -> list[CompletionOutput]:
    """What no speculation gives, one output for each prompt."""
    outputs = generate(PLAIN, prompts, params if len(params) > 1 else params[0])
    return [output.outputs[0] for output in outputs]


def test_greedy_completions_equal_no_speculation(client: openai.OpenAI) -> None:
    prompts = random_prompts(TARGET, 4, seed=1)
    # Longer than a chunk; the second of them finds the first's blocks.
    long_prompt = [token for p in random_prompts(TARGET, 30, seed=2) for token in p]
    prompts += [long_prompt[:450], long_prompt[:450]]
    expected = plain(prompts, SamplingParams(temperature=0.0, max_tokens=40))
    for prompt, output in zip(prompts, expected, strict=True):
        answer = complete(client, prompt, temperature=0.0, max_tokens=40)
        assert answer.choices[0].token_ids == output.token_ids
        assert answer.choices[0].text == output.text
        assert answer.choices[0].finish_reason == output.finish_reason
        assert answer.usage.completion_tokens == len(output.token_ids)


def test_a_stream_carries_the_same_tokens(client: openai.OpenAI) -> None:
    (prompt,) = random_prompts(TARGET, 1, seed=3)
    (expected,) = plain([prompt], SamplingParams(temperature=0.0, max_tokens=40))
    stream = complete(client, prompt, temperature=0.0, max_tokens=40, stream=True)
    chunks = [chunk.choices[0] for chunk in stream]
    assert [t for chunk in chunks for t in chunk.token_ids or []] == expected.token_ids
    assert "".join(chunk.text for chunk in chunks) == expected.text
    assert chunks[-1].finish_reason == expected.finish_reason
    # A step brings all of its tokens at once.
    assert max(len(chunk.token_ids or []) for chunk in chunks) > 1


def test_a_seed_gives_what_it_gives_without_speculation(client: openai.OpenAI) -> None:
    prompts = random_prompts(TARGET, 3, seed=4)
    params = [
        SamplingParams(temperature=0.9, top_p=0.95, seed=seed, max_tokens=30)
        for seed in range(len(prompts))
    ]
    for seed, output in enumerate(plain(prompts, *params)):
        answer = complete(
            client,
            prompts[seed],
            temperature=0.9,
            top_p=0.95,
            seed=seed,
            max_tokens=30,
        )
        assert answer.choices[0].token_ids == output.token_ids


def test_a_stop_string_ends_the_text(client: openai.OpenAI) -> None:
    (prompt,) = random_prompts(TARGET, 1, seed=5)
    (free,) = plain([prompt], SamplingParams(temperature=0.0, max_tokens=40))
    # It begins inside of a token and ends inside of another.
    stop = free.text[17:23]
    params = SamplingParams(temperature=0.0, max_tokens=40, stop=[stop])
    (expected,) = plain([prompt], params)
    answer = complete(client, prompt, temperature=0.0, max_tokens=40, stop=[stop])
    assert answer.choices[0].text == expected.text
    assert len(expected.text) < len(free.text)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].stop_reason == stop


def test_several_choices(client: openai.OpenAI) -> None:
    (prompt,) = random_prompts(TARGET, 1, seed=6)
    arguments = {"n": 3, "temperature": 1.0, "seed": 5, "max_tokens": 24}
    (output,) = generate(PLAIN, [prompt], SamplingParams(**arguments))
    expected = [choice.token_ids for choice in output.outputs]
    answer = complete(client, prompt, **arguments)
    assert [choice.token_ids for choice in answer.choices] == expected
    assert len({tuple(token_ids) for token_ids in expected}) > 1


def test_logprobs(client: openai.OpenAI) -> None:
    (prompt,) = random_prompts(TARGET, 1, seed=7)
    arguments = {"temperature": 0.0, "max_tokens": 24, "logprobs": 3}
    (expected,) = plain([prompt], SamplingParams(**arguments))
    choice = complete(client, prompt, **arguments).choices[0]
    assert expected.logprobs is not None
    chosen = [
        row[token].logprob
        for row, token in zip(expected.logprobs, expected.token_ids, strict=True)
    ]
    assert choice.logprobs.token_logprobs == pytest.approx(chosen, abs=1e-4)
    assert [len(top) >= 3 for top in choice.logprobs.top_logprobs] == [True] * 24


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"temperature": -1.0}, openai.BadRequestError),
        ({"max_tokens": 0}, openai.BadRequestError),
        ({"max_tokens": 600}, openai.BadRequestError),
        ({"top_p": 2.0}, openai.BadRequestError),
        ({"model": "another"}, openai.NotFoundError),
        ({"prompt": [5] * 512}, openai.BadRequestError),
        ({"prompt": [100_000]}, openai.BadRequestError),
        (
            {"extra_body": {"structured_outputs": {"regex": "(ba"}}},
            openai.BadRequestError,
        ),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_an_invalid_request_is_refused_and_the_server_goes_on(
    client: openai.OpenAI, arguments: dict[str, Any], error: type[Exception]
) -> None:
    valid = {"model": MODEL, "prompt": [8, 9, 10], "temperature": 0.0, "max_tokens": 4}
    with pytest.raises(error):
        client.completions.create(**valid | arguments)
    answer = client.completions.create(**valid)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4


def test_the_example_client_chats_with_the_server(server: Server) -> None:
    script = ROOT / "examples" / "openai_client.py"
    command = [sys.executable, script, "--url", server.url, "--prompt", "mo we ki"]
    command += ["--max-tokens", "40", "--temperature", "0.5"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    last = result.stdout.splitlines()[-1]
    match = re.fullmatch(r"client: tokens=(\d+) acceptance_length=([\d.]+)", last)
    assert match, result.stdout
    assert 0 < int(match[1]) <= 40
    assert 1.0 < float(match[2]) <= DRAFT_DEPTH + 1


def test_the_example_client_says_that_nobody_answers() -> None:
    script = ROOT / "examples" / "openai_client.py"
    command = [sys.executable, script, "--url", "http://127.0.0.1:9"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("client: http://127.0.0.1:9 does not answer: ")


def test_the_counters_agree_with_each_other_and_with_the_tokens(
    server: Server, client: openai.OpenAI
) -> None:
    """Nothing past max_tokens, an EOS or a stop token counts as accepted."""
    before = server.metrics()
    num_tokens, reasons = 0, []
    prompts = random_prompts(TARGET, 6, seed=8)
    for i, prompt in enumerate(prompts):
        answer = complete(
            client,
            prompt,
            max_tokens=5 + 7 * i,
            temperature=0.8,
            seed=i,
            # A frequent word, and a frequent EOS.
            extra_body={"stop_token_ids": [5]} if i % 2 else {},
            logit_bias={"2": 3.0} if i % 3 == 0 else {},
        )
        num_tokens += answer.usage.completion_tokens
        reasons.append(answer.choices[0].finish_reason)
    assert set(reasons) == {"stop", "length"}
    check_counters(server.metrics() - before, len(prompts), num_tokens)


def check_counters(grown: Counter[str], num_requests: int, num_tokens: int) -> None:
    """How much the counters grew over requests that were not aborted."""
    per_pos = [grown[f"{ACCEPTED_PER_POS}[{i}]"] for i in range(BUDGET)]
    assert per_pos == sorted(per_pos, reverse=True)
    assert per_pos[0] > 0
    assert sum(per_pos[DRAFT_DEPTH:]) == 0
    assert grown[ACCEPTED] == sum(per_pos)
    assert grown[DRAFT_TOKENS] == BUDGET * grown[DRAFTS]
    # The prompt's step gives a token, every other the accepted ones and one more.
    assert num_tokens == num_requests + grown[DRAFTS] + grown[ACCEPTED]


@dataclass(frozen=True)
class Load:
    """A request of the load test."""

    prompt: list[int]
    sampling: dict[str, Any]
    abort_after: int | None
    """Chunks after which the client hangs up; 0 is before the first."""


def loads(count: int, seed: int) -> list[Load]:
    """Greedy and seeded requests of random lengths; a tenth of them is aborted."""
    chooser = random.Random(seed)
    made = []
    for i, prompt in enumerate(random_prompts(TARGET, count, seed)):
        repeated = chooser.choice([1, 1, 1, 8])
        abort_after = chooser.choice([0, 1, 3]) if i % 10 == 3 else None
        sampling = {
            "temperature": chooser.choice([0.0, 0.0, 0.7, 1.0]),
            "seed": i,
            "max_tokens": chooser.choice([1, 2, 8, 20, 40, 60]),
        }
        if abort_after is not None:
            # Long enough to be hung up on.
            sampling["max_tokens"] = 60
        made.append(Load(prompt * repeated, sampling, abort_after))
    return made


async def stream(client: openai.AsyncOpenAI, load: Load) -> list[int] | None:
    """The tokens of a streamed request, or None where it was aborted."""
    extra_body = {"return_token_ids": True, "ignore_eos": load.abort_after is not None}
    pending = client.completions.create(
        model=MODEL,
        prompt=load.prompt,
        stream=True,
        extra_body=extra_body,
        **load.sampling,
    )
    if load.abort_after == 0:
        task = asyncio.ensure_future(pending)
        await asyncio.sleep(0.2)
        task.cancel()
        return None
    chunks = await pending
    tokens: list[int] = []
    num_chunks = 0
    async for chunk in chunks:
        tokens += chunk.choices[0].token_ids or []
        num_chunks += 1
        if num_chunks == load.abort_after:
            await chunks.close()
            return None
    return tokens


async def stream_all(url: str, requests: list[Load]) -> list[list[int] | None]:
    """All at once; a request that fails raises."""
    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=500
    ) as client:
        return await asyncio.gather(*(stream(client, load) for load in requests))


def check_load(server: Server, client: openai.OpenAI, count: int) -> None:
    requests = loads(count, seed=count)
    outputs = asyncio.run(stream_all(server.url, requests))
    params = [SamplingParams(**load.sampling) for load in requests]
    expected = plain([load.prompt for load in requests], *params)
    for load, tokens, output in zip(requests, outputs, expected, strict=True):
        if load.abort_after is None:
            assert tokens == output.token_ids
    assert sum(tokens is None for tokens in outputs) == count // 10
    check_idle(server, client)
    assert "ERROR" not in server.log.read_text()


def check_idle(server: Server, client: openai.OpenAI) -> None:
    """No request is left, and every KV block is free; gauges move with steps only."""
    deadline = time.monotonic() + 60
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    while True:
        complete(client, [8, 9, 10], max_tokens=2)
        metrics = server.metrics()
        left = {name: metrics[f"vllm:{name}"] for name in gauges}
        if not any(left.values()):
            return
        assert time.monotonic() < deadline, left
        time.sleep(0.5)


def test_streams_and_aborts_under_load(server: Server, client: openai.OpenAI) -> None:
    check_load(server, client, 40)


@pytest.mark.full
def test_200_streams_and_aborts_under_load(
    server: Server, client: openai.OpenAI
) -> None:
    check_load(server, client, 200)
