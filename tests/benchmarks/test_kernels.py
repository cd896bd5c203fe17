# SPDX-License-Identifier: Apache-2.0
"""The kernel measurements run, on a CPU with tiny sizes, and refuse wrong results."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import attention, attention_peers, ops, report, trees

OPS = "--batch-sizes 1 2 --budgets 4 20 --depth 4 --vocab-size 300 --layers 2 \
    --kv-heads 2 --head-size 16 --replays 3"
ATTENTION = "--batch-sizes 2 --contexts 40 --budgets 7 31 --heads 4 --kv-heads 2 \
    --head-size 16 --replays 3"


def test_ops(tmp_path: Path) -> None:
    page = ops.main([*OPS.split(), "--out", str(tmp_path)])
    content = json.loads(page.with_suffix(".json").read_text())
    rows = content["data"]["rows"]
    cases = {(row["batch"], row["budget"]) for row in rows}
    assert cases == {(1, 4), (1, 20), (2, 4), (2, 20)}
    for row in rows:
        assert 0 < row["p10_us"] <= row["median_us"] <= row["p90_us"]
    floors = {row["part"]: row["bytes"] for row in rows if row["batch"] == 2}
    # Every part but the peers has a floor, and the step's is the sum of its parts.
    assert {name for name, size in floors.items() if size is None} == {
        "torch.topk",
        "torch.topk + logsumexp",
    }
    assert floors["step"] == sum(floors[part] for part in ops.SUMMANDS)
    assert content["environment"]["torch"] == torch.__version__
    assert set(content["environment"]) >= {"device", "driver", "vllm", "triton", "git"}
    assert report.NO_MEASUREMENT in page.read_text()


def test_attention(tmp_path: Path) -> None:
    page = attention.main([*ATTENTION.split(), "--out", str(tmp_path)])
    rows = json.loads(page.with_suffix(".json").read_text())["data"]["rows"]
    assert [row["num_rows"] for row in rows] == [8, 32]
    for row in rows:
        for name in ("tree", "causal", "chain"):
            peer = row["peers"][name]
            assert 0 < peer["relative_error"] < attention.MAX_RMS_RATIO[name]
            assert peer["median_us"] > 0


def test_wrong_attention_is_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask that sees one row too many fails the gate."""
    merge = attention_peers.merge_tree_attention

    def see_a_sibling(*args) -> None:
        args = list(args)
        args[8] = args[8] | 2
        merge(*args)

    monkeypatch.setattr(attention_peers, "merge_tree_attention", see_a_sibling)
    with pytest.raises(SystemExit, match="tree is wrong"):
        attention.main([*ATTENTION.split(), "--out", str(tmp_path)])
    assert not list(tmp_path.iterdir())


def test_results_of_a_cpu_are_not_kept_as_measurements() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine measures")
    before = sorted(report.RESULTS.iterdir())
    with pytest.raises(SystemExit, match="name another folder"):
        attention.main(ATTENTION.split())
    assert sorted(report.RESULTS.iterdir()) == before


def test_drawn_trees_have_depth_and_branches() -> None:
    tree = trees.draw_trees(2, 63, 15, torch.device("cpu"))
    assert tree.num_nodes.tolist() == [63, 63]
    for slot in range(2):
        assert int(tree.depths[slot].max()) >= 3
        assert int((tree.depths[slot] == 1).sum()) > 1
        path = trees.deepest_detour(
            tree.parents[slot].tolist(), tree.depths[slot].tolist()
        )
        assert path != list(range(1, len(path) + 1))
        parents = [0, *path[:-1]]
        assert [int(tree.parents[slot, row - 1]) for row in path] == parents
