# SPDX-License-Identifier: Apache-2.0
"""What the engine does besides generating goes on with trees."""

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import (
    EngineConfig,
    acceptance_length,
    ddtree,
    engine,
    generate,
    token_ids,
)
from lora import make_adapter
from prompts import chat_prompts, random_prompts
from vllm import RequestOutput, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams

PAIR = Path(__file__).resolve().parents[1] / "assets" / "tiny-qwen3"
TARGET, DRAFT = PAIR / "target", PAIR / "draft"
BUDGET = 31
MAX_MODEL_LEN = 128
OPTIONS = {"max_num_seqs": 8, "max_model_len": MAX_MODEL_LEN}
TREE = ddtree(TARGET, DRAFT, BUDGET, options=OPTIONS)
PLAIN = EngineConfig(TARGET, options=OPTIONS)
# A token of the tiny language.
PERIOD = 5


def greedy(max_tokens: int | None = 40, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **options)


def check_equal(
    outputs: Sequence[RequestOutput], plain: Sequence[RequestOutput]
) -> None:
    for output, expected in zip(outputs, plain, strict=True):
        for left, right in zip(output.outputs, expected.outputs, strict=True):
            assert left.token_ids == right.token_ids
            assert left.text == right.text
            assert left.finish_reason == right.finish_reason
            assert left.stop_reason == right.stop_reason


def check_counted(outputs: Sequence[RequestOutput]) -> None:
    """Nothing counts as accepted that was not put out."""
    for output in outputs:
        assert counted(output) == len(output.outputs[0].token_ids)


def counted(output: RequestOutput) -> int:
    """The prompt's step gives a token, every other the accepted ones and one more."""
    metrics = output.outputs[0].spec_decode_metrics
    histogram = metrics.histogram if metrics else []
    return 1 + sum((1 + count) * times for count, times in enumerate(histogram))


def generate_stepwise(
    config: EngineConfig,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    abort: dict[int, int],
) -> dict[int, list[int]]:
    """Tokens of requests that ended; request i is aborted after `abort[i]` steps."""
    core = engine(config).llm_engine
    names = [str(10_000 + i) for i in range(len(prompts))]
    ids = [
        core.add_request(name, {"prompt_token_ids": list(prompt)}, params)
        for name, prompt in zip(names, prompts, strict=True)
    ]
    ended = {}
    for step in itertools.count():
        if not core.has_unfinished_requests():
            return ended
        core.abort_request([ids[i] for i, when in abort.items() if when == step], True)
        for output in core.step():
            completion = output.outputs[0]
            if output.finished and completion.finish_reason != "abort":
                ended[names.index(output.request_id)] = list(completion.token_ids)
    raise AssertionError


def test_an_abort_leaves_the_other_requests_alone() -> None:
    prompts = random_prompts(TARGET, 12, seed=31)
    # At the prompt, inside of trees, and while others wait for the seat.
    abort = {1: 1, 4: 2, 6: 3, 9: 0}
    ended = generate_stepwise(TREE, prompts, greedy(ignore_eos=True), abort)
    plain = token_ids(generate(PLAIN, prompts, greedy(ignore_eos=True)))
    assert ended == {i: t for i, t in enumerate(plain) if i not in abort}


def test_what_earlier_requests_left_is_never_read() -> None:
    """Trees, drafts, masks and KV of before are garbage, and nobody notices."""
    prompts = random_prompts(TARGET, 8, seed=32)
    generate(TREE, random_prompts(TARGET, 8, seed=33), greedy(30, ignore_eos=True))
    core = engine(TREE).llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    speculator = runner.speculator
    generator = torch.Generator().manual_seed(0)
    tree = speculator.state.tree
    for tensor in (tree.tokens, speculator.draft_tokens):
        tensor.random_(8, 128, generator=generator)
    for tensor in (tree.parents, tree.depths):
        tensor.random_(0, 4, generator=generator)
    tree.num_nodes.fill_(BUDGET)
    tree.ancestors.random_(generator=generator)
    for kv_cache in runner.kv_caches:
        kv_cache.normal_(std=100, generator=generator)
    outputs = generate(TREE, prompts, greedy())
    check_equal(outputs, generate(PLAIN, prompts, greedy()))


