# SPDX-License-Identifier: Apache-2.0
"""Ranks agree on every tree and give the tokens of one rank: real worker processes."""

import random
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from engines import EngineConfig, ddtree, dflash, generate, token_ids
from own_process import generate_in_own_process, tensor_parallel, tensor_parallel_env
from prompts import random_prompts
from vllm import SamplingParams

ASSETS = Path(__file__).resolve().parents[1] / "assets"
NUM_REQUESTS = 6

# (pair, tensor parallel size, budget)
SAMPLE = [("tiny-qwen3", 2, 31)]
FULL = [
    *product(["tiny-qwen3", "tiny-llama", "tiny-qwen3-moe"], [2, 4], [7, 31, 63]),
    ("tiny-qwen3", 8, 31),
]


def mixed_requests(target: Path) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """Greedy and seeded requests in one batch; some need whole rows of logits."""
    chooser = random.Random(1)
    sampling = [
        {
            "temperature": 0.0 if i % 2 else chooser.choice([0.7, 1.0]),
            "seed": 100 + i,
            "max_tokens": chooser.randint(8, 32),
            "ignore_eos": True,
        }
        for i in range(NUM_REQUESTS)
    ]
    sampling[2] |= {"top_k": 20, "top_p": 0.9}
    sampling[3] |= {"repetition_penalty": 1.3}
    return random_prompts(target, NUM_REQUESTS, seed=9), sampling


def parallel_config(pair: str, size: int, budget: int) -> EngineConfig:
    target, draft = ASSETS / pair / "target", ASSETS / pair / "draft"
    options = tensor_parallel(size)
    return ddtree(target, draft, budget, options=options, ddtree_check_ranks=True)


def check_equal(pair: str, size: int, budget: int) -> None:
    config = parallel_config(pair, size, budget)
    prompts, sampling = mixed_requests(config.model)
    env = tensor_parallel_env(size)
    parallel = generate_in_own_process(config, prompts, sampling, env, timeout_s=600)
    params = [SamplingParams(**arguments) for arguments in sampling]
    plain = generate(EngineConfig(config.model), prompts, params)
    assert parallel == token_ids(plain)


@pytest.mark.parametrize("pair, size, budget", SAMPLE)
def test_ranks_give_the_tokens_of_one(pair: str, size: int, budget: int) -> None:
    check_equal(pair, size, budget)


@pytest.mark.full
@pytest.mark.parametrize("pair, size, budget", FULL)
def test_ranks_give_the_tokens_of_one_everywhere(
    pair: str, size: int, budget: int
) -> None:
    check_equal(pair, size, budget)


def test_a_tree_step_gathers_no_more_than_a_chain_step() -> None:
    """Beyond the activations' all-reduces; the vocabulary here favours the chain."""
    target, draft = ASSETS / "tiny-qwen3" / "target", ASSETS / "tiny-qwen3" / "draft"
    prompts = random_prompts(target, 1, seed=2)
    sampling = {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True}
    options = tensor_parallel(2)
    env = tensor_parallel_env(2) | {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    per_step = []
    for config in (
        dflash(target, draft, 15),
        ddtree(target, draft, 63),
    ):
        alone = generate(config, prompts, SamplingParams(**sampling))
        num_steps = sum(alone[0].outputs[0].spec_decode_metrics.histogram)
        gathered: list[int] = []
        parallel = EngineConfig(config.model, config.speculative, options)
        generate_in_own_process(
            parallel, prompts, sampling, env, gathered_bytes=gathered
        )
        assert gathered[0] == gathered[1] > 0
        per_step.append(gathered[0] / num_steps)
    chain, tree = per_step
    assert tree <= 1.2 * chain


def test_the_rank_check_sees_a_rank_with_other_scores() -> None:
    config = parallel_config("tiny-qwen3", 2, 15)
    prompts, sampling = mixed_requests(config.model)
    # A callable travels to the workers pickled.
    env = tensor_parallel_env(2) | {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    with pytest.raises(AssertionError, match="ddtree_check_ranks: the tree of ranks"):
        generate_in_own_process(config, prompts[:1], sampling[:1], env, perturb_rank=1)
