# SPDX-License-Identifier: Apache-2.0
"""The engine measurements run, on a CPU with tiny sizes, and add up."""

import json
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs

from benchmarks import engine
from benchmarks.shapes import TARGETS, find_pair
from vllm_ddtree.config import DDTreeSpeculativeConfig


def results_of(page: Path) -> dict[str, Any]:
    text = page.read_text()
    assert "nothing is measured" in text
    assert str(Path.home()) not in text.split("`")[0]
    return json.loads(page.with_suffix(".json").read_text())["data"]


def test_steps(tmp_path: Path, tiny_pairs: dict[str, tuple[Path, Path]]) -> None:
    shape = tiny_pairs["tiny-qwen3"][0].parent
    options = f"steps --shape {shape} --contexts 8 --batch-sizes 1 3 --budgets 20 \
        --methods chain tree --steps 2 --max-rows 50 --dtype float32 --out {tmp_path}"
    page = engine.main(options.split())
    rows = results_of(page)["rows"]
    points = [(row["method"], row["batch"]) for row in rows]
    # 3 x 21 rows are more than --max-rows.
    assert points == [("chain", 1), ("chain", 3), ("tree 20", 1)]
    for row in rows:
        assert len(row["steps_ms"]) == 2
        assert row["p10_ms"] <= row["median_ms"] <= row["p90_ms"]
    assert "| 8 | 3 | 1 | - |" in page.read_text()


def test_pair(tmp_path: Path, tiny_pairs: dict[str, tuple[Path, Path]]) -> None:
    target, draft = tiny_pairs["tiny-qwen3"]
    options = f"pair --model {target} --draft {draft} --sets humaneval --num-prompts 2 \
        --max-tokens 8 --max-model-len 1024 --temperatures 0 --batch-sizes 2 \
        --budgets 20 --methods none tree --dtype float32 --out {tmp_path}"
    page = engine.main(options.split())
    rows = results_of(page)["rows"]
    assert [row["method"] for row in rows] == ["none", "tree 20"]
    plain, tree = rows
    assert plain["tokens"] == tree["tokens"]
    assert plain["tokens_per_step"] == 1
    assert tree["tokens_per_step"] >= 1
    assert sum(tree["acceptance_histogram"]) > 0
    assert tree["num_tokens"] == sum(map(len, tree["tokens"]))


@pytest.mark.parametrize("shape", sorted(TARGETS))
def test_shapes_are_models_to_vllm(shape: str, tmp_path: Path) -> None:
    pair = find_pair(shape, tmp_path)
    config = EngineArgs(
        str(pair.target),
        load_format="dummy",
        skip_tokenizer_init=True,
        speculative_config={
            "method": "ddtree",
            "model": str(pair.draft),
            "num_speculative_tokens": 63,
        },
    ).create_engine_config()
    assert isinstance(config.speculative_config, DDTreeSpeculativeConfig)
    assert config.speculative_config.num_draft_steps == 15
    draft = config.speculative_config.draft_model_config
    assert draft.get_hidden_size() == config.model_config.get_hidden_size()
    assert draft.get_vocab_size() == config.model_config.get_vocab_size()


def test_an_unknown_shape_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="neither one of qwen3-8b, qwen3-30b-a3b"):
        find_pair("qwen4", tmp_path)
