# SPDX-License-Identifier: Apache-2.0
"""The host never waits for the device in a decode step.

vLLM raises on a synchronizing call inside a worker's step under
VLLM_GPU_SYNC_CHECK=error, which it reads on import: hence a process of its own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from shared_device import SHARED_DEVICE

pytestmark = pytest.mark.gpu

CHILD = """
import json, sys
from vllm import LLM, SamplingParams
from vllm_ddtree import verifier

options = json.loads(sys.argv[1])
if options["plant_sync"]:
    walk_tree = verifier.walk_tree

    def waiting_walk_tree(tree, *args, **kwargs):
        result = walk_tree(tree, *args, **kwargs)
        result[2].sum().item()
        return result

    verifier.walk_tree = waiting_walk_tree
llm = LLM(**options["llm"])
params = [
    SamplingParams(max_tokens=options["max_tokens"], ignore_eos=True, **sampling)
    for sampling in options["sampling"]
]
prompts = [{"prompt_token_ids": ids} for ids in options["prompts"]]
outputs = llm.generate(prompts, params, use_tqdm=False)
print(json.dumps([len(output.outputs[0].token_ids) for output in outputs]))
"""


def run_child(
    target: Path, draft: Path, eager: bool, plant_sync: bool
) -> subprocess.CompletedProcess[str]:
    budget = 31
    options = {
        "plant_sync": plant_sync,
        "max_tokens": 400,
        "prompts": [[5, 6, 7 + i] for i in range(3)],
        "sampling": [
            {"temperature": 0},
            {"temperature": 1.0, "seed": 1},
            {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1},
        ],
        "llm": {
            "model": str(target),
            "dtype": "bfloat16",
            "max_model_len": 1024,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 1024,
            **SHARED_DEVICE,
            "enforce_eager": eager,
            "speculative_config": {
                "method": "ddtree",
                "model": str(draft),
                "num_speculative_tokens": budget,
            },
        },
    }
    if not eager:
        options["llm"]["compilation_config"] = {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [(budget + 1) * n for n in (1, 2, 4)],
        }
    return subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(options)],
        capture_output=True,
        text=True,
        timeout=400,
        env={
            **os.environ,
            "VLLM_GPU_SYNC_CHECK": "error",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        },
    )


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_no_step_waits(eager: bool, tiny_pairs: dict[str, tuple[Path, Path]]) -> None:
    result = run_child(*tiny_pairs["tiny-qwen3"], eager=eager, plant_sync=False)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    # The engine may have logged after it.
    (counts,) = [line for line in result.stdout.splitlines() if line.startswith("[4")]
    assert json.loads(counts) == [400] * 3


def test_a_planted_wait_is_seen(tiny_pairs: dict[str, tuple[Path, Path]]) -> None:
    result = run_child(*tiny_pairs["tiny-qwen3"], eager=False, plant_sync=True)
    assert result.returncode != 0
    assert "sync" in (result.stdout + result.stderr).lower()
