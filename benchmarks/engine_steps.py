# SPDX-License-Identifier: Apache-2.0
"""Wall time of a decode step at real shapes with dummy weights."""

import argparse
import tempfile
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks import report
from benchmarks.engine_options import fitting_batch_sizes, methods, step_options
from benchmarks.shapes import find_pair
from vllm_ddtree.measure import started_engine, step_times

METHOD = """\
Wall time between the outputs of successive steps in steady state, after a prefill of
random tokens and warm steps; median and 10th to 90th percentile. Dummy weights change
no step's work but the commit's: hardly any draft is accepted, so almost nothing has to
be moved (`benchmarks.ops` measures moves). On a GPU: FULL CUDA graphs of every decode
batch, no torch.compile, all engines one after the other in this call."""


def run(args: argparse.Namespace) -> report.Report:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        pair = find_pair(args.shape, Path(folder))
        chosen = methods(args, str(pair.draft))
        for method in report.progress(chosen, f"steps {args.shape}"):
            sizes = fitting_batch_sizes(args, method)
            options = step_options(args, pair, method, sizes)
            with started_engine(str(pair.target), method.speculative, **options) as llm:
                for context in args.contexts:
                    for batch_size in sizes:
                        times = step_times(llm, batch_size, context, args.steps)
                        rows.append(_row(method.name, context, batch_size, times))
    return report.Report(
        name=args.name,
        title=f"Step times at {args.shape} shapes",
        method=METHOD,
        tables=[ratios(rows), _times(rows)],
        data={"shape": args.shape, "rows": rows},
    )


def _row(
    method: str, context: int, batch_size: int, times: list[float]
) -> dict[str, Any]:
    milliseconds = [1e3 * seconds for seconds in times]
    deciles = quantiles(milliseconds, n=10, method="inclusive")
    return {
        "method": method,
        "context": context,
        "batch": batch_size,
        "median_ms": median(milliseconds),
        "p10_ms": deciles[0],
        "p90_ms": deciles[-1],
        "steps_ms": milliseconds,
    }


def ratios(rows: list[dict[str, Any]]) -> report.Table:
    """A line per context and batch size, a column per method."""
    names = list(dict.fromkeys(row["method"] for row in rows))
    times = {(r["context"], r["batch"], r["method"]): r["median_ms"] for r in rows}
    points = list(dict.fromkeys((row["context"], row["batch"]) for row in rows))
    lines = []
    for context, batch in points:
        chain = times.get((context, batch, "chain"))
        line: dict[str, Any] = {"context": context, "batch": batch}
        for name in names:
            time = times.get((context, batch, name))
            line[name] = time / chain if time and chain else None
        lines.append(line | {"chain, ms": chain})
    return report.Table("Step time over the chain's", lines)


def _times(rows: list[dict[str, Any]]) -> report.Table:
    lines = [
        {
            "context": row["context"],
            "batch": row["batch"],
            "method": row["method"],
            "median, ms": row["median_ms"],
            "p10 - p90, ms": f"{row['p10_ms']:.2f} - {row['p90_ms']:.2f}",
        }
        for row in rows
    ]
    return report.Table("Step times", lines)
