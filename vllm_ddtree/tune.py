# SPDX-License-Identifier: Apache-2.0
"""Find the budgets that make a model fastest on this machine.

    python -m vllm_ddtree.tune MODEL DRAFTER

Measures the step time of each budget and batch size, and of stock DFlash's chain;
reads from one short run at the largest budget what every smaller one would have
accepted; prints the schedule, and the one budget, with most tokens per second.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from vllm_ddtree import budget as choice

if TYPE_CHECKING:
    from tqdm import tqdm
    from vllm import LLM

MAX_BATCH_SIZE = 1024
PROMPTS = (
    "Write a Python function that merges two sorted lists.",
    "Explain in three paragraphs why the sky is blue.",
    "A train leaves at 9:40 and arrives at 13:05. How long is the journey? Reason "
    "step by step.",
    "Write a polite email that moves a meeting from Monday to Wednesday.",
    "Summarise the plot of Romeo and Juliet.",
    "Write a SQL query that finds the second highest salary in a table of employees.",
    "Compare trains and planes for a journey of 600 km. Use a table.",
    "Translate into French: the library closes at six, but the reading room is open.",
)


@dataclass
class Profile:
    """What was measured."""

    # Batch size -> budget -> seconds per step.
    costs: dict[int, dict[int, float]] = field(default_factory=dict)
    # Budget -> tokens per step, the bonus included.
    tokens: dict[int, float] = field(default_factory=dict)
    chain_costs: dict[int, float] = field(default_factory=dict)
    chain_tokens: float = 1.0
    chain_length: int = 0

    @property
    def chain(self) -> choice.Chain:
        return choice.Chain(self.chain_tokens, self.chain_costs)


class Tuner:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.profile = Profile()
        self.budgets = sorted(set(args.budgets), reverse=True)
        self.texts = _read_prompts(args.prompts)[: args.num_prompts]

    def run(self) -> Profile:
        from tqdm import tqdm

        points = (len(self.budgets) + 1) * len(self.args.batch_sizes) + 2
        with tqdm(total=points, desc="tune", file=sys.stderr) as bar:
            for budget in self.budgets:
                self._measure_tree(budget, bar)
            self._measure_chain(bar)
        return self.profile

    def _measure_tree(self, budget: int, bar: "tqdm") -> None:
        speculative = {
            "method": "ddtree",
            "model": self.args.drafter,
            "num_speculative_tokens": budget,
        }
        with self._engine(speculative, budget) as llm:
            for batch_size, seconds in self._costs(llm, budget, bar).items():
                self.profile.costs.setdefault(batch_size, {})[budget] = seconds
            if budget == self.budgets[0]:
                self.profile.tokens = self._read_acceptance(llm)
                config: Any = llm.llm_engine.vllm_config.speculative_config
                self.profile.chain_length = config.num_draft_steps
                bar.update()

    def _measure_chain(self, bar: "tqdm") -> None:
        length = self.profile.chain_length
        speculative = {
            "method": "dflash",
            "model": self.args.drafter,
            "num_speculative_tokens": length,
        }
        with self._engine(speculative, length) as llm:
            self.profile.chain_costs = self._costs(llm, length, bar)
            self.profile.chain_tokens = self._generate(llm).tokens_per_step
            bar.update()

    def _engine(self, speculative: dict[str, Any], num_drafts: int) -> Any:
        from vllm_ddtree.measure import WARM_STEPS, capture_sizes, started_engine

        args = self.args
        # Draft graphs are captured for the sizes of whole draft blocks too.
        widths = {num_drafts, max(num_drafts, self.profile.chain_length)}
        sizes = {n for width in widths for n in capture_sizes(width, args.batch_sizes)}
        options: dict[str, Any] = {
            # Every step may bring a whole path; the prompts of the acceptance run
            # and their answers must fit too.
            "max_model_len": args.context
            + 64 * (args.steps + WARM_STEPS + 4)
            + args.max_tokens,
            "max_num_seqs": max(args.batch_sizes),
            "enable_prefix_caching": False,
            "disable_log_stats": False,
            "compilation_config": {"cudagraph_capture_sizes": sorted(sizes)},
        }
        user = json.loads(args.engine_args)
        options["compilation_config"] |= user.pop("compilation_config", {})
        return started_engine(args.model, speculative, **options | user)

    def _costs(self, llm: "LLM", num_drafts: int, bar: "tqdm") -> dict[int, float]:
        from vllm_ddtree.measure import step_times

        args = self.args
        costs = {}
        for batch_size in sorted(args.batch_sizes):
            bar.set_postfix(drafts=num_drafts, batch=batch_size)
            times = step_times(
                llm, batch_size, args.context, args.steps, args.temperature
            )
            costs[batch_size] = median(times)
            bar.update()
        return costs

    def _read_acceptance(self, llm: "LLM") -> dict[int, float]:
        llm.collective_rpc("ddtree_start_trace")
        self._generate(llm)
        traces = llm.collective_rpc("ddtree_stop_trace")[0]
        paths = [trace["path"] for trace in traces]
        return choice.tokens_per_step(paths, self.budgets)

    def _generate(self, llm: "LLM") -> Any:
        from vllm import SamplingParams

        from vllm_ddtree.measure import chat_prompt, generate

        params = SamplingParams(
            temperature=self.args.temperature, max_tokens=self.args.max_tokens, seed=0
        )
        prompts = [chat_prompt(llm, text) for text in self.texts]
        return generate(llm, prompts, params, min(8, max(self.args.batch_sizes)))


def _read_prompts(file: Path | None) -> list[str]:
    if file is None:
        return list(PROMPTS)
    lines = file.read_text().splitlines()
    return [json.loads(line)["prompt"] for line in lines if line.strip()]


def recommend(profile: Profile, drafter: str) -> dict[str, Any]:
    """The choices and what they promise, as plain data."""
    gains = choice.gains_over_chain(profile.costs, profile.tokens, profile.chain)
    schedule = choice.choose_schedule(profile.costs, profile.tokens, MAX_BATCH_SIZE)
    slower = choice.slower_than_chain(gains)
    base = {"method": "ddtree", "model": drafter}
    largest = max(profile.chain_length, *(nodes for *_, nodes in schedule))
    sizes = sorted(profile.costs)
    graphs = {(largest + 1) * n for n in sizes} | {
        (nodes + 1) * n
        for first, last, nodes in schedule
        for n in sizes
        if first <= n <= last
    }
    scheduled = base | {
        "num_speculative_tokens": largest,
        "num_speculative_tokens_per_batch_size": schedule,
    }
    if len(slower) == len(gains):
        # Nowhere a tree pays off: the chain is the answer.
        scheduled = base | {
            "method": "dflash",
            "num_speculative_tokens": profile.chain_length,
        }
        graphs = {(profile.chain_length + 1) * n for n in sizes}
    return {
        "speculative_config": scheduled,
        # Without these, batches above vLLM's default sizes run without a graph.
        "compilation_config": {"cudagraph_capture_sizes": sorted(graphs)},
        "one_budget": choice.choose_budget(gains),
        "gains_over_chain": gains,
        "slower_than_chain": slower,
    }


def print_report(profile: Profile, advice: dict[str, Any]) -> None:
    gains = advice["gains_over_chain"]
    print("\ntokens per step: " + f"chain {profile.chain_tokens:.2f}, ", end="")
    print(", ".join(f"{b} nodes {t:.2f}" for b, t in sorted(profile.tokens.items())))
    print("\ntokens per second over the chain's, by budget (columns)")
    budgets = sorted(profile.tokens)
    print("batch  step of chain  " + "".join(f"{b:>8}" for b in budgets))
    for size, row in sorted(gains.items()):
        cells = "".join(f"{row[b]:8.2f}" if b in row else f"{'-':>8}" for b in budgets)
        print(f"{size:5}  {1e3 * profile.chain_costs[size]:10.2f} ms  {cells}")
    print("\n--speculative-config '" + json.dumps(advice["speculative_config"]) + "'")
    print("--compilation-config '" + json.dumps(advice["compilation_config"]) + "'")
    if advice["one_budget"] is None:
        print("No single budget is as fast as the chain at every batch size.")
    else:
        print(f"One budget for all: num_speculative_tokens={advice['one_budget']}")
    if advice["slower_than_chain"]:
        sizes = ", ".join(map(str, advice["slower_than_chain"]))
        print(
            f"At batch sizes {sizes} the chain is faster than every budget measured: "
            "where those are usual, use method 'dflash'."
        )


def plot(profile: Profile, file: Path) -> None:
    """Draw the cost surface, and the gains over the chain."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        print("tune: no plot, as matplotlib is not installed", file=sys.stderr)
        return
    gains = choice.gains_over_chain(profile.costs, profile.tokens, profile.chain)
    sizes = sorted(profile.costs)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for budget in sorted(profile.tokens):
        measured = [n for n in sizes if budget in profile.costs[n]]
        label = f"{budget} nodes"
        times = [1e3 * profile.costs[n][budget] for n in measured]
        left.plot(measured, times, marker="o", label=label)
        right.plot(
            measured, [gains[n][budget] for n in measured], marker="o", label=label
        )
    chain_times = [1e3 * profile.chain_costs[n] for n in sizes]
    left.plot(sizes, chain_times, "k--", label="chain")
    right.axhline(1, color="k", linestyle="--", label="chain")
    for axes, title in ((left, "ms per step"), (right, "tokens/s over the chain's")):
        axes.set(xlabel="batch size", ylabel=title, xscale="log")
        axes.set_xticks(sizes, [str(n) for n in sizes])
        axes.legend()
    figure.savefig(file)
    plt.close(figure)
    print(f"tune: plot written to {file}", file=sys.stderr)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m vllm_ddtree.tune", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("model", help="target: a folder or a name on a model hub")
    parser.add_argument("drafter", help="its DFlash drafter, likewise")
    parser.add_argument("--budgets", type=int, nargs="+", default=[7, 15, 31, 63, 127])
    parser.add_argument(
        "--batch-sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64]
    )
    parser.add_argument(
        "--context", type=int, default=512, help="tokens before the measured steps"
    )
    parser.add_argument("--steps", type=int, default=32, help="measured per point")
    parser.add_argument(
        "--prompts",
        type=Path,
        help="JSON lines with a key `prompt`, like what you will serve; the default is "
        "a few of everything",
    )
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument(
        "--engine-args",
        default="{}",
        help="JSON of arguments of vllm.LLM that you serve with, for example "
        "'{\"tensor_parallel_size\": 2}'",
    )
    parser.add_argument("--plot", type=Path, help="write a picture there")
    parser.add_argument("--json", type=Path, help="write everything measured there")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse_args(argv)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    profile = Tuner(args).run()
    advice = recommend(profile, args.drafter)
    print_report(profile, advice)
    if args.plot is not None:
        plot(profile, args.plot)
    if args.json is not None:
        args.json.write_text(json.dumps({**vars(profile), **advice}, indent=1) + "\n")
    return advice


if __name__ == "__main__":
    main()
