# SPDX-License-Identifier: Apache-2.0
"""Tree attention on CUDA: FlashAttention over the prefix, Triton over the tree.

A step's tree rows attend to the cached prefix with FlashAttention, which needs no
mask there, and to each other with a small kernel that reads the ancestor bits and
joins all parts. The rows of a lone request attend to several parts of its prefix side
by side, as a batch of that many requests: one request leaves most of a device idle,
and our kernel joins parts more cheaply than FlashAttention's own second pass.
Everything else takes vLLM's FlashAttention unchanged.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import vllm.envs as envs
from vllm.utils.math_utils import cdiv
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from vllm_ddtree.attention.layers import refuse_unsupported_layer
from vllm_ddtree.ops.split_prefix import part_width, split_prefix
from vllm_ddtree.ops.tree_attention import merge_tree_attention
from vllm_ddtree.state import TreeState

# Query rows of all heads of a KV head, and keys, in a tile of FlashAttention 3.
_TILE = 128
_MAX_PARTS = 8


class CUDATreeAttentionBackend(FlashAttentionBackend):
    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type["CUDATreeAttentionImpl"]:
        return CUDATreeAttentionImpl

    @staticmethod
    def get_builder_cls() -> type["CUDATreeAttentionMetadataBuilder"]:
        return CUDATreeAttentionMetadataBuilder


@dataclass
class TreeRows:
    """The leading requests of a batch, whose query rows may hold trees."""

    num_tokens: int
    max_query_len: int
    max_prefix_len: int
    # [num_tree_reqs + 1]
    query_start_loc: torch.Tensor
    # [num_tree_reqs or num_parts] tokens in the cache before the query
    prefix_lens: torch.Tensor
    # [num_tree_reqs or num_parts, max_num_blocks]
    block_table: torch.Tensor
    scheduler_metadata: torch.Tensor | None
    max_num_splits: int
    state: TreeState
    is_parted: bool
    """One request; `prefix_lens` and `block_table` have a row for each part."""


@dataclass
class CUDATreeAttentionMetadata:
    tree: TreeRows | None
    causal: FlashAttentionMetadata | None


class CUDATreeAttentionMetadataBuilder(FlashAttentionMetadataBuilder):
    # Set by the model state before every build.
    tree_state: TreeState
    num_tree_reqs: int = 0

    supports_update_block_table = False

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # Targets with sliding windows are refused; a first batch may be all trees.
        self.aot_sliding_window = (-1, -1)
        # Read by captured graphs.
        ints = {"dtype": torch.int32, "device": device}
        self.prefix_lens = torch.zeros(
            vllm_config.scheduler_config.max_num_seqs, **ints
        )
        self.part_lens = torch.zeros(_MAX_PARTS, **ints)
        # Number of parts -> their blocks
        self.part_blocks: dict[int, torch.Tensor] = {}
        properties = torch.cuda.get_device_properties(device)
        self.num_sms = properties.multi_processor_count

    @classmethod
    def get_cudagraph_support(cls, vllm_config, kv_cache_spec) -> AttentionCGSupport:
        return AttentionCGSupport.UNIFORM_BATCH

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        common = common_attn_metadata
        num_tree_reqs = self.num_tree_reqs
        if num_tree_reqs == 0:
            causal = super().build(common_prefix_len, common, fast_build)
            return CUDATreeAttentionMetadata(None, causal)
        tree = self._build_tree_rows(common, num_tree_reqs)
        causal = None
        if num_tree_reqs < common.num_reqs:
            rest = replace(
                common,
                query_start_loc=common.query_start_loc[num_tree_reqs:],
                query_start_loc_cpu=common.query_start_loc_cpu[num_tree_reqs:],
                seq_lens=common.seq_lens[num_tree_reqs:],
                num_reqs=common.num_reqs - num_tree_reqs,
                block_table_tensor=common.block_table_tensor[num_tree_reqs:],
            )
            # The ahead-of-time schedule has one buffer, and trees use it.
            causal = super().build(common_prefix_len, rest, fast_build=True)
        return CUDATreeAttentionMetadata(tree, causal)

    def _build_tree_rows(
        self, common: CommonAttentionMetadata, num_reqs: int
    ) -> TreeRows:
        starts = common.query_start_loc[: num_reqs + 1]
        starts_cpu = common.query_start_loc_cpu[: num_reqs + 1]
        prefix_lens = self.prefix_lens[:num_reqs]
        torch.sub(common.seq_lens[:num_reqs], starts.diff(), out=prefix_lens)
        # Graph padding has no sequence.
        prefix_lens.clamp_(min=0)
        rows = TreeRows(
            num_tokens=int(starts_cpu[-1]),
            max_query_len=int(starts_cpu.diff().max()),
            max_prefix_len=common.max_seq_len,
            query_start_loc=starts,
            prefix_lens=prefix_lens,
            block_table=common.block_table_tensor[:num_reqs],
            scheduler_metadata=None,
            max_num_splits=0,
            state=self.tree_state,
            is_parted=False,
        )
        # As vLLM does: an upper bound in graphs only, a schedule everywhere.
        is_graph = (
            self.use_full_cuda_graph
            and self.max_cudagraph_size is not None
            and common.num_actual_tokens <= self.max_cudagraph_size
        )
        aot_schedule = self.aot_schedule and not envs.VLLM_BATCH_INVARIANT
        num_parts = 1
        if num_reqs == 1 and aot_schedule:
            rows_per_head = rows.max_query_len * self.num_heads_q // self.num_heads_kv
            num_parts = num_prefix_parts(rows_per_head, self.num_heads_kv, self.num_sms)
        if num_parts > 1:
            self._part_prefix(rows, num_parts)
        elif envs.VLLM_BATCH_INVARIANT:
            rows.max_num_splits = 1
        elif is_graph:
            rows.max_num_splits = self.max_num_splits
        scheduler_metadata = self._get_scheduler_metadata(
            aot_schedule=aot_schedule,
            batch_size=rows.prefix_lens.shape[0],
            cu_query_lens=None if rows.is_parted else starts,
            max_query_len=rows.max_query_len,
            seqlens=rows.prefix_lens,
            max_seq_len=rows.max_prefix_len,
            causal=False,
            max_num_splits=rows.max_num_splits,
        )
        rows.scheduler_metadata = self._store_scheduler_metadata(scheduler_metadata)
        return rows

    def _part_prefix(self, rows: TreeRows, num_parts: int) -> None:
        """Replace the request by its parts, each a batch row with all query rows."""
        (block_table,) = rows.block_table
        unit = part_unit(self.block_size)
        if num_parts not in self.part_blocks:
            width = part_width(block_table.shape[0], num_parts, unit)
            self.part_blocks[num_parts] = block_table.new_zeros(num_parts, width)
        part_lens = self.part_lens[:num_parts]
        part_blocks = self.part_blocks[num_parts]
        split_prefix(
            rows.prefix_lens,
            block_table,
            self.block_size,
            unit,
            part_lens,
            part_blocks,
        )
        rows.prefix_lens, rows.block_table = part_lens, part_blocks
        rows.max_prefix_len = part_blocks.shape[1] * self.block_size
        rows.max_num_splits = 1
        rows.is_parted = True


class CUDATreeAttentionImpl(FlashAttentionImpl):
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
        attn_type: AttentionType = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
    ) -> None:
        refuse_unsupported_layer(
            alibi_slopes, sliding_window, logits_soft_cap, attn_type
        )
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
        )

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if attn_metadata is None or attn_metadata.causal is not None:
            super().forward(
                layer,
                query,
                key,
                value,
                kv_cache,
                attn_metadata and attn_metadata.causal,
                output,
                output_scale,
                output_block_scale,
            )
        if attn_metadata is not None and attn_metadata.tree is not None:
            self._forward_tree(query, key, value, kv_cache, attn_metadata.tree, output)
        return output

    def _forward_tree(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        tree: TreeRows,
        output: torch.Tensor,
    ) -> None:
        key_cache, value_cache = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        query, out = query[: tree.num_tokens], output[: tree.num_tokens]
        cache = (
            canonicalize_singleton_dim_strides(key_cache),
            canonicalize_singleton_dim_strides(value_cache),
        )
        if tree.is_parted:
            prefix, prefix_lse = attend_parts(
                query,
                *cache,
                tree.prefix_lens,
                tree.block_table,
                self.scale,
                tree.scheduler_metadata,
            )
        else:
            _, lse = flash_attn_varlen_func(
                query,
                *cache,
                out=out,
                cu_seqlens_q=tree.query_start_loc,
                max_seqlen_q=tree.max_query_len,
                seqused_k=tree.prefix_lens,
                max_seqlen_k=tree.max_prefix_len,
                softmax_scale=self.scale,
                causal=False,
                block_table=tree.block_table,
                scheduler_metadata=tree.scheduler_metadata,
                fa_version=self.vllm_flash_attn_version,
                num_splits=tree.max_num_splits,
                return_softmax_lse=True,
            )
            prefix, prefix_lse = out[None], lse[None]
        merge_tree_attention(
            out,
            prefix,
            prefix_lse,
            query,
            key,
            value,
            tree.query_start_loc,
            tree.state.tree_slots,
            tree.state.tree.ancestors,
            self.scale,
            tree.max_query_len,
        )


def num_prefix_parts(rows_per_kv_head: int, num_kv_heads: int, num_sms: int) -> int:
    """Parts of a lone request's prefix that keep every multiprocessor busy, or 1."""
    num_tiles = num_kv_heads * cdiv(rows_per_kv_head, _TILE)
    return max(1, min(_MAX_PARTS, num_sms // num_tiles))


def part_unit(block_size: int) -> int:
    """Blocks in a tile: a part ends with one, or FlashAttention masks its rest."""
    return max(1, _TILE // block_size)


def attend_parts(
    # [num_rows, num_heads, head_size]
    query: torch.Tensor,
    # [num_blocks, block_size, num_kv_heads, head_size]
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    # [num_parts] int32
    part_lens: torch.Tensor,
    # [num_parts, width] int32
    part_blocks: torch.Tensor,
    scale: float,
    scheduler_metadata: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the same rows over each part of a prefix, in one launch.

    Returns `[num_parts, num_rows, num_heads, head_size]` and the log-sum-exp
    `[num_parts, num_heads, num_rows]` float32. FlashAttention 3 only: vLLM's wrapper
    takes no batch axis, and with one the rows need not be copied for every part.
    """
    # A part of `_vllm_fa3_C.fwd`'s signature that nothing here needs is None.
    out, lse, _, _ = torch.ops._vllm_fa3_C.fwd(
        query.expand(part_lens.shape[0], *query.shape),
        key_cache,
        value_cache,
        *(None,) * 8,
        part_lens,
        None,
        part_blocks.shape[1] * key_cache.shape[1],
        part_blocks,
        *(None,) * 8,
        scale,
        False,
        -1,
        -1,
        0.0,
        True,
        scheduler_metadata,
        1,
        None,
        0,
        None,
        1,
        0,
        None,
    )
    return out, lse
