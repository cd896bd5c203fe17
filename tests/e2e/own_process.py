# SPDX-License-Identifier: Apache-2.0
"""Generate in a process of its own, for engines that need worker processes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from engines import EngineConfig


def tensor_parallel(size: int) -> dict[str, Any]:
    """Engine options for `size` real worker processes."""
    return {"tensor_parallel_size": size, "distributed_executor_backend": "mp"}


def tensor_parallel_env(size: int) -> dict[str, str]:
    """One core for each rank, as far as there are cores."""
    cores = sorted(os.sched_getaffinity(0))
    bind = "|".join(str(cores[rank % len(cores)]) for rank in range(size))
    return {"VLLM_CPU_OMP_THREADS_BIND": bind, "VLLM_LOGGING_LEVEL": "WARNING"}


TENSOR_PARALLEL_2 = tensor_parallel(2)
TENSOR_PARALLEL_2_ENV = tensor_parallel_env(2)


def generate_in_own_process(
    config: EngineConfig,
    prompts: Sequence[Sequence[int]],
    sampling: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    env: Mapping[str, str] | None = None,
    timeout_s: float = 300,
    perturb_rank: int | None = None,
    gathered_bytes: list[int] | None = None,
) -> list[list[int]]:
    """Token ids of each prompt's output.

    Fails with the process's output, when it takes too long, and when it leaves worker
    processes behind.

    Args:
        config: the engine to start there.
        prompts: token ids.
        sampling: `SamplingParams` arguments, for all prompts or for each.
        env: environment variables, over this process's.
        timeout_s: for the whole process.
        perturb_rank: spoil the draft scores of this tensor-parallel rank.
        gathered_bytes: receives the bytes that each rank put into all-gathers.

    """
    request = json.dumps(
        {
            "llm": config.llm_arguments(),
            "prompts": [list(prompt) for prompt in prompts],
            "sampling": sampling,
            "perturb_rank": perturb_rank,
            "counts_bytes": gathered_bytes is not None,
        }
    )
    process = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **(env or {})},
        start_new_session=True,
    )
    try:
        log, _ = process.communicate(request, timeout=timeout_s)
        assert process.returncode == 0, log
        assert ends_within(process.pid, seconds=20), "worker processes were left"
    finally:
        if not ends_within(process.pid, seconds=0):
            os.killpg(process.pid, signal.SIGKILL)
    result = json.loads(log.splitlines()[-1])
    if gathered_bytes is not None:
        gathered_bytes.extend(result["gathered_bytes"])
    return result["tokens"]


def ends_within(process_group: int, seconds: float) -> bool:
    """Whether no process of the group is left, or none soon."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            os.killpg(process_group, 0)
        except ProcessLookupError:
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.2)


def perturb_draft_scores(worker: Any, rank: int) -> None:
    """Runs in every worker: one of them gets other draft scores than the rest."""
    if worker.rank != rank:
        return
    head = worker.model_runner.speculator.draft_head
    top_k = head.top_k

    def perturbed(*args):
        tokens, log_probs = top_k(*args)
        return tokens, log_probs - 0.01 * log_probs.abs()

    head.top_k = perturbed


def count_gathered_bytes(worker: Any) -> None:
    """Runs in every worker: add up the sizes of what it puts into all-gathers."""
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    all_gather = group.all_gather
    worker.gathered_bytes = 0

    def counted(tensor, *args, **kwargs):
        worker.gathered_bytes += tensor.numel() * tensor.element_size()
        return all_gather(tensor, *args, **kwargs)

    group.all_gather = counted


def read_gathered_bytes(worker: Any) -> int:
    return worker.gathered_bytes


def main() -> None:
    from vllm import LLM, SamplingParams

    request = json.loads(sys.stdin.read())
    llm = LLM(**request["llm"])
    if request["counts_bytes"]:
        llm.collective_rpc(count_gathered_bytes)
    if request["perturb_rank"] is not None:
        llm.collective_rpc(perturb_draft_scores, args=(request["perturb_rank"],))
    sampling = request["sampling"]
    if isinstance(sampling, dict):
        sampling = [sampling] * len(request["prompts"])
    outputs = llm.generate(
        [{"prompt_token_ids": ids} for ids in request["prompts"]],
        [SamplingParams(**arguments) for arguments in sampling],
        use_tqdm=False,
    )
    result = {"tokens": [list(output.outputs[0].token_ids) for output in outputs]}
    if request["counts_bytes"]:
        result["gathered_bytes"] = llm.collective_rpc(read_gathered_bytes)
    llm.llm_engine.engine_core.shutdown()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
