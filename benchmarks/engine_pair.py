# SPDX-License-Identifier: Apache-2.0
"""Acceptance length and tokens per second of a real pair on the prompt sets."""

import argparse
import json
from typing import Any

from vllm import LLM, SamplingParams

from benchmarks import report
from benchmarks.engine_options import Method, graph_options, methods
from vllm_ddtree.measure import Generation, chat_prompt, generate, started_engine

METHOD = """\
Each set's first prompts in the model's chat format, `batch` of them in flight at any
time, prefills included in the time. Tokens per step counts the bonus token; its mean is
over verify steps. All engines one after the other in this call; on a GPU with FULL CUDA
graphs, no torch.compile."""
PROMPTS = report.ROOT / "benchmarks" / "prompts"


def run(args: argparse.Namespace) -> report.Report:
    rows: list[dict[str, Any]] = []
    for method in report.progress(methods(args, args.draft), "pair"):
        options = graph_options(method, args.batch_sizes) | {
            "dtype": args.dtype,
            "max_model_len": args.max_model_len,
        }
        with started_engine(args.model, method.speculative, **options) as llm:
            rows += _measure(llm, method, args)
    return report.Report(
        name=args.name,
        title="A real pair of models",
        method=METHOD,
        tables=[to_table(rows), _equality(rows)],
        data={"rows": rows},
    )


def _measure(
    llm: LLM, method: Method, args: argparse.Namespace
) -> list[dict[str, Any]]:
    rows = []
    for name in args.sets:
        prompts = [
            chat_prompt(llm, text) for text in read_prompts(name, args.num_prompts)
        ]
        for temperature in args.temperatures:
            params = SamplingParams(
                temperature=temperature, max_tokens=args.max_tokens, seed=0
            )
            for batch_size in args.batch_sizes:
                # Kernels that are compiled on first use are compiled here.
                generate(llm, prompts[:batch_size], params, batch_size)
                done = generate(llm, prompts, params, batch_size)
                rows.append(
                    {
                        "set": name,
                        "temperature": temperature,
                        "batch": batch_size,
                        "method": method.name,
                        **_summary(done),
                    }
                )
    return rows


def read_prompts(name: str, count: int) -> list[str]:
    lines = (PROMPTS / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line)["prompt"] for line in lines[:count]]


def _summary(done: Generation) -> dict[str, Any]:
    # Requests finish in any order; prompts name them.
    by_prompt = sorted(
        (list(output.prompt_token_ids or []), list(output.outputs[0].token_ids))
        for output in done.outputs
    )
    return {
        "tokens_per_second": done.tokens_per_second,
        "tokens_per_step": done.tokens_per_step,
        "acceptance_histogram": done.acceptance_histogram,
        "seconds": done.seconds,
        "num_tokens": done.num_tokens,
        "tokens": [tokens for _, tokens in by_prompt],
    }


def _points(
    rows: list[dict[str, Any]],
) -> dict[tuple[Any, ...], dict[str, dict[str, Any]]]:
    """(set, temperature, batch size) -> method -> row."""
    points: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        point = (row["set"], row["temperature"], row["batch"])
        points.setdefault(point, {})[row["method"]] = row
    return points


def to_table(rows: list[dict[str, Any]]) -> report.Table:
    lines = []
    for (name, temperature, batch), by_method in _points(rows).items():
        chain = by_method.get("chain")
        for method, row in by_method.items():
            rate = row["tokens_per_second"]
            lines.append(
                {
                    "set": name,
                    "T": temperature,
                    "batch": batch,
                    "method": method,
                    "tokens/s over chain": chain and rate / chain["tokens_per_second"],
                    "tokens/step over chain": chain
                    and row["tokens_per_step"] / chain["tokens_per_step"],
                    "tokens/s": rate,
                    "tokens/step": row["tokens_per_step"],
                }
            )
    return report.Table("Speed and acceptance", lines)


def _equality(rows: list[dict[str, Any]]) -> report.Table:
    """Prompts whose tokens differ from no speculation; in bfloat16 ties may."""
    lines = []
    for (name, temperature, batch), by_method in _points(rows).items():
        if "none" not in by_method:
            continue
        expected = by_method["none"]["tokens"]
        for method, row in by_method.items():
            pairs = list(zip(row["tokens"], expected, strict=True))
            lines.append(
                {
                    "set": name,
                    "T": temperature,
                    "batch": batch,
                    "method": method,
                    "prompts with other tokens": sum(a != b for a, b in pairs),
                    "of": len(pairs),
                }
            )
    return report.Table("Tokens compared with no speculation", lines)
