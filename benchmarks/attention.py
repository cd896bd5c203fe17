# SPDX-License-Identifier: Apache-2.0
"""Tree attention of one layer against causal FlashAttention and xformers.

python -m benchmarks.attention [--out DIR]
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import report, timing
from benchmarks.attention_peers import AttentionCase, AttentionShape, peers

MAX_RMS_RATIO = {"tree": 5e-3, "causal": 5e-3, "chain": 5e-3, "xformers": 1e-2}
# Keys and values of all input sets of a case.
MAX_CACHE_BYTES = 48 << 30


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the difference over that of the expected values."""
    difference = (out.float() - expected.float()).norm()
    return float(difference / expected.float().norm())


def measure_case(
    shape: AttentionShape, device: torch.device, num_replays: int
) -> dict[str, Any]:
    """Times of every peer that passed the check; the others carry a reason."""
    num_sets = timing.num_input_sets(shape.cache_bytes, device)
    num_sets = max(1, min(num_sets, MAX_CACHE_BYTES // shape.cache_bytes))
    cases = [AttentionCase(shape, device, seed) for seed in range(num_sets)]
    row: dict[str, Any] = {**vars(shape), "peers": {}}
    for name, make in peers(device).items():
        try:
            runs = [make(case) for case in cases]
            error = relative_error(runs[0](), cases[0].expected(name))
        except (ImportError, RuntimeError, ValueError, NotImplementedError) as problem:
            if name != "xformers":
                raise
            row["peers"][name] = {"reason": str(problem).splitlines()[0]}
            continue
        if not error < MAX_RMS_RATIO[name]:
            raise SystemExit(
                f"attention: {name} is wrong at {shape}: relative error {error:.3g}; "
                "nothing was timed."
            )
        timed = timing.time_calls(cycle(runs), device, num_replays)
        row["peers"][name] = {**vars(timed), "relative_error": error}
    return row


def cycle(runs: list[Callable[[], torch.Tensor]]) -> Callable[[int], torch.Tensor]:
    return lambda i: runs[i % len(runs)]()


def to_table(rows: list[dict[str, Any]], bandwidth: float) -> report.Table:
    """Ratios first, then the times they come from."""
    lines = []
    for row in rows:
        timed = {name: peer.get("median_us") for name, peer in row["peers"].items()}
        tree = row["peers"]["tree"]
        lines.append(
            {
                "batch": row["num_reqs"],
                "context": row["context"],
                "rows": row["num_rows"],
                "tree / causal": tree["median_us"] / timed["causal"],
                "tree / chain": tree["median_us"] / timed["chain"],
                "tree / xformers": tree["median_us"] / timed["xformers"]
                if timed["xformers"]
                else None,
                "tree, us": tree["median_us"],
                "p10 - p90": f"{tree['p10_us']:.1f} - {tree['p90_us']:.1f}",
                "causal, us": timed["causal"],
                "chain of 16 rows, us": timed["chain"],
                "xformers, us": timed["xformers"] or row["peers"]["xformers"]["reason"],
                "bytes / bandwidth, us": 1e6 * row["cache_bytes"] / bandwidth,
                "error": tree["relative_error"],
            }
        )
    return report.Table("One layer", lines)


METHOD = """\
CUDA-graph replay, 16 calls a graph, each on another cache. `tree` is what the engine
runs: FlashAttention over the prefix, not causal, with its log-sum-exp, then the kernel
that adds the tree's rows and merges. `causal` is FlashAttention of the same width, the
floor; `chain` the same with 16 rows. Every peer's output was compared with a float32
reference first (`error`: relative root mean square). All requests of a case hold the
same tree, which xformers asks for; its cache is contiguous, ours paged."""


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=[512, 2048, 8192, 32768]
    )
    parser.add_argument("--budgets", type=int, nargs="+", default=[15, 63, 127, 255])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--replays", type=int, default=timing.NUM_REPLAYS)
    parser.add_argument(
        "--name", default="attention", help="of the files written, without suffix"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> Path:
    args = parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bandwidth = timing.copy_bandwidth(device, args.replays)
    shapes = [
        AttentionShape(
            batch,
            context,
            budget + 1,
            args.heads,
            args.kv_heads,
            args.head_size,
            args.block_size,
        )
        for batch in args.batch_sizes
        for context in args.contexts
        for budget in args.budgets
    ]
    rows = []
    for shape in report.progress(shapes, "attention"):
        row = measure_case(shape, device, args.replays)
        rows.append({**row, "cache_bytes": shape.cache_bytes})
    page = report.Report(
        name=args.name,
        title="Tree attention",
        method=METHOD,
        tables=[to_table(rows, bandwidth)],
        data={"bandwidth": bandwidth, "rows": rows},
        command=report.command_of("benchmarks.attention", argv),
    ).write(args.out)
    print(page.read_text())
    return page


if __name__ == "__main__":
    main()
