# SPDX-License-Identifier: Apache-2.0
"""Greedy tokens of a GPU engine: plain, chain, trees; eager and FULL graphs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from engines import EngineConfig, ddtree, dflash, engine, generate, token_ids
from prompts import random_prompts
from shared_device import SHARED_DEVICE
from ties import assert_ties_only, find_divergences
from vllm import SamplingParams

from vllm_ddtree.measure import capture_sizes

pytestmark = pytest.mark.gpu

NUM_PROMPTS, MAX_TOKENS = 24, 64
PAIRS = ["tiny-qwen3", "tiny-llama", "tiny-qwen3-moe"]
EAGER: Mapping[str, Any] = {
    # FlashAttention has no float32.
    "dtype": "bfloat16",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 1024,
    **SHARED_DEVICE,
    "num_gpu_blocks_override": 1024,
}


def with_graphs(num_drafts: int) -> dict[str, Any]:
    """FULL graphs of batch 1, 2, 4 and 8: batches between them are padded."""
    return {
        **EAGER,
        "enforce_eager": False,
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": capture_sizes(num_drafts, [1, 2, 4, 8]),
        },
    }


def staggered(count: int) -> list[SamplingParams]:
    """Outputs of different lengths, so that batches shrink and grow."""
    return [
        SamplingParams(
            temperature=0, max_tokens=MAX_TOKENS - 5 * (i % 7), ignore_eos=True
        )
        for i in range(count)
    ]


def plain_outputs(target: Path, prompts: list[list[int]]) -> list[Any]:
    params = staggered(len(prompts))
    for one in params:
        one.logprobs = 20
    return generate(EngineConfig(target, None, EAGER), prompts, params)


@pytest.mark.parametrize("pair", PAIRS)
def test_trees_equal_no_speculation_but_for_ties(
    pair: str, tiny_pairs: dict[str, tuple[Path, Path]]
) -> None:
    target, draft = tiny_pairs[pair]
    prompts = random_prompts(target, NUM_PROMPTS)
    plain = plain_outputs(target, prompts)
    chain = dflash(target, draft, 15)
    chain = EngineConfig(target, chain.speculative, with_graphs(15))
    chain_tokens = token_ids(generate(chain, prompts, staggered(NUM_PROMPTS)))
    num_chain = len(find_divergences(plain, chain_tokens))
    # vLLM warms up with the tokens 0, 1, ... of a step's rows, and the vocabulary has
    # no more than 128.
    for budget in (7, 15, 63, 120):
        # vLLM reserves the draft block's slots at least.
        config = ddtree(target, draft, budget, options=with_graphs(max(budget, 15)))
        tokens = token_ids(generate(config, prompts, staggered(NUM_PROMPTS)))
        divergences = find_divergences(plain, tokens)
        assert_ties_only(divergences, f"{pair}, {budget} nodes")
        # As exact as stock DFlash, within what chance does to a few ties.
        assert len(divergences) <= num_chain + 6, (len(divergences), num_chain)


@pytest.mark.parametrize("budget", [15, 63])
def test_graphs_equal_eager_at_every_batch_size(
    budget: int, tiny_pairs: dict[str, tuple[Path, Path]]
) -> None:
    target, draft = tiny_pairs["tiny-qwen3"]
    prompts = random_prompts(target, NUM_PROMPTS)
    plain = plain_outputs(target, prompts)
    eager = ddtree(target, draft, budget, options=EAGER)
    graphs = ddtree(target, draft, budget, options=with_graphs(budget))
    # One graph per captured batch size, or the comparison means nothing.
    assert engine(graphs).collective_rpc(count_graphs)[0] >= 4
    for batch_size in range(1, 9):
        some = prompts[:batch_size]
        params = staggered(batch_size)
        expected = token_ids(generate(eager, some, params))
        found = token_ids(generate(graphs, some, params))
        for tokens, name in ((expected, "eager"), (found, "graphs")):
            divergences = find_divergences(plain[:batch_size], tokens)
            assert_ties_only(divergences, f"{name}, batch {batch_size}")


def count_graphs(worker: Any) -> int:
    """Runs in the worker."""
    return len(worker.model_runner.cudagraph_manager.graphs)
