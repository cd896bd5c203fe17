# SPDX-License-Identifier: Apache-2.0
"""Whole engines: step times, their parts, and what a real pair of models gains.

    python -m benchmarks.engine steps [--shape qwen3-8b] [--contexts ...]
    python -m benchmarks.engine profile [--shape qwen3-8b] [--context ...]
    python -m benchmarks.engine pair --model TARGET --draft DRAFTER

Every comparison is made within one call, ratios to the chain first.
"""

import argparse
import os
from pathlib import Path

from benchmarks import report


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine", description=(__doc__ or "").splitlines()[0]
    )
    modes = parser.add_subparsers(dest="mode", required=True)
    steps = modes.add_parser("steps", help="wall time of a step, dummy weights")
    profile = modes.add_parser("profile", help="a step's parts, dummy weights")
    pair = modes.add_parser("pair", help="acceptance and tokens/s of real models")
    for mode in (steps, profile):
        mode.add_argument(
            "--shape",
            default="qwen3-8b",
            help="a name of benchmarks.shapes, for dummy weights, or a folder with "
            "models in `target` and `draft`",
        )
        mode.add_argument("--steps", type=int, default=32)
        mode.add_argument(
            "--max-rows",
            type=int,
            default=4096,
            help="skip points that verify more rows than this in a step",
        )
    steps.add_argument("--contexts", type=int, nargs="+", default=[512, 2048, 8192])
    profile.add_argument("--contexts", type=int, nargs="+", default=[512])
    steps.add_argument(
        "--batch-sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64]
    )
    profile.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    root = report.ROOT
    pair.add_argument(
        "--model", default=str(root / ".models" / "SmolLM2-135M-Instruct")
    )
    pair.add_argument("--draft", default=str(root / "models" / "smollm2-135m-dflash"))
    pair.add_argument("--sets", nargs="+", default=["humaneval", "gsm8k", "mtbench"])
    pair.add_argument("--num-prompts", type=int, default=32, help="of each set")
    pair.add_argument("--max-tokens", type=int, default=256)
    pair.add_argument("--max-model-len", type=int, default=2048)
    pair.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    pair.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    for mode in (steps, profile, pair):
        mode.add_argument("--budgets", type=int, nargs="+", default=[15, 31, 63, 127])
        mode.add_argument(
            "--methods",
            nargs="+",
            default=["none", "chain", "tree"],
            choices=["none", "chain", "tree"],
        )
        mode.add_argument("--dtype", default="bfloat16")
        mode.add_argument("--out", type=Path, default=report.RESULTS)
        mode.add_argument("--name", help="of the files written, without suffix")
    args = parser.parse_args(argv)
    args.name = args.name or f"engine-{args.mode}"
    return args


def main(argv: list[str] | None = None) -> Path:
    args = parse_args(argv)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from benchmarks import engine_pair, engine_profile, engine_steps

    modes = {"steps": engine_steps, "profile": engine_profile, "pair": engine_pair}
    result = modes[args.mode].run(args)
    result.command = report.command_of("benchmarks.engine", argv)
    page = result.write(args.out)
    print(page.read_text())
    return page


if __name__ == "__main__":
    main()
