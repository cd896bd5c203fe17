# SPDX-License-Identifier: Apache-2.0
"""The tree's own operations of a step: top-k, build, ancestors, walk, commit.

python -m benchmarks.ops [--out DIR]
"""

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from benchmarks import report, timing, trees
from vllm_ddtree.kv_commit import KVPlanes
from vllm_ddtree.ops.ancestors import compute_ancestors
from vllm_ddtree.ops.build import build_tree
from vllm_ddtree.ops.commit import commit_kv, path_index
from vllm_ddtree.ops.reference import build as build_reference
from vllm_ddtree.ops.reference import top_k as top_k_reference
from vllm_ddtree.ops.top_k import local_top_k, merge_top_k
from vllm_ddtree.ops.walk import walk_tree
from vllm_ddtree.tree import TreeBatch

BLOCK_SIZE = 16
# The root does not begin a block, so paths cross block boundaries.
ROOT_POSITION = 5


@dataclass(frozen=True)
class Shape:
    num_reqs: int
    budget: int
    depth: int
    vocab_size: int
    num_layers: int
    num_kv_heads: int
    head_size: int

    @property
    def width(self) -> int:
        return self.budget + 1

    @property
    def kv_row_bytes(self) -> int:
        """Keys and values of one token in one layer, bfloat16."""
        return self.num_kv_heads * 2 * self.head_size * 2

    @property
    def blocks_per_req(self) -> int:
        return -(-(ROOT_POSITION + self.width) // BLOCK_SIZE)


class InputSet:
    """One set of a step's inputs and outputs, and the step's parts."""

    def __init__(self, shape: Shape, device: torch.device, cache: list[torch.Tensor]):
        n, self.shape = shape.num_reqs, shape
        ints = {"dtype": torch.int32, "device": device}
        num_rows = n * shape.depth
        self.logits = trees.draw_logits(
            num_rows, shape.vocab_size, device, torch.bfloat16
        )
        self.scale = torch.full((num_rows, 1), 0.7, device=device)
        self.tree = TreeBatch.allocate(n, shape.budget, device)
        self.slots = torch.arange(n, device=device)
        top = min(shape.budget, shape.vocab_size)
        self.limits = [
            torch.full((n,), limit, **ints)
            for limit in (shape.budget, shape.depth, top)
        ]
        self.cu_num_logits = torch.arange(n + 1, **ints) * shape.width
        self.roots = torch.full((n,), ROOT_POSITION, device=device)
        # The same layout as vLLM's default on CUDA. Planes are bare addresses, so the
        # tensors must be kept.
        self.cache = cache
        self.planes = KVPlanes.of_layers(0, [c.transpose(1, 2) for c in cache])
        num_blocks = cache[0].shape[0]
        self.block_table = torch.randperm(num_blocks, device=device)[
            : n * shape.blocks_per_req
        ]
        self.block_table = self.block_table.int().view(n, -1)
        self.top = self.top_k(self.logits)
        self.build()
        self.ancestors()
        self.target_tokens = self._accept_detours()
        self.path, _, self.num_sampled = self.walk()

    def _accept_detours(self) -> torch.Tensor:
        """The target's choices, such that each path is deep and has to move."""
        tokens = torch.full((self.shape.num_reqs, self.shape.width), -2)
        for req_idx in range(self.shape.num_reqs):
            num_nodes = int(self.tree.num_nodes[req_idx])
            parents, depths, drafts = (
                x[req_idx, :num_nodes].tolist()
                for x in (self.tree.parents, self.tree.depths, self.tree.tokens)
            )
            for row in trees.deepest_detour(parents, depths):
                tokens[req_idx, parents[row - 1]] = drafts[row - 1]
        return tokens.flatten().to(self.tree.device)

    @cached_property
    def num_moved(self) -> int:
        places = torch.arange(1, self.path.shape[1] + 1, device=self.path.device)
        return int(((self.path >= 0) & (self.path != places)).sum())

    @cached_property
    def tempered(self) -> torch.Tensor:
        return self.temper()

    def temper(self) -> torch.Tensor:
        return self.logits.float() / self.scale

    def top_k(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # As `DraftHead.top_k` on one rank.
        k = min(self.shape.budget, self.shape.vocab_size)
        packed = local_top_k(logits, k, 0)
        tokens, log_probs = merge_top_k(packed[:, None], k)
        shape = (self.shape.num_reqs, self.shape.depth, k)
        return tokens.view(shape), log_probs.view(shape)

    def build(self, top: tuple[torch.Tensor, torch.Tensor] | None = None) -> None:
        build_tree(*(top or self.top), self.tree, self.slots, *self.limits)

    def ancestors(self) -> None:
        compute_ancestors(self.tree, self.slots)

    def walk(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return walk_tree(
            self.tree,
            self.slots,
            self.target_tokens,
            self.cu_num_logits,
            self.shape.depth,
        )

    def commit(
        self,
        path: torch.Tensor | None = None,
        num_sampled: torch.Tensor | None = None,
    ) -> None:
        commit_kv(
            self.planes.ptrs,
            self.planes.block_stride,
            self.planes.slot_stride,
            self.planes.row_bytes,
            self.block_table,
            BLOCK_SIZE,
            self.roots,
            self.path if path is None else path,
            self.num_sampled if num_sampled is None else num_sampled,
        )

    def index(self) -> torch.Tensor:
        starts = self.cu_num_logits
        num_tokens = self.shape.num_reqs * self.shape.width
        return path_index(self.path, self.num_sampled, starts, starts, num_tokens)

    def step(self, logits: torch.Tensor) -> None:
        self.build(self.top_k(logits))
        self.ancestors()
        path, _, num_sampled = self.walk()
        self.commit(path, num_sampled)


def parts(inputs: list[InputSet]) -> dict[str, tuple[Callable[[int], Any], int | None]]:
    """Name -> what to time, and the bytes it cannot avoid moving (None: a peer)."""
    first, shape = inputs[0], inputs[0].shape
    n, budget, width = shape.num_reqs, shape.budget, shape.width
    num_rows = n * shape.depth
    k = min(budget, shape.vocab_size)
    logit_bytes = 2 * num_rows * shape.vocab_size
    top_bytes = num_rows * k * (8 + 4)
    node_bytes = n * budget * (8 + 4 + 4 + 4)
    mask_bytes = first.tree.ancestors.numel() * 8
    sizes = {
        "top_k": logit_bytes + top_bytes,
        "build": node_bytes + n * budget * (8 + 4),
        "ancestors": n * budget * (4 + 4) + mask_bytes,
        "walk": n * budget * (8 + 4) + n * width * 8,
        "commit": 2 * first.num_moved * shape.num_layers * shape.kv_row_bytes,
    }

    def at(i: int) -> InputSet:
        return inputs[i % len(inputs)]

    def torch_log_probs(i: int) -> torch.Tensor:
        values, _ = at(i).logits.topk(k)
        return values - at(i).logits.float().logsumexp(-1, keepdim=True)

    return {
        "top_k": (lambda i: at(i).top_k(at(i).logits), sizes["top_k"]),
        "build": (lambda i: at(i).build(), sizes["build"]),
        "ancestors": (lambda i: at(i).ancestors(), sizes["ancestors"]),
        "walk": (lambda i: at(i).walk(), sizes["walk"]),
        "commit": (lambda i: at(i).commit(), sizes["commit"]),
        "step": (lambda i: at(i).step(at(i).logits), sum(sizes.values())),
        "temper": (lambda i: at(i).temper(), 3 * logit_bytes),
        "top_k, tempered": (
            lambda i: at(i).top_k(at(i).tempered),
            2 * logit_bytes + top_bytes,
        ),
        "step, tempered": (
            lambda i: at(i).step(at(i).temper()),
            # A fused form would read the logits once and keep nothing in float32.
            sum(sizes.values()),
        ),
        "path_index": (lambda i: at(i).index(), n * width * 8),
        "torch.topk": (lambda i: at(i).logits.topk(k), None),
        "torch.topk + logsumexp": (torch_log_probs, None),
    }


SUMMANDS = ("top_k", "build", "ancestors", "walk", "commit")


def check(inputs: InputSet) -> None:
    """Refuse to time operations that disagree with their references."""
    shape = inputs.shape
    k = min(shape.budget, shape.vocab_size)
    tokens, log_probs = top_k_reference.top_k_log_probs(inputs.logits.cpu(), k, None)
    assert torch.equal(inputs.top[0].flatten(0, 1).cpu(), tokens), "top-k tokens"
    got = inputs.top[1].flatten(0, 1).cpu()
    torch.testing.assert_close(got, log_probs, atol=1e-4, rtol=1e-5)
    expected = TreeBatch.allocate(shape.num_reqs, shape.budget, "cpu")
    build_reference.build_tree(
        *(x.cpu() for x in inputs.top),
        expected,
        None,
        *(x.cpu() for x in inputs.limits),
        False,
    )
    for name in ("tokens", "parents", "num_nodes"):
        got, wanted = getattr(inputs.tree, name).cpu(), getattr(expected, name)
        assert torch.equal(got, wanted), f"tree {name}"
    assert inputs.shape.budget < 2 or inputs.num_moved > 0, "nothing to commit"


def make_inputs(shape: Shape, device: torch.device) -> list[InputSet]:
    set_bytes = 2 * shape.num_reqs * shape.depth * shape.vocab_size
    num_sets = timing.num_input_sets(set_bytes, device)
    size = (
        num_sets * shape.num_reqs * shape.blocks_per_req,
        BLOCK_SIZE,
        shape.num_kv_heads,
        2 * shape.head_size,
    )
    cache = [
        torch.zeros(size, dtype=torch.bfloat16, device=device)
        for _ in range(shape.num_layers)
    ]
    return [InputSet(shape, device, cache) for _ in range(num_sets)]


def measure(
    shape: Shape, device: torch.device, bandwidth: float, num_replays: int
) -> list[dict[str, Any]]:
    """One row per part."""
    torch.manual_seed(0)
    inputs = make_inputs(shape, device)
    check(inputs[0])
    rows = []
    for name, (run, num_bytes) in parts(inputs).items():
        timed = timing.time_calls(run, device, num_replays)
        floor = None if num_bytes is None else 1e6 * num_bytes / bandwidth
        rows.append(
            {
                "batch": shape.num_reqs,
                "budget": shape.budget,
                "part": name,
                "median_us": timed.median_us,
                "p10_us": timed.p10_us,
                "p90_us": timed.p90_us,
                "floor_us": floor,
                "bytes": num_bytes,
            }
        )
    return rows


def to_tables(rows: list[dict[str, Any]]) -> list[report.Table]:
    by_case: dict[tuple[int, int], dict[str, dict[str, Any]]] = {}
    for row in rows:
        case = by_case.setdefault((row["batch"], row["budget"]), {})
        case[row["part"]] = row
    smallest = min(batch for batch, _ in by_case)
    summary = []
    for (batch, budget), case in by_case.items():
        step = case["step"]["median_us"]
        base = by_case[smallest, budget]["step"]["median_us"]
        summary.append(
            {
                "batch": batch,
                "budget": budget,
                f"step / step at batch {smallest}": step / base,
                "top_k / torch.topk": case["top_k"]["median_us"]
                / case["torch.topk"]["median_us"],
                "step, us": step,
                "sum of parts, us": sum(case[p]["median_us"] for p in SUMMANDS),
                "step, tempered, us": case["step, tempered"]["median_us"],
            }
        )
    parts_rows = [
        {
            "batch": row["batch"],
            "budget": row["budget"],
            "part": row["part"],
            "time / floor": row["floor_us"] and row["median_us"] / row["floor_us"],
            "median, us": row["median_us"],
            "p10 - p90, us": f"{row['p10_us']:.1f} - {row['p90_us']:.1f}",
            "floor, us": row["floor_us"],
        }
        for row in rows
    ]
    return [report.Table("Steps", summary), report.Table("Parts", parts_rows)]


METHOD = """\
CUDA-graph replay, 16 calls a graph with rotating inputs, median and 10th to 90th
percentile over replays. `step` is top_k, build, ancestors, walk and commit in one
graph. `tempered` parts first divide the logits by a temperature, as the engine does by
default. A floor is the bytes the part cannot avoid moving over the bandwidth of a
device-to-device copy in the same run; small parts are bound by a launch instead, see
`launch floor`. The commit moves the deepest path that is not an identity."""


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--budgets", type=int, nargs="+", default=[15, 63, 127, 255])
    parser.add_argument("--depth", type=int, default=15)
    parser.add_argument("--vocab-size", type=int, default=151_936)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--replays", type=int, default=timing.NUM_REPLAYS)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> Path:
    args = parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bandwidth = timing.copy_bandwidth(device, args.replays)
    launch = timing.launch_floor(device, args.replays)
    shapes = [
        Shape(
            batch,
            budget,
            args.depth,
            args.vocab_size,
            args.layers,
            args.kv_heads,
            args.head_size,
        )
        for batch in args.batch_sizes
        for budget in args.budgets
    ]
    rows = []
    for shape in report.progress(shapes, "ops"):
        rows += measure(shape, device, bandwidth, args.replays)
    floors = [
        {
            "copy bandwidth, TB/s": bandwidth / 1e12,
            "launch floor, us": launch.median_us,
            "p10 - p90, us": launch.spread,
        }
    ]
    page = report.Report(
        name="ops",
        title="Operations of a step",
        method=METHOD,
        tables=[report.Table("Floors", floors), *to_tables(rows)],
        data={
            "bandwidth": bandwidth,
            "launch": asdict(launch),
            "shapes": [asdict(shape) for shape in shapes],
            "rows": rows,
        },
        command=report.command_of("benchmarks.ops", argv),
    ).write(args.out)
    print(page.read_text())
    return page


if __name__ == "__main__":
    main()
