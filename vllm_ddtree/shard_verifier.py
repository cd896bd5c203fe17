# SPDX-License-Identifier: Apache-2.0
"""Verification without gathering the target's logits across ranks.

A tree has several times a chain's rows, and vLLM gathers `[rows, vocabulary]` logits
in every step. Greedy choices and Gumbel draws can be reduced instead (`shard_sampler`),
which is exact; requests that need whole rows still get theirs, in the same batch.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import InputBatch, get_num_sampled_and_rejected
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from vllm_ddtree.ops.walk import walk_tree
from vllm_ddtree.shard_sampler import sample_shards
from vllm_ddtree.state import WalkResult
from vllm_ddtree.verifier import TreeVerifier
from vllm_ddtree.vocab_shard import VocabShard


class ShardVerifier(TreeVerifier):
    """A tree verifier that takes logits of one vocabulary shard where it can."""

    def __init__(self, *args: Any, target_model: Any) -> None:
        super().__init__(*args)
        self.shard = VocabShard(target_model)
        self._keeps_shards = False
        compute_logits = target_model.compute_logits

        def compute_logits_or_shard(hidden_states: torch.Tensor) -> torch.Tensor:
            if self._keeps_shards:
                return self.shard.compute(hidden_states)
            return compute_logits(hidden_states)

        target_model.compute_logits = compute_logits_or_shard

    def prepare(self, input_batch: InputBatch) -> None:
        """Decide whether this step's logits stay sharded; before they are computed."""
        self._keeps_shards = (
            input_batch.num_draft_tokens > 0
            and not input_batch.has_structured_output_reqs
            and not bool(self._needs_rows(input_batch).all())
        )

    def _needs_rows(self, input_batch: InputBatch) -> np.ndarray:
        """`[num_reqs]` bool: requests whose sampling reads whole rows."""
        return self.state.needs_rows[input_batch.idx_mapping_np]

    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: InputBatch,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ) -> SamplerOutput:
        if not self._keeps_shards:
            return super().__call__(logits, input_batch, draft_logits, invalid_drafts)
        self._keeps_shards = False
        output, path = self._verify_shards(logits, input_batch)
        needs_rows = self._needs_rows(input_batch)
        if needs_rows.any():
            output = self._verify_rows(logits, input_batch, needs_rows, output, path)
        assert output.num_sampled is not None
        self.state.walk = WalkResult(path, output.num_sampled)
        return output

    def _verify_shards(
        self, logits: torch.Tensor, input_batch: InputBatch
    ) -> tuple[SamplerOutput, torch.Tensor]:
        """All requests as if none needed whole rows; returns the paths too."""
        states = self.sampler.sampling_states
        tokens = sample_shards(
            logits[:, : self.shard.size],
            input_batch.expanded_idx_mapping,
            states.temperature.gpu,
            states.seeds.gpu,
            input_batch.positions[input_batch.logits_indices],
            self.shard.start,
            self.shard.tp_size,
        )
        path, sampled, num_sampled = walk_tree(
            self.state.tree,
            self.state.tree_slots[: input_batch.num_reqs],
            tokens,
            input_batch.cu_num_logits,
            self.state.max_depth,
        )
        self.state.stop_tokens.cut(path, sampled, num_sampled, input_batch.idx_mapping)
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            num_sampled,
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            self.sampler.req_states.prefill_len.gpu,
        )
        output = SamplerOutput(
            sampled_token_ids=sampled,
            logprobs_tensors=None,
            num_nans=None,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )
        return output, path

    def _verify_rows(
        self,
        logits: torch.Tensor,
        input_batch: InputBatch,
        # [num_reqs] bool
        needs_rows: np.ndarray,
        output: SamplerOutput,
        # [num_reqs, max_depth], changed in place
        path: torch.Tensor,
    ) -> SamplerOutput:
        """Verify the requests that need whole rows again, with theirs gathered."""
        part, rows, reqs = _select_requests(input_batch, needs_rows, logits.device)
        whole = self.verify(
            self.shard.gather(logits[rows]), part, self.state.tree_slots[reqs]
        )
        assert self.state.walk is not None
        path[reqs] = self.state.walk.path
        for name in ("sampled_token_ids", "num_sampled", "num_rejected"):
            getattr(output, name)[reqs] = getattr(whole, name)
        logprobs = _spread_logprobs(whole.logprobs_tensors, needs_rows)
        return replace(output, logprobs_tensors=logprobs)


def _select_requests(
    input_batch: InputBatch, chosen: np.ndarray, device: torch.device
) -> tuple[InputBatch, torch.Tensor, torch.Tensor]:
    """The batch of some requests, their logits rows, and their batch indices."""
    cu_num_logits_np = input_batch.cu_num_logits_np
    (reqs_np,) = np.nonzero(chosen)
    num_logits = np.diff(cu_num_logits_np)
    rows_np = np.flatnonzero(np.repeat(chosen, num_logits))
    cu_np = np.concatenate([[0], num_logits[reqs_np].cumsum()]).astype(np.int32)
    rows = async_tensor_h2d(rows_np, device=device)
    reqs = async_tensor_h2d(reqs_np, device=device)
    part = replace(
        input_batch,
        num_reqs=len(reqs_np),
        idx_mapping=input_batch.idx_mapping[reqs],
        idx_mapping_np=input_batch.idx_mapping_np[reqs_np],
        expanded_idx_mapping=input_batch.expanded_idx_mapping[rows],
        expanded_local_pos=input_batch.expanded_local_pos[rows],
        seq_lens=input_batch.seq_lens[reqs],
        seq_lens_cpu_upper_bound=input_batch.seq_lens_cpu_upper_bound[reqs_np],
        logits_indices=input_batch.logits_indices[rows],
        cu_num_logits=async_tensor_h2d(cu_np, device=device),
        cu_num_logits_np=cu_np,
    )
    return part, rows, reqs


def _spread_logprobs(
    logprobs: LogprobsTensors | None, chosen: np.ndarray
) -> LogprobsTensors | None:
    """Give the other requests of the batch no rows of logprobs."""
    if logprobs is None:
        return None
    assert logprobs.cu_num_generated_tokens is not None
    counts: np.ndarray = np.zeros(len(chosen), dtype=np.int64)
    counts[chosen] = np.diff(np.asarray(logprobs.cu_num_generated_tokens))
    return logprobs._replace(cu_num_generated_tokens=[0, *counts.cumsum().tolist()])