def stop_requests(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Requests that meet a stop string, a stop token, or EOS somewhere in a step."""
    chooser = random.Random(34)
    prompts = random_prompts(TARGET, count, seed=34)
    seeds = [
        SamplingParams(temperature=i % 3 / 3, seed=i, max_tokens=60)
        for i in range(count)
    ]
    params = []
    for i, output in enumerate(generate(PLAIN, prompts, seeds)):
        text, tokens = output.outputs[0].text, list(output.outputs[0].token_ids)
        chosen: dict[str, Any] = {"min_tokens": chooser.choice([0, 0, 3, 10])}
        match i % 4:
            case 0:
                start = chooser.randrange(len(text) // 2)
                chosen["stop"] = [text[start : start + chooser.randint(1, 6)]]
                chosen["include_stop_str_in_output"] = chooser.random() < 0.5
            case 1:
                chosen["stop_token_ids"] = chooser.sample(tokens, min(2, len(tokens)))
            case 2:
                chosen["stop_token_ids"] = [PERIOD, *range(100, 110)]
                chosen["ignore_eos"] = True
            case 3:
                # As frequent as it gets without being certain.
                chosen["logit_bias"] = {2: 4.0}
        arguments = {"temperature": i % 3 / 3, "seed": i, "max_tokens": 60}
        params.append(SamplingParams(**arguments | chosen))
    return prompts, params


def depths_of_stops(config: EngineConfig, params: Sequence[SamplingParams]) -> set[int]:
    """Depths of the nodes at which the last step of a request stopped."""
    (traces,) = engine(config).collective_rpc("ddtree_stop_trace")
    by_request = {trace["req_id"]: trace for trace in traces}
    stops = {token for each in params for token in each.stop_token_ids or []} | {2}
    depths = set()
    for last in by_request.values():
        row = [0, *last["path"]][-1]
        nodes = zip(last["parents"], last["tokens"], strict=True)
        if any(parent == row and token in stops for parent, token in nodes):
            depths.add(len(last["path"]) + 1)
    return depths


def check_stops(count: int) -> None:
    prompts, params = stop_requests(count)
    engine(TREE).collective_rpc("ddtree_start_trace")
    outputs = generate(TREE, prompts, params)
    depths = depths_of_stops(TREE, params)
    check_equal(outputs, generate(PLAIN, prompts, params))
    reasons = [output.outputs[0].finish_reason for output in outputs]
    assert reasons.count("stop") > count / 2
    # Strings are found outside of the engine, after it has counted.
    pairs = zip(outputs, params, strict=True)
    check_counted([output for output, each in pairs if not each.stop])
    assert len(depths) >= 3


def test_stop_strings_stop_tokens_and_eos_inside_of_a_path() -> None:
    check_stops(16)


@pytest.mark.full
def test_many_stops_inside_of_a_path() -> None:
    check_stops(120)


def test_every_max_tokens_up_to_more_than_a_tree() -> None:
    (prompt,) = random_prompts(TARGET, 1, seed=36)
    limits = range(1, BUDGET + 3)
    params = [greedy(limit, ignore_eos=True) for limit in limits]
    outputs = generate(TREE, [prompt] * len(limits), params)
    (longest,) = token_ids(generate(PLAIN, [prompt], params[-1]))
    assert token_ids(outputs) == [longest[:limit] for limit in limits]
    check_counted(outputs)


def test_requests_that_end_at_max_model_len() -> None:
    room = range(1, BUDGET + 3)
    long_prompt = [t for p in random_prompts(TARGET, 20, seed=37) for t in p]
    prompts = [long_prompt[: MAX_MODEL_LEN - left] for left in room]
    params = greedy(None, ignore_eos=True)
    outputs = generate(TREE, prompts, params)
    check_equal(outputs, generate(PLAIN, prompts, params))
    assert [len(tokens) for tokens in token_ids(outputs)] == list(room)
    # The scheduler gives a last position no drafts, and nothing to count.
    uncounted = {len(o.outputs[0].token_ids) - counted(o) for o in outputs}
    assert uncounted <= {0, 1}


def test_a_prompt_of_one_token() -> None:
    prompts = [[token] for token in (PERIOD, 8, 60, 127)]
    check_equal(generate(TREE, prompts, greedy()), generate(PLAIN, prompts, greedy()))


def test_several_outputs_of_a_request() -> None:
    prompts = random_prompts(TARGET, 3, seed=38)
    params = SamplingParams(n=4, temperature=1.0, seed=7, max_tokens=24)
    outputs = generate(TREE, prompts, params)
    check_equal(outputs, generate(PLAIN, prompts, params))
    for output in outputs:
        assert len({tuple(each.token_ids) for each in output.outputs}) > 1


def test_a_choice_is_one_of_the_choices() -> None:
    choices = ["moweki!", "mowekizidigo.", "gerafo.again", "zumu"]
    prompts = random_prompts(TARGET, 8, seed=39)
    params = [
        SamplingParams(
            temperature=i % 2,
            seed=i,
            max_tokens=20,
            structured_outputs=StructuredOutputsParams(choice=choices),
        )
        for i in range(len(prompts))
    ]
    outputs = generate(TREE, prompts, params)
    check_equal(outputs, generate(PLAIN, prompts, params))
    texts = [output.outputs[0].text.replace(" ", "") for output in outputs]
    assert set(texts) <= set(choices)
    assert len(set(texts)) > 1


def test_prefix_cache_hits_lose_no_acceptance() -> None:
    options = OPTIONS | {"enable_prefix_caching": True, "block_size": 32}
    config = ddtree(TARGET, DRAFT, BUDGET, options=options)
    shared = [t for p in random_prompts(TARGET, 10, seed=40) for t in p][:100]
    prompts = [shared + prompt[:5] for prompt in random_prompts(TARGET, 4, seed=41)]
    params = greedy(20, ignore_eos=True)
    cold = generate(config, prompts[:1], params) + generate(config, prompts[1:], params)
    warm = generate(config, prompts, params)
    assert [output.num_cached_tokens for output in cold] == [0, 64, 64, 64]
    assert [output.num_cached_tokens for output in warm] == [64] * 4
    plain = generate(PLAIN, prompts, params)
    check_equal(cold, plain)
    check_equal(warm, plain)
    # Without a cache, what is accepted is the same, step by step.
    uncached = generate(TREE, prompts, params)
    histograms = [
        [output.outputs[0].spec_decode_metrics.histogram for output in outputs]
        for outputs in (uncached, cold, warm)
    ]
    assert histograms[0] == histograms[1] == histograms[2]


def test_a_schedule_of_budgets_by_batch_size() -> None:
    """The batch shrinks from 8 requests to 1, and trees grow with it."""
    schedule = [[1, 2, 31], [3, 4, 15], [5, 7, 7], [8, 8, 3]]
    config = ddtree(
        TARGET,
        DRAFT,
        BUDGET,
        options=OPTIONS,
        num_speculative_tokens_per_batch_size=schedule,
    )
    prompts = random_prompts(TARGET, 10, seed=42)
    params = [greedy(8 + 6 * i, ignore_eos=True) for i in range(len(prompts))]
    engine(config).collective_rpc("ddtree_start_trace")
    outputs = generate(config, prompts, params)
    (traces,) = engine(config).collective_rpc("ddtree_stop_trace")
    check_equal(outputs, generate(PLAIN, prompts, params))
    widths = {len(trace["tokens"]) for trace in traces}
    assert {31, 15, 7, 3} <= widths
    assert max(widths) == 31


def test_lora_adapters_of_the_target(tmp_path: Path) -> None:
    options = OPTIONS | {"enable_lora": True, "max_lora_rank": 8, "max_loras": 3}
    adapters: list[LoRARequest | None] = [
        LoRARequest(
            f"adapter-{i}",
            i + 1,
            str(make_adapter(TARGET, tmp_path / str(i), i, with_head=i >= 2)),
        )
        for i in range(4)
    ]
    # vLLM's CPU kernels take the last place for adapters to be that of requests
    # without one, so it stays empty as long as there are such.
    batches = [[None, *adapters[:2]] * 3, adapters[2:] * 4]
    prompts = random_prompts(TARGET, 9, seed=43)
    for batch in batches:
        texts = []
        for config in (
            ddtree(TARGET, DRAFT, BUDGET, options=options),
            EngineConfig(TARGET, options=options),
        ):
            outputs = engine(config).generate(
                [{"prompt_token_ids": p} for p in prompts[: len(batch)]],
                greedy(ignore_eos=True),
                lora_request=batch,
                use_tqdm=False,
            )
            texts.append(token_ids(outputs))
        assert texts[0] == texts[1]
        base = token_ids(generate(PLAIN, prompts, greedy(ignore_eos=True)))
        is_base = [a == b for a, b in zip(texts[0], base, strict=False)]
        assert is_base == [adapter is None for adapter in batch]


@pytest.mark.full
def test_more_stop_tokens_than_a_walk_looks_for(
    real_target: Path, real_draft: Path
) -> None:
    prompts = chat_prompts(real_target, "humaneval", 2)
    plain = EngineConfig(real_target)
    text = token_ids(generate(plain, prompts, greedy(60)))
    stops = [[*range(10, 210), each[20], each[40]] for each in text]
    params = [greedy(60, stop_token_ids=each) for each in stops]
    outputs = generate(ddtree(real_target, real_draft, BUDGET), prompts, params)
    check_equal(outputs, generate(plain, prompts, params))
    assert {output.outputs[0].finish_reason for output in outputs} == {"stop"}


@pytest.mark.full
def test_json_of_the_real_pair(real_target: Path, real_draft: Path) -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "size": {"type": "integer", "minimum": 0, "maximum": 99},
            "ready": {"type": "boolean"},
        },
        "required": ["name", "size", "ready"],
        "additionalProperties": False,
    }
    prompts = chat_prompts(real_target, "humaneval", 3)
    params = [
        SamplingParams(
            temperature=i / 2,
            seed=i,
            max_tokens=64,
            structured_outputs=StructuredOutputsParams(json=schema),
        )
        for i in range(len(prompts))
    ]
    outputs = generate(ddtree(real_target, real_draft, BUDGET), prompts, params)
    check_equal(outputs, generate(EngineConfig(real_target), prompts, params))
    for output in outputs:
        value = json.loads(output.outputs[0].text)
        assert set(value) == {"name", "size", "ready"}
    assert acceptance_length(outputs) > 1.0
