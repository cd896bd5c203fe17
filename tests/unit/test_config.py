# SPDX-License-Identifier: Apache-2.0
"""What is accepted and what is refused, before any worker starts."""

from pathlib import Path
from typing import Any

import pytest
from vllm import envs
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.envs import disable_envs_cache

from vllm_ddtree.config import DEFAULT_BUDGET, DEFAULT_SCHEDULE, DDTreeSpeculativeConfig

ASSETS = Path(__file__).resolve().parents[1] / "assets"
TARGET, DRAFT = (str(ASSETS / "tiny-qwen3" / part) for part in ("target", "draft"))
DRAFT_DEPTH = 15


def create(
    speculative: dict[str, Any] | None = None, target: str = TARGET, **engine: Any
) -> VllmConfig:
    spec = {"method": "ddtree", "model": DRAFT} | (speculative or {})
    arguments = {"max_model_len": 512, "enforce_eager": True} | engine
    args = EngineArgs(
        model=target,
        speculative_config={k: v for k, v in spec.items() if v is not None},
        **arguments,
    )
    return args.create_engine_config()


def spec_of(config: VllmConfig) -> DDTreeSpeculativeConfig:
    assert isinstance(config.speculative_config, DDTreeSpeculativeConfig)
    return config.speculative_config


@pytest.mark.parametrize("budget", [1, 7, DRAFT_DEPTH, 63, 1024])
def test_a_budget_is_the_number_of_nodes_whatever_the_draft_block_is(
    budget: int,
) -> None:
    config = create({"num_speculative_tokens": budget})
    spec = spec_of(config)
    assert spec.num_draft_steps == DRAFT_DEPTH
    # The draft block needs its slots too.
    assert spec.num_speculative_tokens == max(budget, DRAFT_DEPTH)
    schedule = spec.num_speculative_tokens_per_batch_size
    nodes = {entry[-1] for entry in schedule} if schedule else {budget}
    assert nodes == {budget}


def test_the_default_budget_falls_with_the_batch_size() -> None:
    spec = spec_of(create())
    assert spec.num_speculative_tokens == DEFAULT_BUDGET
    schedule = spec.num_speculative_tokens_per_batch_size
    assert schedule is not None
    assert [tuple(entry) for entry in schedule] == list(DEFAULT_SCHEDULE)


def test_keys_may_have_dashes_as_on_the_command_line() -> None:
    assert spec_of(create({"num-speculative-tokens": 31})).num_speculative_tokens == 31


# What the user asked for, and what the message must say.
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a misspelt option": (
        {"num_speculativ_tokens": 5},
        {},
        "speculative_config['num_speculativ_tokens'] is not an option of method "
        "'ddtree'. Did you mean 'num_speculative_tokens'?",
    ),
    "an unknown option": (
        {"zzz": 5},
        {},
        "speculative_config['zzz'] is not an option of method 'ddtree'. Remove it.",
    ),
    "an option of chains": (
        {"rejection_sample_method": "block"},
        {},
        "the tree is verified by sample-and-walk; use ddtree_acceptance. Remove it.",
    ),
    "no nodes": (
        {"num_speculative_tokens": 0},
        {},
        "num_speculative_tokens=0 is outside 1..1024",
    ),
    "too many nodes": (
        {"num_speculative_tokens": 2000},
        {},
        "num_speculative_tokens=2000 is outside 1..1024",
    ),
    "a word for a number": (
        {"num_speculative_tokens": "a"},
        {},
        "num_speculative_tokens='a' is not a whole number",
    ),
    "no model": (
        {"model": None},
        {},
        "speculative_config for method 'ddtree' needs 'model'",
    ),
    "a target as the drafter": (
        {"model": TARGET},
        {},
        "is no DFlash drafter (its config.json names Qwen3ForCausalLM)",
    ),
    "a drafter that is not there": (
        {"model": "/does/not/exist"},
        {},
        "The drafter '/does/not/exist' could not be read",
    ),
    "an acceptance rule nobody knows": (
        {"ddtree_acceptance": "hope"},
        {},
        "ddtree_acceptance",
    ),
    "an epsilon out of range": (
        {"ddtree_typical_epsilon": 1.5},
        {},
        "ddtree_typical_epsilon",
    ),
    "a schedule above the budget": (
        {
            "num_speculative_tokens": 31,
            "num_speculative_tokens_per_batch_size": [[1, 4, 99]],
        },
        {},
        "num_speculative_tokens_per_batch_size asks for 99 nodes at batch sizes 1 to ",
    ),
    "a schedule that overlaps": (
        {"num_speculative_tokens_per_batch_size": [[1, 4, 31], [3, 8, 15]]},
        {},
        "Batch-size ranges must be non-overlapping and sorted.",
    ),
    "pipeline parallelism": (
        {},
        {"pipeline_parallel_size": 2},
        "does not support pipeline parallelism yet, but pipeline_parallel_size=2; "
        "set it to 1.",
    ),
    "another attention": (
        {},
        {"attention_backend": "TRITON_ATTN"},
        "brings its own attention for the target, but attention_backend is "
        "TRITON_ATTN; remove it",
    ),
    "a quantized cache": (
        {},
        {"kv_cache_dtype": "fp8"},
        "supports an unquantized KV cache only, but kv_cache_dtype is fp8; use 'auto'.",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_with_one_sentence(case: str) -> None:
    speculative, engine, message = REFUSED[case]
    with pytest.raises(ValueError) as refusal:
        create(speculative, **engine)
    assert message in str(refusal.value)
    # pydantic's own messages have a few lines; nothing has a traceback's length.
    assert len(str(refusal.value)) < 400


def test_the_old_runner_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    # Engines of other tests have made vLLM remember the variable.
    envs.disable_envs_cache()
    # An engine of an earlier test froze the environment.
    disable_envs_cache()
    message = "needs Model Runner V2, but VLLM_USE_V2_MODEL_RUNNER=0; unset it."
    with pytest.raises(ValueError, match=message):
        create()


def test_an_mla_target_is_refused() -> None:
    pair = ASSETS / "tiny-deepseek-v2"
    with pytest.raises(ValueError, match="does not support MLA targets yet; "):
        create({"model": str(pair / "draft")}, target=str(pair / "target"))
