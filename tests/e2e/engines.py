# SPDX-License-Identifier: Apache-2.0
"""One engine per configuration, shared by all tests of the process."""

import gc
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm import LLM, RequestOutput, SamplingParams
from vllm.distributed import parallel_state

# A small engine takes 0.3 GiB, one of the real pair 1.5 GiB.
MAX_ENGINES = 2

_ENGINE_DEFAULTS: Mapping[str, Any] = {
    # Exact comparisons need float32: bfloat16 ties differ with the batch's shape.
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 512,
    "enable_prefix_caching": False,
    # 64 blocks of 128 tokens: an engine that was dropped may keep its cache.
    "num_gpu_blocks_override": 64,
    "enforce_eager": True,
}

_engines: OrderedDict[str, LLM] = OrderedDict()
_process_groups: list[bool] = []


@dataclass(frozen=True)
class EngineConfig:
    """What distinguishes an engine; everything must be plain data."""

    model: Path
    speculative: Mapping[str, Any] | None = None
    """vLLM's `speculative_config`; None for no speculation."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `LLM`, over `_ENGINE_DEFAULTS`."""

    @property
    def key(self) -> str:
        return json.dumps(self.llm_arguments(), sort_keys=True, default=str)

    def llm_arguments(self) -> dict[str, Any]:
        arguments = {**_ENGINE_DEFAULTS, "model": str(self.model), **self.options}
        if self.speculative is not None:
            arguments["speculative_config"] = dict(self.speculative)
            arguments["per_request_spec_decode_metrics"] = "detailed"
        return arguments


def dflash(target: Path, draft: Path, num_speculative_tokens: int) -> EngineConfig:
    """Stock DFlash, the yardstick."""
    return EngineConfig(
        target,
        {
            "method": "dflash",
            "model": str(draft),
            "num_speculative_tokens": num_speculative_tokens,
        },
    )


def ddtree(
    target: Path, draft: Path, budget: int, *, options: Mapping = {}, **keys: Any
) -> EngineConfig:
    """Method ddtree with `budget` nodes; `keys` are further speculative keys."""
    speculative = {
        "method": "ddtree",
        "model": str(draft),
        "num_speculative_tokens": budget,
    }
    return EngineConfig(target, speculative | keys, options)


def engine(config: EngineConfig) -> LLM:
    """The engine of `config`, started where none of the last few is one."""
    if config.key not in _engines:
        _fit_process_groups(config)
        while len(_engines) >= MAX_ENGINES:
            _drop_oldest()
        _engines[config.key] = LLM(**config.llm_arguments())
    _engines.move_to_end(config.key)
    return _engines[config.key]


def _fit_process_groups(config: EngineConfig) -> None:
    """Let vLLM make its process groups anew when a mixture of experts comes or goes.

    A process keeps the groups of its first engine, and those of a dense model lack
    the experts'.
    """
    model = json.loads((config.model / "config.json").read_text())
    is_moe = "num_experts_per_tok" in model
    if _process_groups and _process_groups[-1] != is_moe:
        while _engines:
            _drop_oldest()
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
    _process_groups.append(is_moe)


def _drop_oldest() -> None:
    _, oldest = _engines.popitem(last=False)
    _drop(oldest)
    del oldest
    gc.collect()


def _drop(llm: LLM) -> None:
    """Let the engine be collected without tearing down its distributed groups.

    All engines of a process share those, and `shutdown()` destroys them.
    """
    client = llm.llm_engine.engine_core
    client._finalizer.detach()
    client.engine_core.structured_output_manager.clear_backend()
    # Start-up froze the engine's objects; frozen ones are never collected.
    gc.unfreeze()


def generate(
    config: EngineConfig,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
) -> list[RequestOutput]:
    """Outputs in the order of `prompts`, given as text or token ids."""
    inputs: list[Any] = [
        prompt if isinstance(prompt, str) else {"prompt_token_ids": list(prompt)}
        for prompt in prompts
    ]
    return engine(config).generate(inputs, params, use_tqdm=False)


def token_ids(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def acceptance_length(outputs: Sequence[RequestOutput]) -> float:
    """Mean tokens per verify step, the bonus token included, over all `outputs`."""
    steps = accepted = 0
    for output in outputs:
        histogram = output.outputs[0].spec_decode_metrics.histogram
        steps += sum(histogram)
        accepted += sum(count * times for count, times in enumerate(histogram))
    return 1 + accepted / steps
