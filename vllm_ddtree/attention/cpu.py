# SPDX-License-Identifier: Apache-2.0
"""Tree attention on a CPU: plain torch over a plain cache.

vLLM's own CPU kernels pack keys for their instruction set, which a tree's commit
could not move; here the cache is ``[block, kv head, token, key then value]``.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionLayer,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import KVCacheLayout

from vllm_ddtree.attention.layers import refuse_unsupported_layer
from vllm_ddtree.ops.reference.tree_attention import tree_attention
from vllm_ddtree.state import TreeState


class CPUTreeAttentionBackend(AttentionBackend):
    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [
        torch.float16,
        torch.bfloat16,
        torch.float32,
    ]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None) -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        # The drafter's layers keep vLLM's CPU attention, which takes no other.
        return (KVCacheLayout.LBHNC,)

    @staticmethod
    def get_impl_cls() -> type["CPUTreeAttentionImpl"]:
        return CPUTreeAttentionImpl

    @staticmethod
    def get_builder_cls() -> type["CPUTreeAttentionMetadataBuilder"]:
        return CPUTreeAttentionMetadataBuilder


@dataclass
class CPUTreeAttentionMetadata:
    num_actual_tokens: int
    # [num_reqs + 1]
    query_start_loc: torch.Tensor
    # [num_reqs]
    seq_lens: torch.Tensor
    # [num_reqs, max_num_blocks]
    block_table: torch.Tensor
    tree_state: TreeState


class CPUTreeAttentionMetadataBuilder(
    AttentionMetadataBuilder[CPUTreeAttentionMetadata]
):
    # Set by the model state before every build.
    tree_state: TreeState
    num_tree_reqs: int

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CPUTreeAttentionMetadata:
        common = common_attn_metadata
        return CPUTreeAttentionMetadata(
            num_actual_tokens=common.num_actual_tokens,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            tree_state=self.tree_state,
        )


class CPUTreeAttentionImpl(AttentionImpl[CPUTreeAttentionMetadata]):
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
    ) -> None:
        refuse_unsupported_layer(
            alibi_slopes, sliding_window, logits_soft_cap, attn_type
        )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = scale
        self.num_kv_heads = num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        # [num_blocks, num_kv_heads, block_size, 2 * head_size]
        kv_cache: torch.Tensor,
        # [num_tokens], negative for padding
        slot_mapping: torch.Tensor,
    ) -> None:
        rows = slot_mapping >= 0
        slots = slot_mapping[rows]
        kv = torch.cat([key, value], dim=-1)[: len(rows)][rows]
        block_size = kv_cache.shape[2]
        kv_cache[slots // block_size, :, slots % block_size] = kv.to(kv_cache.dtype)

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUTreeAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if attn_metadata is None:
            # vLLM's profiling run.
            return output
        state = attn_metadata.tree_state
        tree_attention(
            query,
            kv_cache,
            attn_metadata.block_table,
            attn_metadata.query_start_loc,
            attn_metadata.seq_lens,
            state.tree_slots,
            state.tree.ancestors,
            self.scale,
            output,
        )
        return output
