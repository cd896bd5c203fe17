# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm_ddtree.tune` on a tiny pair."""

import json
from pathlib import Path

import pytest

from vllm_ddtree import tune

ENGINE_ARGS = json.dumps(
    {"dtype": "float32", "max_model_len": 256, "max_num_batched_tokens": 256}
)


def test_tune_prints_a_configuration_that_vllm_takes(
    tmp_path: Path,
    tiny_pairs: dict[str, tuple[Path, Path]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    target, draft = tiny_pairs["tiny-qwen3"]
    results, picture = tmp_path / "tune.json", tmp_path / "tune.png"
    options = f"--budgets 4 20 --batch-sizes 1 2 --context 8 --steps 2 --num-prompts 2 \
        --max-tokens 12 --json {results} --plot {picture}"
    advice = tune.main(
        [str(target), str(draft), "--engine-args", ENGINE_ARGS, *options.split()]
    )
    measured = json.loads(results.read_text())
    costs = measured["costs"]
    assert {size: set(row) for size, row in costs.items()} == {
        "1": {"4", "20"},
        "2": {"4", "20"},
    }
    assert 1 <= measured["tokens"]["4"] <= measured["tokens"]["20"] <= 16
    assert measured["chain_length"] == 15
    assert 1 <= measured["chain_tokens"] <= 16
    assert picture.stat().st_size > 1000
    printed = capsys.readouterr().out
    config = json.loads(printed.split("--speculative-config '")[1].split("'")[0])
    assert config == json.loads(json.dumps(advice["speculative_config"]))
    assert config["method"] in ("ddtree", "dflash")


def profile(tree_cost: float) -> tune.Profile:
    return tune.Profile(
        costs={1: {15: 1.0, 63: 1.05}, 8: {15: 2.0, 63: tree_cost}},
        tokens={15: 4.2, 63: 5.0},
        chain_costs={1: 1.0, 8: 2.0},
        chain_tokens=4.0,
        chain_length=15,
    )


def test_recommendation_is_the_best_at_every_batch_size() -> None:
    advice = tune.recommend(profile(tree_cost=4.0), "drafter")
    assert advice["speculative_config"] == {
        "method": "ddtree",
        "model": "drafter",
        "num_speculative_tokens": 63,
        # At batch 3, 63 nodes cost 1.05 + 2/7 (4.0 - 1.05): the chain's width wins.
        "num_speculative_tokens_per_batch_size": [(1, 1, 63), (2, 1024, 15)],
    }
    assert advice["compilation_config"] == {"cudagraph_capture_sizes": [64, 128, 512]}
    assert advice["one_budget"] == 15
    assert advice["slower_than_chain"] == []


def test_recommendation_is_the_chain_where_no_tree_pays() -> None:
    slow = profile(tree_cost=4.0)
    slow.chain_tokens = 6.0
    advice = tune.recommend(slow, "drafter")
    assert advice["speculative_config"] == {
        "method": "dflash",
        "model": "drafter",
        "num_speculative_tokens": 15,
    }
    assert advice["one_budget"] is None
    assert advice["slower_than_chain"] == [1, 8]
