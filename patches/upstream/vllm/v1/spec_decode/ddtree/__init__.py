# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Method ``ddtree``: a tree of DFlash drafts, verified in one forward pass."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig
    from vllm.engine.arg_utils import EngineArgs


def create_config(
    options: dict[str, Any],
    engine_args: "EngineArgs",
    target_model_config: "ModelConfig",
    target_parallel_config: "ParallelConfig",
) -> "SpeculativeConfig":
    """The checked configuration; the target gets tree attention.

    Raises:
        ValueError: an option or the engine cannot work with the method.

    """
    from vllm.v1.spec_decode.ddtree import config, support

    support.check_engine(engine_args, target_model_config, target_parallel_config)
    spec = config.create_ddtree_config(
        options, target_model_config, target_parallel_config
    )
    engine_args.attention_config.backend = None
    engine_args.attention_backend = "TREE_ATTN"
    return spec
