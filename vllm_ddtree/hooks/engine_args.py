# SPDX-License-Identifier: Apache-2.0
"""``{"method": "ddtree"}`` in ``--speculative-config`` and ``LLM(...)``."""

from collections.abc import Callable
from functools import wraps
from typing import Any

WORKER_EXTENSION = "vllm_ddtree.hooks.worker.WorkerExtension"


def wrap_create_speculative_config(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def create_speculative_config(
        self: Any, target_model_config: Any, target_parallel_config: Any
    ) -> Any:
        user = {
            key.replace("-", "_"): value
            for key, value in (self.speculative_config or {}).items()
        }
        if user.get("method") != "ddtree":
            return original(self, target_model_config, target_parallel_config)
        from vllm_ddtree import config, support
        from vllm_ddtree.hooks import patcher

        patcher.check_fingerprints()
        support.check_engine(self, target_model_config, target_parallel_config)
        spec = config.create_ddtree_config(
            user, target_model_config, target_parallel_config
        )
        self.attention_config.backend = None
        self.attention_backend = "CUSTOM"
        target_parallel_config.worker_extension_cls = WORKER_EXTENSION
        return spec

    return create_speculative_config
