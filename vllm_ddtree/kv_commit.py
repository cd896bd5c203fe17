# SPDX-License-Identifier: Apache-2.0
"""Moves the accepted path's keys and values to where a plain decode had put them."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_ddtree.ops.commit import commit_kv
from vllm_ddtree.state import WalkResult


@dataclass(frozen=True)
class KVPlanes:
    """Rows of equal shape and strides: one per layer, or per layer and KV head."""

    kv_cache_group_id: int
    # [num_planes] int64, byte addresses
    ptrs: torch.Tensor
    block_stride: int
    slot_stride: int
    row_bytes: int

    @classmethod
    def of_layers(
        cls,
        kv_cache_group_id: int,
        # each [num_blocks, num_kv_heads, block_size, keys and values of a head]
        kv_caches: Iterable[torch.Tensor],
    ) -> "KVPlanes":
        """Planes of the layers of one KV cache group.

        Raises:
            ValueError: the layers differ in shape or strides.

        """
        caches = list(kv_caches)
        first = caches[0]
        if any(
            cache.shape != first.shape or cache.stride() != first.stride()
            for cache in caches
        ):
            raise ValueError("Layers of one KV cache group differ in their layout.")
        size = first.element_size()
        _, num_heads, _, channels = first.shape
        block_stride, head_stride, slot_stride, _ = (s * size for s in first.stride())
        row_bytes = channels * size
        ptrs = [cache.data_ptr() for cache in caches]
        if head_stride == row_bytes:
            # A token's heads are contiguous: they move as one row.
            row_bytes *= num_heads
        else:
            ptrs = [p + head * head_stride for p in ptrs for head in range(num_heads)]
        return cls(
            kv_cache_group_id,
            torch.tensor(ptrs, dtype=torch.int64, device=first.device),
            block_stride,
            slot_stride,
            row_bytes,
        )


class KVCommitter:
    """Commits a step's walk in every KV cache group of the target."""

    def __init__(self, planes: list[KVPlanes], block_tables: BlockTables) -> None:
        self.planes = planes
        self.block_tables = block_tables

    def commit(self, input_batch: InputBatch, walk: WalkResult) -> None:
        """One launch per KV cache group; nothing moves for an identity path."""
        num_reqs = input_batch.num_reqs
        num_rows = input_batch.cu_num_logits.diff()
        root_positions = (input_batch.seq_lens[:num_reqs] - num_rows).long()
        for planes in self.planes:
            group = planes.kv_cache_group_id
            commit_kv(
                planes.ptrs,
                planes.block_stride,
                planes.slot_stride,
                planes.row_bytes,
                self.block_tables.input_block_tables[group][:num_reqs],
                self.block_tables.block_sizes[group],
                root_positions,
                walk.path,
                walk.num_sampled,
            )
