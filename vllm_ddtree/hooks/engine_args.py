# SPDX-License-Identifier: Apache-2.0
"""``{"method": "ddtree"}`` in ``--speculative-config`` and ``LLM(...)``."""

from collections.abc import Callable
from functools import wraps
from typing import Any

METHOD = "ddtree"
WORKER_EXTENSION = "vllm_ddtree.hooks.worker.WorkerExtension"


def create_config(
    options: dict[str, Any],
    engine_args: Any,
    target_model_config: Any,
    target_parallel_config: Any,
) -> Any:
    """The checked configuration; the engine's own is made to fit it.

    Raises:
        ValueError: an option or the engine cannot work with the method.

    """
    from vllm_ddtree import config, support
    from vllm_ddtree.hooks import patcher

    patcher.check_fingerprints()
    support.check_engine(engine_args, target_model_config, target_parallel_config)
    if target_parallel_config.worker_extension_cls:
        raise ValueError(
            "Speculative method 'ddtree': loads its worker code through "
            "worker_extension_cls, which is set to "
            f"{target_parallel_config.worker_extension_cls}; remove it."
        )
    spec = config.create_ddtree_config(
        options, target_model_config, target_parallel_config
    )
    engine_args.attention_config.backend = None
    engine_args.attention_backend = "CUSTOM"
    target_parallel_config.worker_extension_cls = WORKER_EXTENSION
    return spec


def wrap_create_speculative_config(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def create_speculative_config(
        self: Any, target_model_config: Any, target_parallel_config: Any
    ) -> Any:
        options = {
            key.replace("-", "_"): value
            for key, value in (self.speculative_config or {}).items()
        }
        if options.get("method") != METHOD:
            return original(self, target_model_config, target_parallel_config)
        return create_config(options, self, target_model_config, target_parallel_config)

    return create_speculative_config


def register_method() -> None:
    """Use the registry of a vLLM that has one."""
    from vllm.v1.spec_decode.registry import register_speculative_method

    register_speculative_method(
        METHOD,
        config=f"{__name__}.create_config",
        speculator="vllm_ddtree.hooks.speculator.PluginSpeculator",
    )
