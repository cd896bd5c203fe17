# SPDX-License-Identifier: Apache-2.0
"""Prints the median CPU time of an engine step, in seconds.

Reads `LLM` arguments as JSON. CPU time of the process, as others may use the machine.
"""

import json
import sys
import time
from statistics import median

NUM_STEPS = 60


def main() -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(**json.loads(sys.stdin.read()))
    params = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    llm.llm_engine.add_request("steps", {"prompt_token_ids": [5, 6, 7, 8]}, params)
    seconds = []
    while llm.llm_engine.has_unfinished_requests() and len(seconds) < NUM_STEPS:
        started = time.process_time()
        llm.llm_engine.step()
        seconds.append(time.process_time() - started)
    # The first steps compile and fill caches.
    print(median(seconds[10:]))


if __name__ == "__main__":
    main()
