# SPDX-License-Identifier: Apache-2.0
"""Logits processing of a tree's rows, by vLLM's means where it has them."""

from vllm_ddtree.hooks import patcher, registry

if patcher.exists(registry.DRAFT_PATHS.native):
    from vllm_ddtree.node_logits import NodeLogits
else:
    from vllm_ddtree.path_processors import NodeLogits  # type: ignore[assignment]

__all__ = ["NodeLogits"]
