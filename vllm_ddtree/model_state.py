# SPDX-License-Identifier: Apache-2.0
"""Where the runner asks how to prepare, verify and commit a batch of trees."""

from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.config.compilation import CUDAGraphMode
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.utils import AttentionGroup

from vllm_ddtree.attention import TreeAttentionBackend
from vllm_ddtree.kv_commit import KVCommitter, KVPlanes
from vllm_ddtree.lora import LogitsAdapters
from vllm_ddtree.ops.verify_inputs import prepare_verify_inputs
from vllm_ddtree.shard_verifier import ShardVerifier
from vllm_ddtree.state import TreeState
from vllm_ddtree.verifier import TreeVerifier
from vllm_ddtree.vocab_shard import VocabShard

if TYPE_CHECKING:
    from vllm_ddtree.speculator import DDTreeSpeculator


class TreeModelState(DefaultModelState):
    """vLLM's model state for a target that verifies trees."""

    speculator: ClassVar["DDTreeSpeculator"]

    @property
    def tree_state(self) -> TreeState:
        return self.speculator.state

    @cached_property
    def logits_adapters(self) -> LogitsAdapters:
        return LogitsAdapters(self.model)

    def custom_sampler(self, sampler: Any) -> tuple[Any, Any]:
        spec_config = self.vllm_config.speculative_config
        args = (sampler, spec_config, self.device, self.tree_state)
        self.shard_verifier = None
        if self._can_keep_shards(sampler):
            self.shard_verifier = ShardVerifier(*args, target_model=self.model)
            return sampler, self.shard_verifier
        return sampler, TreeVerifier(*args)

    def _can_keep_shards(self, sampler: Any) -> bool:
        """Whether sampling per vocabulary shard is possible, exact and worth it."""
        return (
            self.vllm_config.parallel_config.tensor_parallel_size > 1
            and self.vllm_config.speculative_config.ddtree_acceptance == "rejection"
            and VocabShard.fits(self.model)
            and not sampler.compute_nans
            and not sampler.use_fp64_gumbel
        )

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        super().add_request(req_index, new_req_data)
        params = new_req_data.sampling_params
        max_seq_len = self.max_model_len
        if params is not None and params.max_tokens is not None:
            max_seq_len = min(max_seq_len, new_req_data.prompt_len + params.max_tokens)
        self.tree_state.add_request(req_index, params, max_seq_len)

    def apply_staged_writes(self) -> None:
        super().apply_staged_writes()
        self.tree_state.apply_staged_writes()

    def initialize_kv_cache(
        self, kv_cache_config: KVCacheConfig, block_tables: BlockTables
    ) -> None:
        super().initialize_kv_cache(kv_cache_config, block_tables)
        layers = get_layers_from_vllm_config(self.vllm_config, AttentionLayerBase)
        planes = []
        for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
            kv_caches = [
                layers[name].kv_cache
                for name in group.layer_names
                if layers[name].get_attn_backend() is TreeAttentionBackend
            ]
            if kv_caches:
                planes.append(KVPlanes.of_layers(group_id, kv_caches))
        self.speculator.committer = KVCommitter(planes, block_tables)

    def preprocess_state(
        self,
        input_batch: InputBatch,
        block_tables: tuple[torch.Tensor, ...],
        kv_cache_config: KVCacheConfig,
        num_computed_tokens: torch.Tensor,
    ) -> None:
        super().preprocess_state(
            input_batch, block_tables, kv_cache_config, num_computed_tokens
        )
        if self.shard_verifier is not None:
            self.shard_verifier.prepare(input_batch)
        # Slot mappings were computed before: KV stays in storage order.
        state = self.tree_state
        prepare_verify_inputs(
            state.tree,
            state.tree_slots,
            input_batch.positions,
            input_batch.idx_mapping,
            input_batch.query_start_loc,
            input_batch.cu_num_logits,
            self.speculator.req_states.prefill_len.gpu,
        )

    def prepare_attn(
        self,
        input_batch: InputBatch,
        cudagraph_mode: CUDAGraphMode,
        block_tables: tuple[torch.Tensor, ...],
        slot_mappings: torch.Tensor,
        attn_groups: list[list[AttentionGroup]],
        kv_cache_config: KVCacheConfig,
        for_capture: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        self.logits_adapters.choose_for_rows(input_batch)
        # Requests with drafts lead the batch; a FULL graph holds nothing else, and is
        # captured without saying its mode.
        num_tree_reqs = 0
        if cudagraph_mode == CUDAGraphMode.FULL or for_capture:
            num_tree_reqs = input_batch.num_reqs_after_padding
        elif input_batch.num_draft_tokens_per_req is not None:
            num_tree_reqs = int((input_batch.num_draft_tokens_per_req > 0).sum())
        for group in (group for groups in attn_groups for group in groups):
            if group.backend is TreeAttentionBackend:
                for builder in group.metadata_builders:
                    builder.tree_state = self.tree_state
                    builder.num_tree_reqs = num_tree_reqs
        return super().prepare_attn(
            input_batch,
            cudagraph_mode,
            block_tables,
            slot_mappings,
            attn_groups,
            kv_cache_config,
            for_capture=for_capture,
            **kwargs,
        )
