# SPDX-License-Identifier: Apache-2.0
"""What a ddtree engine cannot do yet, refused before it starts."""

from collections.abc import Iterator
from typing import Any

import vllm.envs as envs
from vllm.config import ModelConfig, ParallelConfig
from vllm.engine.arg_utils import EngineArgs

# Attention backends a user may name: the tree backend runs on top of them.
_ATTENTION_BACKENDS = (None, "AUTO", "FLASH_ATTN", "CPU_ATTN", "CUSTOM")


def check_engine(
    args: EngineArgs,
    target_model_config: ModelConfig,
    target_parallel_config: ParallelConfig,
) -> None:
    """Refuse an engine that method ``ddtree`` cannot serve.

    Raises:
        ValueError: one sentence that names the setting and what to change.

    """
    reasons = [
        *_engine_reasons(args),
        *_parallel_reasons(target_parallel_config),
        *_model_reasons(target_model_config),
    ]
    if reasons:
        raise ValueError(f"Speculative method 'ddtree': {reasons[0]}")


def _engine_reasons(args: EngineArgs) -> Iterator[str]:
    if envs.VLLM_USE_V2_MODEL_RUNNER is False:
        yield ("needs Model Runner V2, but VLLM_USE_V2_MODEL_RUNNER=0; unset it.")
    backend = getattr(args.attention_backend, "name", args.attention_backend)
    if backend is None:
        backend = getattr(args.attention_config.backend, "name", None)
    if (backend.upper() if backend else None) not in _ATTENTION_BACKENDS:
        yield (
            f"brings its own attention for the target, but attention_backend is "
            f"{backend}; remove it (the drafter's is "
            "speculative_config['attention_backend'])."
        )
    if args.attention_config.backend_per_kind:
        yield (
            "brings its own attention for the target; remove "
            "attention_config.backend_per_kind."
        )
    if args.kv_cache_dtype not in ("auto", "bfloat16", "float16"):
        yield (
            f"supports an unquantized KV cache only, but kv_cache_dtype is "
            f"{args.kv_cache_dtype}; use 'auto'."
        )
    for name, what in (
        ("kv_transfer_config", "KV transfer"),
        ("enable_batch_sharded_sampling", "batch-sharded sampling"),
        ("enable_dbo", "dual batch overlap"),
        ("kv_sharing_fast_prefill", "fast prefill with shared KV"),
        ("enable_trace_replay", "trace replay"),
        ("return_sampling_mask", "returning the sampling mask"),
        ("watermark_config", "watermarking"),
    ):
        if getattr(args, name, None):
            yield f"does not support {what} yet; remove {name}."


def _parallel_reasons(config: ParallelConfig) -> Iterator[str]:
    for name, what in (
        ("pipeline_parallel_size", "pipeline parallelism"),
        ("decode_context_parallel_size", "decode context parallelism"),
        ("prefill_context_parallel_size", "prefill context parallelism"),
    ):
        size = getattr(config, name)
        if size > 1:
            yield f"does not support {what} yet, but {name}={size}; set it to 1."


def _model_reasons(model: ModelConfig) -> Iterator[str]:
    name = model.model
    config: Any = model.hf_text_config
    if model.is_hybrid or model.is_attention_free:
        yield f"needs a target with attention layers only; '{name}' has others."
    if model.is_encoder_decoder:
        yield f"needs a decoder-only target; '{name}' is an encoder-decoder."
    if model.use_mla:
        yield f"does not support MLA targets yet; '{name}' is one."
    if model.uses_mrope or model.is_mm_prefix_lm:
        yield f"does not support M-RoPE or prefix-LM targets yet; '{name}' is one."
    if model.get_sliding_window() is not None:
        yield f"does not support sliding-window targets yet; '{name}' is one."
    if getattr(config, "attn_logit_softcapping", None):
        yield f"does not support attention soft-capping yet; '{name}' uses it."
