# SPDX-License-Identifier: Apache-2.0
"""With a seed, method ddtree gives token for token what plain vLLM gives."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from engines import EngineConfig, acceptance_length, ddtree, engine, generate, token_ids
from prompts import random_prompts
from sampling_sets import REASONING, SINGLE, Chooser, Options, combined, single
from vllm import RequestOutput, SamplingParams

PAIR = Path(__file__).resolve().parents[1] / "assets" / "tiny-qwen3"
TARGET, DRAFT = PAIR / "target", PAIR / "draft"
ENGINE: dict[str, Any] = {
    "max_num_seqs": 16,
    "max_num_batched_tokens": 1024,
    "reasoning_config": REASONING,
}
PLAIN = EngineConfig(TARGET, options=ENGINE)


def tree(budget: int, **keys: Any) -> EngineConfig:
    return ddtree(TARGET, DRAFT, budget, options=ENGINE, **keys)


def requests(count: int, seed: int) -> tuple[list[list[int]], list[Options]]:
    """`count` prompts, each with a seed and options; every option occurs alone."""
    prompts = random_prompts(TARGET, count, seed)
    sampled = SamplingParams(temperature=1.0, seed=seed, max_tokens=40, ignore_eos=True)
    texts = token_ids(generate(PLAIN, prompts, sampled))
    tokenizer = engine(PLAIN).get_tokenizer()
    words = [tokenizer.decode([token]) for token in range(len(tokenizer))]
    names = list(SINGLE)
    options = []
    for i, text in enumerate(texts):
        chooser = Chooser(seed * 10_000 + i, text, words)
        # Half of them alone, the other half combined, side by side in the batch.
        is_single = i % 2 == 0
        name = names[i // 2 % len(names)]
        options.append(single(name, chooser) if is_single else combined(chooser))
    return prompts, options


def run(
    config: EngineConfig, prompts: Sequence[Sequence[int]], options: Sequence[Options]
) -> list[RequestOutput]:
    return generate(config, prompts, [SamplingParams(**each) for each in options])


def differences(
    outputs: Sequence[RequestOutput],
    plain: Sequence[RequestOutput],
    options: Sequence[Options],
) -> list[str]:
    """A line for each request whose tokens, text or end is not plain vLLM's."""
    lines = []
    for output, expected, chosen in zip(outputs, plain, options, strict=True):
        left, right = output.outputs[0], expected.outputs[0]
        is_same = (
            left.token_ids == right.token_ids
            and left.text == right.text
            and left.finish_reason == right.finish_reason
            and left.stop_reason == right.stop_reason
        )
        if not is_same:
            lines.append(f"{chosen}: {left.token_ids} instead of {right.token_ids}")
    return lines


def check_seed_equality(count: int, seed: int, budget: int) -> float:
    """Returns the acceptance length of the batch."""
    prompts, options = requests(count, seed)
    plain = run(PLAIN, prompts, options)
    outputs = run(tree(budget), prompts, options)
    assert differences(outputs, plain, options) == []
    # A request of one token was never drafted for.
    return acceptance_length([o for o in outputs if o.outputs[0].spec_decode_metrics])


def test_every_option_changes_what_is_written() -> None:
    """Otherwise equality under it would say nothing."""
    prompts, options = requests(4 * len(SINGLE), seed=1)
    kept = ("seed", "max_tokens", "ignore_eos")
    bare = [{"temperature": 1.0} | {k: each[k] for k in kept} for each in options]
    plain, without = run(PLAIN, prompts, options), run(PLAIN, prompts, bare)
    changed = [
        left != right
        for left, right in zip(token_ids(plain), token_ids(without), strict=True)
    ]
    # Each option alone is that of two requests.
    for i, name in enumerate(SINGLE):
        is_changed = changed[2 * i] or changed[2 * (i + len(SINGLE))]
        assert is_changed == (name != "none"), name


def test_seeded_requests_with_every_option_in_one_batch() -> None:
    count = 2 * len(SINGLE)
    assert check_seed_equality(count, seed=1, budget=15) > 1.3


@pytest.mark.full
@pytest.mark.parametrize("seed, budget", [(2, 63), (3, 31), (4, 15), (5, 7)])
def test_seeded_requests_with_every_option_at_length(seed: int, budget: int) -> None:
    """80 requests each, 320 in all."""
    assert check_seed_equality(80, seed, budget) > 1.3
