# SPDX-License-Identifier: Apache-2.0
"""Entry point `vllm.general_plugins`: faster kernels in every process on a CPU."""

import os


def register() -> None:
    """Make vLLM's CPU platform register this package's kernel overrides.

    Does nothing on another platform or without Triton's interpreter. The platform
    registers them when a worker starts, so other processes import no kernels.
    """
    from vllm.platforms import current_platform

    if os.environ.get("TRITON_INTERPRET") != "1" or not current_platform.is_cpu():
        return
    platform = type(current_platform)
    platform.register_triton_kernel_overrides = staticmethod(_register_overrides)


def _register_overrides() -> None:
    from vllm.triton_utils import dispatcher

    from . import interpreter_masks, interpreter_speed, kernels

    interpreter_masks.install()
    interpreter_speed.install()
    # vLLM registers again for each engine of a process.
    missing = {
        name: implementation
        for name, implementation in kernels.OVERRIDES.items()
        if name not in dispatcher._registry
    }
    dispatcher.register_kernels(missing)
