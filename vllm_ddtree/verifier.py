# SPDX-License-Identifier: Apache-2.0
"""Node logits to accepted path: the tree's rejection sampler."""

import numpy as np
import torch
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import InputBatch, get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode import rejection_sampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from vllm_ddtree.config import DDTreeSpeculativeConfig
from vllm_ddtree.hooks.sampler import NodeLogits
from vllm_ddtree.ops.commit import path_index
from vllm_ddtree.ops.typical import truncate_typical, walk_typical
from vllm_ddtree.ops.walk import walk_tree
from vllm_ddtree.state import TreeState, VerifyRows, WalkResult


class TreeVerifier(RejectionSampler):
    """Samples every node from the target, then walks from the root.

    ``rejection`` is lossless at every temperature: each emitted token is a draw from
    the target's processed distribution at its node, with the noise that plain
    decoding would use at that position. For a tree fixed before sampling no lossless
    rule accepts more in expectation, which is the sum of the target's probabilities
    of the nodes (arXiv 2604.12989).

    ``typical`` is lossy: it truncates each node's distribution to its typical tokens
    (arXiv 2401.10774, section 3.3.1) and accepts the deepest path inside.
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
        self.spec_config = spec_config
        self._node_logits = NodeLogits(sampler)
        state.has_custom_processors = self._node_logits.has_custom_processors
        # Of the call in progress: walks of the chunks so far, the requests of the
        # chunk, how many nodes may be accepted, columns of logprobs.
        self._tree_slots = state.tree_slots
        self._walks: list[WalkResult] = []
        self._idx_mapping: torch.Tensor | None = None
        self._max_nodes: torch.Tensor | None = None
        self._logprobs_dims: tuple[int, int] | None = None

    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: InputBatch,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ) -> SamplerOutput:
        return self.verify(logits, input_batch, self.state.tree_slots, invalid_drafts)

    def verify(
        self,
        # [num_logits, vocab_size]
        logits: torch.Tensor,
        input_batch: InputBatch,
        # [>= num_reqs] slot of each request's tree, or -1
        tree_slots: torch.Tensor,
        # [num_logits] bool
        invalid_drafts: torch.Tensor | None = None,
    ) -> SamplerOutput:
        """Sample and walk the trees of a batch; leaves the walk in the state."""
        sampler = self.sampler
        self._tree_slots = tree_slots
        num_nans = get_num_nans(logits) if sampler.compute_nans else None
        rows = input_batch.logits_indices
        self._walks.clear()
        self._max_nodes = None
        if invalid_drafts is not None:
            self._max_nodes = _num_valid_drafts(
                invalid_drafts, input_batch.cu_num_logits
            )
        idx_mapping_np = input_batch.idx_mapping_np
        self._logprobs_dims = sampler.get_logprobs_dims(idx_mapping_np)
        sampled, num_sampled, logprobs, _ = self._verify_in_chunks(
            logits,
            input_batch,
            None,
            input_batch.input_ids[rows],
            input_batch.positions[rows],
            rejection_sampler.get_max_chunk_logits(logits.shape[1]),
            sampler.sampling_states.max_num_logprobs(idx_mapping_np),
        )
        if logprobs is not None:
            # vLLM joins chunks by rows; ours keep no more than a path's length.
            num_kept = self._num_logprob_rows(input_batch.cu_num_logits_np)
            logprobs = logprobs._replace(
                cu_num_generated_tokens=[0, *num_kept.cumsum().tolist()]
            )
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            num_sampled,
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            sampler.req_states.prefill_len.gpu,
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
        # Chunks come in batch order.
        begin = sum(walk.path.shape[0] for walk in self._walks)
        reqs = slice(begin, begin + idx_mapping.shape[0])
        slots = self._tree_slots[reqs]
        rows = VerifyRows(self.state, slots, cu_num_logits, logits.shape[0])
        processed = self._node_logits.process(
            rows,
            logits,
            expanded_idx_mapping,
            idx_mapping,
            idx_mapping_np,
            pos,
            draft_sampled,
            expanded_local_pos,
            seq_lens_upper_bound_np,
        )
        max_nodes = None if self._max_nodes is None else self._max_nodes[reqs]
        limits = (cu_num_logits, self.state.max_depth, max_nodes)
        if self.spec_config.ddtree_acceptance == "typical":
            is_shared = processed is logits or self._wants_processed_logprobs()
            truncated, log_z = self._truncate(
                processed, expanded_idx_mapping, is_shared
            )
            tokens = self._sample(truncated, expanded_idx_mapping, pos)
            path, sampled, num_sampled = walk_typical(
                self.state.tree, slots, truncated, log_z, tokens, *limits
            )
        else:
            tokens = self._sample(processed, expanded_idx_mapping, pos)
            path, sampled, num_sampled = walk_tree(
                self.state.tree, slots, tokens, *limits
            )
        self.state.stop_tokens.cut(path, sampled, num_sampled, idx_mapping)
        self._walks.append(WalkResult(path, num_sampled))
        self._idx_mapping = idx_mapping
        return processed, sampled, num_sampled

    def _sample(
        self,
        logits: torch.Tensor,
        expanded_idx_mapping: torch.Tensor,
        pos: torch.Tensor,
    ) -> torch.Tensor:
        """One draw of every row, with the noise of plain decoding at its position."""
        states = self.sampler.sampling_states
        return gumbel_sample(
            logits,
            expanded_idx_mapping,
            states.temperature.gpu,
            states.seeds.gpu,
            pos,
            apply_temperature=False,
            is_drafting=False,
            use_fp64=self.sampler.use_fp64_gumbel,
        )

    def _truncate(
        self,
        processed: torch.Tensor,
        expanded_idx_mapping: torch.Tensor,
        is_shared: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Truncated float32 logits, a copy where others read them, and their log_z."""
        if is_shared or processed.dtype != torch.float32:
            copy = torch.empty_like(processed, dtype=torch.float32)
            processed = copy.copy_(processed)
        temperature = self.sampler.sampling_states.temperature.gpu
        log_z = truncate_typical(
            processed,
            self.spec_config.ddtree_typical_epsilon,
            self.spec_config.ddtree_typical_delta,
            temperature[expanded_idx_mapping] == 0,
        )
        return processed, log_z

    def _wants_processed_logprobs(self) -> bool:
        mode = self.sampler.logprobs_mode
        return self._logprobs_dims is not None and mode in PROCESSED_LOGPROBS_MODES

    def _num_logprob_rows(self, cu_num_logits_np: np.ndarray) -> np.ndarray:
        """Rows of each request that can hold a sampled token."""
        return np.minimum(np.diff(cu_num_logits_np), self.state.max_depth + 1)

    def _get_logprobs_tensors(
        self,
        sampled: torch.Tensor,
        num_sampled: torch.Tensor,
        logits: torch.Tensor,
        cu_num_logits: torch.Tensor,
        cu_num_logits_np: np.ndarray,
        max_num_logprobs: int,
    ) -> LogprobsTensors | None:
        """Logprobs of the path only: row j of a request is its j-th sampled token's."""
        if self._logprobs_dims is None:
            return None
        num_logprobs, max_token_ids = self._logprobs_dims
        num_kept = self._num_logprob_rows(cu_num_logits_np)
        reqs: np.ndarray = np.repeat(np.arange(len(num_kept)), num_kept)
        begin: np.ndarray = np.repeat(num_kept.cumsum() - num_kept, num_kept)
        columns = np.arange(len(reqs)) - begin
        layout = np.stack(
            [cu_num_logits_np[reqs] + columns, reqs * sampled.shape[1] + columns, reqs]
        ).astype(np.int64)
        rows, places, req_idx = async_tensor_h2d(layout, device=logits.device)
        index = path_index(
            self._walks[-1].path,
            num_sampled,
            cu_num_logits,
            cu_num_logits,
            logits.shape[0],
        )
        assert self._idx_mapping is not None
        return compute_topk_scores(
            logits[index[rows]],
            num_logprobs,
            sampled.flatten()[places].clamp(min=0),
            [0, *num_kept.cumsum().tolist()],
            logprob_token_ids_state=self.sampler.logprob_token_ids_state,
            expanded_idx_mapping=self._idx_mapping[req_idx],
            max_per_req_token_ids=max_token_ids,
            logits_mode=self.sampler.logprobs_mode
            in ("raw_logits", "processed_logits"),
        )


def _num_valid_drafts(
    # [num_logits] bool, in each request the last rows
    invalid_drafts: torch.Tensor,
    # [num_reqs + 1]
    cu_num_logits: torch.Tensor,
) -> torch.Tensor:
    """Drafts of each request before the first that its grammar did not check."""
    num_invalid = torch.nn.functional.pad(invalid_drafts.cumsum(0), (1, 0))
    starts, ends = cu_num_logits[:-1].long(), cu_num_logits[1:].long()
    return ends - starts - 1 - (num_invalid[ends] - num_invalid[starts])
