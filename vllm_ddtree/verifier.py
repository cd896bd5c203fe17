# SPDX-License-Identifier: Apache-2.0
"""Node logits to accepted path: the tree's rejection sampler."""

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import InputBatch, get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import (
    RejectionSampler,
    get_max_chunk_logits,
)

from vllm_ddtree.config import DDTreeSpeculativeConfig
from vllm_ddtree.ops.commit import path_index
from vllm_ddtree.ops.walk import walk_tree
from vllm_ddtree.state import TreeState, WalkResult


class TreeVerifier(RejectionSampler):
    """Samples every node from the target, then walks from the root.

    Lossless at every temperature: each emitted token is a draw from the target's
    processed distribution at its node, with the noise that plain decoding would use
    at that position. For a tree fixed before sampling no lossless rule accepts more
    in expectation, which is the sum of the target's probabilities of the nodes.
    """

    def __init__(
        self,
        sampler: Sampler,
        spec_config: DDTreeSpeculativeConfig,
        device: torch.device,
        state: TreeState,
    ) -> None:
        super().__init__(sampler, spec_config, device)
        self.state = state
        self._walks: list[WalkResult] = []

    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: InputBatch,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ) -> SamplerOutput:
        num_nans = get_num_nans(logits) if self.sampler.compute_nans else None
        rows = input_batch.logits_indices
        self._walks.clear()
        sampled, num_sampled, logprobs, _ = self._verify_in_chunks(
            logits,
            input_batch,
            draft_logits,
            input_batch.input_ids[rows],
            input_batch.positions[rows],
            get_max_chunk_logits(logits.shape[1]),
            self.sampler.sampling_states.max_num_logprobs(input_batch.idx_mapping_np),
        )
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            num_sampled,
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            self.sampler.req_states.prefill_len.gpu,
        )
        path = torch.cat([walk.path for walk in self._walks])
        self.state.walk = WalkResult(path, num_sampled)
        return SamplerOutput(
            sampled_token_ids=sampled,
            logprobs_tensors=logprobs,
            num_nans=num_nans,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )

    def _verify(
        self,
        logits: torch.Tensor,
        draft_logits: torch.Tensor | None,
        draft_sampled: torch.Tensor,
        pos: torch.Tensor,
        cu_num_logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        idx_mapping_np: np.ndarray,
        expanded_idx_mapping: torch.Tensor,
        expanded_local_pos: torch.Tensor,
        seq_lens_upper_bound_np: np.ndarray,
        verify_draft_sampled: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        processed_logits = self.sampler.apply_sampling_params(
            logits,
            expanded_idx_mapping,
            idx_mapping,
            idx_mapping_np,
            pos,
            draft_sampled,
            expanded_local_pos,
            seq_lens_upper_bound_np,
        )
        states = self.sampler.sampling_states
        target_tokens = gumbel_sample(
            processed_logits,
            expanded_idx_mapping,
            states.temperature.gpu,
            states.seeds.gpu,
            pos,
            apply_temperature=False,
            is_drafting=False,
            use_fp64=self.sampler.use_fp64_gumbel,
        )
        # Chunks come in batch order.
        begin = sum(walk.path.shape[0] for walk in self._walks)
        path, sampled, num_sampled = walk_tree(
            self.state.tree,
            self.state.tree_slots[begin : begin + idx_mapping.shape[0]],
            target_tokens,
            cu_num_logits,
            self.state.max_depth,
        )
        self._walks.append(WalkResult(path, num_sampled))
        return processed_logits, sampled, num_sampled

    def _get_logprobs_tensors(
        self,
        sampled: torch.Tensor,
        num_sampled: torch.Tensor,
        logits: torch.Tensor,
        cu_num_logits: torch.Tensor,
        cu_num_logits_np: np.ndarray,
        max_num_logprobs: int,
    ) -> LogprobsTensors | None:
        if max_num_logprobs >= 0:
            # Row j of a request must be that of its j-th sampled token.
            walk = self._walks[-1]
            logits = logits[
                path_index(
                    walk.path,
                    walk.num_sampled,
                    cu_num_logits,
                    cu_num_logits,
                    logits.shape[0],
                )
            ]
        return super()._get_logprobs_tensors(
            sampled,
            num_sampled,
            logits,
            cu_num_logits,
            cu_num_logits_np,
            max_num_logprobs,
        )
