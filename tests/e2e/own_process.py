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

TENSOR_PARALLEL_2: Mapping[str, Any] = {
    "tensor_parallel_size": 2,
    "distributed_executor_backend": "mp",
}
"""Engine options for two real worker processes."""

TENSOR_PARALLEL_2_ENV: Mapping[str, str] = {
    # One core for each rank.
    "VLLM_CPU_OMP_THREADS_BIND": "0|1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def generate_in_own_process(
    config: EngineConfig,
    prompts: Sequence[Sequence[int]],
    sampling: Mapping[str, Any],
    env: Mapping[str, str] | None = None,
    timeout_s: float = 300,
) -> list[list[int]]:
    """Token ids of each prompt's output.

    Fails with the process's output, when it takes too long, and when it leaves worker
    processes behind.
    """
    request = json.dumps(
        {
            "llm": config.llm_arguments(),
            "prompts": [list(prompt) for prompt in prompts],
            "sampling": dict(sampling),
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
        assert _ends_within(process.pid, seconds=20), "worker processes were left"
    finally:
        if not _ends_within(process.pid, seconds=0):
            os.killpg(process.pid, signal.SIGKILL)
    return json.loads(log.splitlines()[-1])


def _ends_within(process_group: int, seconds: float) -> bool:
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


def main() -> None:
    from vllm import LLM, SamplingParams

    request = json.loads(sys.stdin.read())
    llm = LLM(**request["llm"])
    outputs = llm.generate(
        [{"prompt_token_ids": ids} for ids in request["prompts"]],
        SamplingParams(**request["sampling"]),
        use_tqdm=False,
    )
    llm.llm_engine.engine_core.shutdown()
    print(json.dumps([list(output.outputs[0].token_ids) for output in outputs]))


if __name__ == "__main__":
    main()
