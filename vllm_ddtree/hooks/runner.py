# SPDX-License-Identifier: Apache-2.0
"""The runner builds our speculator where the engine was configured with it."""

from collections.abc import Callable
from functools import wraps
from typing import Any


def wrap_init_speculator(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def init_speculator(vllm_config: Any, device: Any, req_states: Any) -> Any:
        from vllm_ddtree.config import DDTreeSpeculativeConfig

        if not isinstance(vllm_config.speculative_config, DDTreeSpeculativeConfig):
            return original(vllm_config, device, req_states)
        from vllm_ddtree.hooks.speculator import PluginSpeculator

        return PluginSpeculator(vllm_config, device, req_states)

    return init_speculator
