#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Generate a text with DFlash's chain and with DDTree's tree, and compare them.

Shows the text, how much of it was drafted, and one tree with its accepted path. Runs
on a GPU, or on a CPU where the package ddtree-cpu-engine is installed.
"""

import argparse
import gc
import importlib.util
import itertools
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput

ROOT = Path(__file__).resolve().parent.parent
CHAIN_LENGTH = 15
MAX_NODES_SHOWN = 24
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
    parser.add_argument(
        "--method",
        default="both",
        choices=["both", "dflash", "ddtree"],
        help="`both` runs the chain, then the tree",
    )
    parser.add_argument(
        "--budget", type=int, default=63, help="tree nodes verified per step"
    )
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
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    warnings.simplefilter("ignore")
    if is_hub_name(args.model) or is_hub_name(args.draft):
        os.environ.setdefault("HF_HUB_OFFLINE", "0")
    if not importlib.util.find_spec("ddtree_cpu_engine"):
        return False
    from ddtree_cpu_engine import environment

    environment.configure()
    return True


def start_engine(args: argparse.Namespace, method: str, on_cpu: bool) -> "LLM":
    from vllm import LLM

    num_drafts = args.budget if method == "ddtree" else CHAIN_LENGTH
    try:
        return LLM(
            args.model,
            # Exact on a CPU, so that both methods give the same tokens.
            dtype="float32" if on_cpu else "auto",
            max_model_len=1024,
            max_num_seqs=4,
            speculative_config={
                "method": method,
                "model": args.draft,
                "num_speculative_tokens": num_drafts,
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


def draw_tree(llm: "LLM", trace: dict[str, Any]) -> list[str]:
    """Lines of a tree: the accepted path, and the best drafts beside it."""
    path = set(trace["path"])
    order = sorted(range(len(trace["tokens"])), key=lambda i: -trace["scores"][i])
    shown = {i + 1 for i in order[:MAX_NODES_SHOWN]} | path
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(trace["parents"]):
        if node + 1 in shown:
            children.setdefault(parent, []).append(node + 1)
    tokenizer = llm.get_tokenizer()
    lines = ["(the token before)"]

    def draw(row: int, indent: str) -> None:
        rows = children.get(row, [])
        for child in rows:
            is_last = child == rows[-1]
            text = tokenizer.decode([trace["tokens"][child - 1]])
            mark = "  <-- accepted" if child in path else ""
            lines.append(f"{indent}{'└' if is_last else '├'}─ {text!r}{mark}")
            draw(child, indent + ("   " if is_last else "│  "))

    draw(0, "")
    return lines


def show_tree(llm: "LLM") -> None:
    """Draw the step with the longest accepted path, off the chain if one left it."""
    traces = llm.collective_rpc("ddtree_stop_trace")[0]

    def worth(trace: dict[str, Any]) -> tuple[bool, int]:
        # The most probable child of a row is the first that names it as parent.
        firsts = {
            parent: node + 1
            for node, parent in reversed(list(enumerate(trace["parents"])))
        }
        path = [0, *trace["path"]]
        steps = itertools.pairwise(path)
        return any(firsts[row] != child for row, child in steps), len(path)

    trace = max(traces, key=worth)
    num_nodes = len(trace["tokens"])
    print(f"\ndemo: one of {len(traces)} trees, the best of its {num_nodes} nodes")
    print("\n".join(draw_tree(llm, trace)))


def run(args: argparse.Namespace, method: str, on_cpu: bool) -> tuple[str, list[int]]:
    """Generate with one method; returns its summary line and the token ids."""
    print(f"demo: starting {Path(args.model).name} with {method}", flush=True)
    llm = start_engine(args, method, on_cpu)
    if method == "ddtree":
        llm.collective_rpc("ddtree_start_trace")
    completion = generate(llm, args).outputs[0]
    print(completion.text)
    length, rates = acceptance(llm)
    shown = " ".join(f"{rate:.2f}" for rate in rates if rate > 0)
    print(f"\ndemo: acceptance rate per position: {shown}")
    if method == "ddtree":
        show_tree(llm)
    llm.llm_engine.engine_core.shutdown()
    num_tokens = len(completion.token_ids)
    line = f"demo: method={method} tokens={num_tokens} acceptance_length={length:.2f}"
    return line, list(completion.token_ids)


def main() -> None:
    args = parse_args()
    check_model("model", args.model)
    check_model("draft", args.draft)
    on_cpu = set_environment(args)
    print(f"demo: prompt: {args.prompt}", flush=True)
    methods = ["dflash", "ddtree"] if args.method == "both" else [args.method]
    results = []
    for method in methods:
        results.append(run(args, method, on_cpu))
        gc.collect()
    print()
    if len({tuple(token_ids) for _, token_ids in results}) == 1 < len(results):
        print("demo: the chain and the tree gave the same tokens")
    for line, _ in results:
        print(line)


if __name__ == "__main__":
    main()
