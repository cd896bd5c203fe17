# SPDX-License-Identifier: Apache-2.0
"""The one place that sets the environment in which vLLM runs on a CPU here.

Call `configure` before torch and vLLM are imported. Worker processes inherit the
result.
"""

import os
from types import MappingProxyType

CPU_ENVIRONMENT = MappingProxyType(
    {
        # Model Runner V2 needs Triton; its interpreter needs no compiler.
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        # The engine core in the caller's process: a start of 8 s instead of 20 s.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # GiB. Without it vLLM takes half of the machine's memory.
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # Binding threads to cores slows several engines on a few shared cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # A step is many small operations; spinning threads starve the others.
        "OMP_WAIT_POLICY": "PASSIVE",
        "VLLM_NO_USAGE_STATS": "1",
        # Everything is read from local folders; a hub look-up would only wait.
        "HF_HUB_OFFLINE": "1",
    }
)


def configure() -> None:
    """Set each variable of `CPU_ENVIRONMENT` that is not set already."""
    for name, value in CPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
