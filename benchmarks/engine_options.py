# SPDX-License-Identifier: Apache-2.0
"""The engines of a comparison, and how each is started."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.shapes import Pair
from vllm_ddtree.measure import WARM_STEPS, capture_sizes

CHAIN_LENGTH = 15


@dataclass(frozen=True)
class Method:
    name: str
    num_drafts: int
    """Rows that a request verifies in a step, without the first."""
    speculative: dict[str, Any] | None


def methods(args: argparse.Namespace, draft: str) -> list[Method]:
    """No speculation, stock DFlash, and one tree for each budget, as asked for."""
    found = []
    if "none" in args.methods:
        found.append(Method("none", 0, None))
    if "chain" in args.methods:
        found.append(_speculative("chain", "dflash", draft, CHAIN_LENGTH))
    if "tree" in args.methods:
        found += [
            _speculative(f"tree {budget}", "ddtree", draft, budget)
            for budget in args.budgets
        ]
    return found


def _speculative(name: str, method: str, draft: str, num_drafts: int) -> Method:
    speculative = {
        "method": method,
        "model": draft,
        "num_speculative_tokens": num_drafts,
    }
    return Method(name, num_drafts, speculative)


def graph_options(method: Method, batch_sizes: Sequence[int]) -> dict[str, Any]:
    """FULL graphs of exactly these decode batches, without torch.compile."""
    widths = {method.num_drafts}
    if method.speculative is not None:
        # Draft graphs are captured for the sizes of whole draft blocks.
        widths.add(max(CHAIN_LENGTH, method.num_drafts))
    sizes = sorted({n for w in widths for n in capture_sizes(w, batch_sizes)})
    return {
        "max_num_seqs": max(batch_sizes),
        "max_num_batched_tokens": max(8192, *sizes),
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": sizes,
        },
    }


def step_options(
    args: argparse.Namespace, pair: Pair, method: Method, batch_sizes: Sequence[int]
) -> dict[str, Any]:
    """Options for engines that are fed token ids, with weights or without."""
    num_steps = args.steps + WARM_STEPS + 4
    return graph_options(method, batch_sizes) | {
        "dtype": args.dtype,
        "load_format": "auto" if pair.has_weights else "dummy",
        "skip_tokenizer_init": True,
        # Every step may bring a whole path.
        "max_model_len": max(args.contexts) + (CHAIN_LENGTH + 1) * num_steps,
    }


def fitting_batch_sizes(args: argparse.Namespace, method: Method) -> list[int]:
    """Batch sizes whose steps verify at most `--max-rows` rows, never none."""
    sizes = sorted(args.batch_sizes)
    fitting = [n for n in sizes if n * (method.num_drafts + 1) <= args.max_rows]
    return fitting or sizes[:1]
