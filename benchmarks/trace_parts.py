# SPDX-License-Identifier: Apache-2.0
"""Split a torch profiler trace of decode steps into parts, by names of kernels.

CUDA graphs leave no host ranges behind, but every kernel in them has its name, and a
step launches the same sequence of them each time. A few names mark where a part begins;
kernels between marks belong to the part that the last mark opened.
"""

import gzip
import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PARTS = ("prepare", "verify", "sample", "commit", "draft", "build")


@dataclass(frozen=True)
class Mark:
    pattern: re.Pattern[str]
    part: str
    """Of the kernel itself."""
    then: str
    """Of the unknown kernels after it."""
    within: tuple[str, ...] = PARTS
    """Parts in which the name is a mark; elsewhere it is a kernel like others."""


MARKS = (
    Mark(
        re.compile(
            r"_prepare_prefill_inputs_kernel|_prepare_pos_seq_lens_kernel"
            r"|_combine_sampled_and_draft_tokens_kernel|_gather_block_tables_kernel"
            r"|_compute_slot_mappings_kernel|_prepare_verify_inputs_kernel"
            r"|_expand_idx_mapping_kernel|_split_prefix_kernel"
        ),
        part="prepare",
        then="verify",
    ),
    Mark(
        re.compile(
            r"_temperature_kernel|_gumbel_sample_kernel|_min_p_kernel"
            r"|_penalties_kernel|_bias_kernel|_topk_log_softmax_kernel"
            r"|_compute_local_logits_stats_kernel|_rejection_kernel|_resample_kernel"
            r"|_gather_draft_sampled_kernel|_flatten_sampled_kernel"
            r"|_walk_tree_kernel|_get_num_sampled_and_rejected_kernel"
        ),
        part="sample",
        then="sample",
        # A chain's drafter samples with the same kernels.
        within=("verify", "sample"),
    ),
    Mark(re.compile(r"_post_update_kernel"), part="sample", then="draft"),
    Mark(
        re.compile(r"_commit_kv_kernel|_restore_positions_kernel"),
        part="commit",
        then="draft",
    ),
    # Then the hidden states are gathered in path order.
    Mark(re.compile(r"_index_path_kernel"), part="commit", then="commit"),
    Mark(
        re.compile(
            r"_group_maxima_kernel|_top_k_of_groups_kernel|_local_top_k_kernel"
            r"|_merge_top_k_kernel|_build_tree_kernel|_compute_ancestors_kernel"
        ),
        part="build",
        then="build",
    ),
)
_GATHERS = re.compile(r"index|gather|copy|memcpy", re.IGNORECASE)
_DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass
class Step:
    """Microseconds on the device."""

    begin: float
    end: float = 0.0
    busy: Counter[str] = field(default_factory=Counter)
    """Time in kernels, by part."""
    kernels: Counter[str] = field(default_factory=Counter)
    """Time by kernel name, for the largest ones."""

    @property
    def total_busy(self) -> float:
        return sum(self.busy.values())


def read_device_events(file: Path) -> list[dict[str, Any]]:
    """Events of the stream with most kernels, in order of time."""
    opener: Any = gzip.open if file.suffix == ".gz" else open
    with opener(file, "rt") as stream:
        events = json.load(stream)["traceEvents"]
    events = [event for event in events if event.get("cat") in _DEVICE_CATEGORIES]
    streams = Counter(event.get("tid") for event in events if event["cat"] == "kernel")
    if not streams:
        return []
    (main, _), *_ = streams.most_common(1)
    return sorted(
        (event for event in events if event.get("tid") == main),
        key=lambda event: event["ts"],
    )


def split_steps(events: Iterable[dict[str, Any]]) -> list[Step]:
    """The whole steps of a trace; what precedes the first and the last are dropped."""
    steps: list[Step] = []
    current = "before"
    for event in events:
        mark = _mark_of(event["name"], current)
        # Preparing goes on while small unnamed kernels lie between its kernels.
        is_preparing = bool(steps) and steps[-1].busy.keys() <= {"prepare", "verify"}
        if mark is not None and mark.part == "prepare" and not is_preparing:
            steps.append(Step(event["ts"]))
        if not steps:
            continue
        if mark is None and current == "commit" and not _GATHERS.search(event["name"]):
            current = "draft"
        part = mark.part if mark is not None else current
        current = mark.then if mark is not None else current
        step = steps[-1]
        step.busy[part] += event["dur"]
        step.kernels[event["name"]] += event["dur"]
        step.end = event["ts"] + event["dur"]
    return steps[:-1]


def _mark_of(name: str, current: str) -> Mark | None:
    for mark in MARKS:
        # Before the first step only its beginning is a mark.
        if current == "before" and mark.part != "prepare":
            continue
        if current != "before" and current not in mark.within:
            continue
        if mark.pattern.search(name):
            return mark
    return None
