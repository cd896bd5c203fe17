# SPDX-License-Identifier: Apache-2.0
"""The logits of every node are those of a plain causal forward along its path.

On a GPU in bfloat16 under FULL graphs; in the full run on a CPU in float32 too, which
shows that the comparison itself is sound.
"""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import EngineConfig, ddtree, engine, generate
from prompts import random_prompts
from shared_device import SHARED_DEVICE
from vllm import SamplingParams

from vllm_ddtree.measure import capture_sizes

BUDGET = 31
NUM_STEPS = 3
# Largest difference of a log-probability that counts. Logits of these models reach 32,
# where bfloat16 has steps of 1/8.
TOLERANCE = {"bfloat16": 0.3, "float32": 1e-3}
# Log-probabilities below it are noise of the smallest logits.
MIN_LOGPROB = -8.0


def options_for(dtype: str) -> dict[str, Any]:
    options: dict[str, Any] = {"dtype": dtype, "max_logprobs": -1}
    if dtype == "bfloat16":
        options |= {
            **SHARED_DEVICE,
            "num_gpu_blocks_override": 1024,
            "enforce_eager": False,
            "compilation_config": {
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": capture_sizes(BUDGET, [1, 2, 4]),
            },
        }
    return options


def start_recording(worker: Any) -> None:
    """Runs in the worker: keep what every verify call saw."""
    verifier = worker.model_runner.rejection_sampler
    verify = verifier.verify
    worker.verify_calls = []

    @functools.wraps(verify)
    def recorded(logits, input_batch, tree_slots, *args, **kwargs):
        tree, rows = verifier.state.tree, input_batch.logits_indices
        starts = input_batch.cu_num_logits.tolist()
        for req_idx, req_id in enumerate(input_batch.req_ids):
            slot = int(tree_slots[req_idx])
            if slot < 0:
                continue
            begin, end = starts[req_idx], starts[req_idx + 1]
            num_nodes = min(int(tree.num_nodes[slot]), end - begin - 1)
            worker.verify_calls.append(
                {
                    "req_id": req_id,
                    "root_position": int(input_batch.positions[rows[begin]]),
                    "tokens": tree.tokens[slot, :num_nodes].tolist(),
                    "parents": tree.parents[slot, :num_nodes].tolist(),
                    "logprobs": logits[begin : begin + num_nodes + 1]
                    .float()
                    .log_softmax(-1)
                    .tolist(),
                }
            )
        return verify(logits, input_batch, tree_slots, *args, **kwargs)

    verifier.verify = recorded


def stop_recording(worker: Any) -> list[dict[str, Any]]:
    """Runs in the worker."""
    del worker.model_runner.rejection_sampler.verify
    return worker.verify_calls


def path_tokens(call: dict[str, Any], row: int) -> list[int]:
    path: list[int] = []
    while row > 0:
        path.append(call["tokens"][row - 1])
        row = call["parents"][row - 1]
    return path[::-1]


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param("bfloat16", marks=pytest.mark.gpu),
        pytest.param("float32", marks=pytest.mark.full),
    ],
)
def test_logits_of_nodes(dtype: str, tiny_pairs: dict[str, tuple[Path, Path]]) -> None:
    if dtype == "float32" and torch.cuda.is_available():
        pytest.skip("FlashAttention has no float32")
    target, draft = tiny_pairs["tiny-qwen3"]
    prompts = random_prompts(target, 3)
    config = ddtree(target, draft, BUDGET, options=options_for(dtype))
    llm = engine(config)
    llm.collective_rpc(start_recording)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    outputs = generate(config, prompts, params)
    calls = llm.collective_rpc(stop_recording)[0]

    # Request ids count up, in the order of the prompts, and end in random letters.
    req_ids = sorted(
        {call["req_id"] for call in calls}, key=lambda name: int(name.split("-")[0])
    )
    sequences = {
        req_id: [*prompt, *output.outputs[0].token_ids]
        for req_id, prompt, output in zip(req_ids, prompts, outputs, strict=True)
    }
    chosen = [call for call in calls if len(call["tokens"]) > 1]
    chosen = chosen[:: max(1, len(chosen) // NUM_STEPS)][:NUM_STEPS]
    assert len(chosen) == NUM_STEPS
    paths, found = [], []
    for call in chosen:
        context = sequences[call["req_id"]][: call["root_position"] + 1]
        for row in range(len(call["tokens"]) + 1):
            paths.append([*context, *path_tokens(call, row)])
            found.append(torch.tensor(call["logprobs"][row]))
    # Wide trees, and some depth.
    assert len(paths) > NUM_STEPS * BUDGET // 2
    expected = plain_logprobs(target, paths, dtype)
    worst = 0.0
    for got, wanted in zip(found, expected, strict=True):
        counts = wanted > MIN_LOGPROB
        worst = max(worst, float((got - wanted)[counts].abs().max()))
    print(f"{dtype}: {len(paths)} rows, largest difference {worst:.2g}")
    assert worst < TOLERANCE[dtype]


def plain_logprobs(
    target: Path, paths: list[list[int]], dtype: str
) -> list[torch.Tensor]:
    """Log-probabilities of the next token after each path, whole vocabulary."""
    options = {"dtype": dtype, "max_logprobs": -1}
    if dtype == "bfloat16":
        options |= {
            **SHARED_DEVICE,
            "num_gpu_blocks_override": 4096,
        }
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=-1)
    outputs = generate(EngineConfig(target, None, options), paths, params)
    rows = []
    for output in outputs:
        (logprobs,) = output.outputs[0].logprobs
        rows.append(torch.tensor([logprobs[i].logprob for i in range(len(logprobs))]))
    return rows
