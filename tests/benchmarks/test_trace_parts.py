# SPDX-License-Identifier: Apache-2.0
"""A trace of a GPU is split into parts by the names in it."""

import gzip
import json
from pathlib import Path
from typing import Any

from benchmarks.engine_profile import summarise
from benchmarks.trace_parts import PARTS, read_device_events, split_steps

TREE_STEP = [
    ("_prepare_pos_seq_lens_kernel", "prepare"),
    ("vectorized_elementwise_kernel<...fill>", "verify"),
    ("_compute_slot_mappings_kernel", "prepare"),
    ("_prepare_verify_inputs_kernel", "prepare"),
    ("_split_prefix_kernel", "prepare"),
    ("nvjet_tst_128x64", "verify"),
    ("flash::FlashAttnFwdSm90", "verify"),
    ("_merge_tree_attention_kernel", "verify"),
    ("nvjet_lm_head", "verify"),
    ("_gumbel_sample_kernel", "sample"),
    ("_walk_tree_kernel", "sample"),
    ("Memcpy DtoD", "sample"),
    ("_post_update_kernel", "sample"),
    ("nvjet_fc", "draft"),
    ("_commit_kv_kernel", "commit"),
    ("_restore_positions_kernel", "commit"),
    ("_index_path_kernel", "commit"),
    ("index_elementwise_kernel<128, 4>", "commit"),
    ("nvjet_context_kv", "draft"),
    ("_prepare_dflash_inputs_kernel", "draft"),
    ("nvjet_draft_layer", "draft"),
    ("_group_maxima_kernel", "build"),
    ("_top_k_of_groups_kernel", "build"),
    ("_build_tree_kernel", "build"),
    ("_compute_ancestors_kernel", "build"),
    ("index_copy", "build"),
]
CHAIN_STEP = [
    ("_prepare_prefill_inputs_kernel", "prepare"),
    ("nvjet_tst_128x64", "verify"),
    ("_gumbel_sample_kernel", "sample"),
    ("_rejection_kernel", "sample"),
    ("_post_update_kernel", "sample"),
    ("_prepare_dflash_inputs_kernel", "draft"),
    ("nvjet_draft_layer", "draft"),
    # The drafter's own sampling.
    ("_gumbel_sample_kernel", "draft"),
]
PLAIN_STEP = CHAIN_STEP[:3]


def events_of(*sequences: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Kernels of 2 us each, 1 us apart."""
    names = [name for sequence in sequences for name, _ in sequence]
    return [
        {"cat": "kernel", "name": name, "ts": 3.0 * i, "dur": 2.0, "tid": 7}
        for i, name in enumerate(names)
    ]


def check(sequence: list[tuple[str, str]]) -> None:
    steps = split_steps(events_of(CHAIN_STEP[-2:], *[sequence] * 4))
    assert len(steps) == 3
    for step in steps:
        expected = {part: 0.0 for part in PARTS}
        for _, part in sequence:
            expected[part] += 2.0
        assert {part: step.busy[part] for part in PARTS} == expected
    summary = summarise(steps)
    assert summary["num_steps"] == 3
    assert summary["idle_us"] == len(sequence)


def test_parts_of_each_method() -> None:
    for sequence in (TREE_STEP, CHAIN_STEP, PLAIN_STEP):
        check(sequence)


def test_only_the_main_stream_counts(tmp_path: Path) -> None:
    events = events_of(*[TREE_STEP] * 2)
    copies = [event | {"cat": "gpu_memcpy", "tid": 9} for event in events[:3]]
    host = [{"cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 5.0, "tid": 1}]
    file = tmp_path / "rank0.pt.trace.json.gz"
    with gzip.open(file, "wt") as stream:
        json.dump({"traceEvents": copies + host + events[::-1]}, stream)
    assert read_device_events(file) == events


def test_a_trace_without_a_gpu_has_no_steps() -> None:
    assert summarise(split_steps([]))["num_steps"] == 0
