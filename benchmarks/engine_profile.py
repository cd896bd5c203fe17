# SPDX-License-Identifier: Apache-2.0
"""A decode step split into its parts, from a torch profiler trace."""

import argparse
import itertools
import tempfile
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import report
from benchmarks.engine_options import fitting_batch_sizes, methods, step_options
from benchmarks.shapes import find_pair
from benchmarks.trace_parts import PARTS, Step, read_device_events, split_steps
from vllm_ddtree.measure import started_engine, step_times

METHOD = """\
Device time of each part of a decode step, median over the steps of a torch profiler
trace, assigned by kernel names (`benchmarks/trace_parts.py`). `idle` is the time
between kernels of a step and up to the next step. A profiler slows the host down, so
`idle` here is an upper bound; step times without it are those of `benchmarks.engine
steps`. With dummy weights hardly any draft is accepted, so the commit moves next to
nothing."""
NUM_KERNELS_SHOWN = 12


def run(args: argparse.Namespace) -> report.Report:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        pair = find_pair(args.shape, Path(folder))
        chosen = methods(args, str(pair.draft))
        for method in report.progress(chosen, f"profile {args.shape}"):
            sizes = fitting_batch_sizes(args, method)
            traces = Path(folder, "traces", method.name.replace(" ", "-"))
            options = step_options(args, pair, method, sizes) | {
                "profiler_config": {
                    "profiler": "torch",
                    "torch_profiler_dir": str(traces),
                    "torch_profiler_with_stack": False,
                }
            }
            with started_engine(str(pair.target), method.speculative, **options) as llm:
                for context in args.contexts:
                    for size in sizes:
                        point = {
                            "method": method.name,
                            "context": context,
                            "batch": size,
                        }
                        steps = _profile(llm, size, context, args.steps, traces)
                        rows.append(point | summarise(steps))
    return report.Report(
        name=args.name,
        title=f"Parts of a step at {args.shape} shapes",
        method=METHOD,
        tables=[_parts_table(rows), _kernels_table(rows)],
        data={"shape": args.shape, "rows": rows},
    )


def _profile(
    llm: Any, batch_size: int, context: int, num_steps: int, traces: Path
) -> list[Step]:
    seen = set(traces.rglob("*.pt.trace.json*"))
    step_times(
        llm, batch_size, context, num_steps, on_steady=lambda: llm.start_profile()
    )
    llm.stop_profile()
    (file,) = sorted(
        path
        for path in set(traces.rglob("*.pt.trace.json*")) - seen
        # The front end writes one of its own, without device events.
        if "async_llm" not in path.name
    )
    return split_steps(read_device_events(file))


def summarise(steps: list[Step]) -> dict[str, Any]:
    """Medians over steps: time by part, idle time, and the largest kernels."""
    if not steps:
        return {"num_steps": 0, "parts_us": {}, "idle_us": None, "kernels_us": {}}
    totals: Counter[str] = Counter()
    for step in steps:
        totals.update(step.kernels)
    periods = [b.begin - a.begin for a, b in itertools.pairwise(steps)]
    busy = [step.total_busy for step in steps]
    idle = [period - used for period, used in zip(periods, busy, strict=False)]
    return {
        "num_steps": len(steps),
        "parts_us": {
            part: median(step.busy[part] for step in steps)
            for part in PARTS
            if any(step.busy[part] for step in steps)
        },
        "idle_us": median(idle) if idle else None,
        "kernels_us": {
            name: total / len(steps)
            for name, total in totals.most_common(NUM_KERNELS_SHOWN)
        },
    }


def _parts_table(rows: list[dict[str, Any]]) -> report.Table:
    lines = []
    for row in rows:
        parts = row["parts_us"]
        line = {key: row[key] for key in ("context", "batch", "method")}
        line |= {f"{part}, us": parts.get(part) for part in PARTS}
        line |= {"busy, us": sum(parts.values()), "idle, us": row["idle_us"]}
        lines.append(line | {"steps": row["num_steps"]})
    return report.Table("Parts", lines)


def _kernels_table(rows: list[dict[str, Any]]) -> report.Table:
    lines = [
        {
            "context": row["context"],
            "batch": row["batch"],
            "method": row["method"],
            "kernel": name[:80],
            "us per step": time,
        }
        for row in rows
        for name, time in row["kernels_us"].items()
    ]
    return report.Table("Largest kernels", lines)
