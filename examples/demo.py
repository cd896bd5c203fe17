#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Generate text with speculative decoding and show how much of it was drafted.

Runs on a GPU, or on a CPU where the package ddtree-cpu-engine is installed.
"""

import argparse
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput

ROOT = Path(__file__).resolve().parent.parent
PROMPT = "Write a Python function that checks whether a number is prime."


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model",
        default=str(ROOT / ".models" / "SmolLM2-135M-Instruct"),
        help="target: a folder or a name on a model hub",
    )
    parser.add_argument(
        "--draft",
        default=str(ROOT / "models" / "smollm2-135m-dflash"),
        help="DFlash drafter: a folder or a name on a model hub",
    )
    parser.add_argument("--method", default="dflash")
    parser.add_argument("--num-speculative-tokens", type=int, default=15)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--prompt", default=PROMPT)
    return parser.parse_args()


def is_hub_name(name: str) -> bool:
    """A hub name has exactly one slash, does not begin like a path and is no folder."""
    is_path = name.startswith(("/", ".", "~")) or name.count("/") != 1
    return not is_path and not Path(name).exists()


def check_model(role: str, name: str) -> None:
    """Exit with one sentence where `name` is meant as a model folder and is none."""
    if not is_hub_name(name) and not (Path(name) / "config.json").is_file():
        hint = " Run `make models` first." if role == "model" else ""
        fail(f"the {role} folder {name} has no config.json.{hint}")


def fail(message: str) -> NoReturn:
    print(f"demo: {message}", file=sys.stderr)
    raise SystemExit(2)


def set_environment(args: argparse.Namespace) -> bool:
    """Set the environment that vLLM reads on import; True for the CPU engine."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if is_hub_name(args.model) or is_hub_name(args.draft):
        os.environ.setdefault("HF_HUB_OFFLINE", "0")
    if not importlib.util.find_spec("ddtree_cpu_engine"):
        return False
    from ddtree_cpu_engine import environment

    environment.configure()
    return True


def start_engine(args: argparse.Namespace, on_cpu: bool) -> "LLM":
    from vllm import LLM

    try:
        return LLM(
            args.model,
            max_model_len=1024,
            max_num_seqs=4,
            speculative_config={
                "method": args.method,
                "model": args.draft,
                "num_speculative_tokens": args.num_speculative_tokens,
            },
            enforce_eager=on_cpu,
            disable_log_stats=False,
        )
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        fail(f"vLLM could not start: {reason}")


def generate(llm: "LLM", args: argparse.Namespace) -> "RequestOutput":
    """Generate with the chat template, showing progress."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=args.temperature, max_tokens=args.max_tokens, seed=0
    )
    conversation: Any = [{"role": "user", "content": args.prompt}]
    return llm.chat(conversation, params, use_tqdm=True)[0]


def acceptance(llm: "LLM") -> tuple[float, list[float]]:
    """Mean tokens per step, the bonus included, and the rate of each position."""
    counters = {
        metric.name.removeprefix("vllm:spec_decode_num_"): metric
        for metric in llm.get_metrics()
        if metric.name.startswith("vllm:spec_decode_num_")
    }
    num_drafts = counters["drafts"].value
    if not num_drafts:
        return 1.0, []
    rates = [
        accepted / num_drafts for accepted in counters["accepted_tokens_per_pos"].values
    ]
    return 1 + counters["accepted_tokens"].value / num_drafts, rates


def main() -> None:
    args = parse_args()
    check_model("model", args.model)
    check_model("draft", args.draft)
    on_cpu = set_environment(args)

    print(f"demo: starting {Path(args.model).name} with {args.method}", flush=True)
    llm = start_engine(args, on_cpu)
    print(f"demo: prompt: {args.prompt}", flush=True)
    completion = generate(llm, args).outputs[0]
    print(completion.text)

    length, rates = acceptance(llm)
    num_tokens = len(completion.token_ids)
    shown = " ".join(f"{rate:.2f}" for rate in rates)
    print(f"\ndemo: acceptance rate per position: {shown}")
    print(
        f"demo: method={args.method} tokens={num_tokens} acceptance_length={length:.2f}"
    )


if __name__ == "__main__":
    main()
