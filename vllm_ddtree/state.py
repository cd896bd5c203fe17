# SPDX-License-Identifier: Apache-2.0
"""The state that drafting, verification and commit of one engine share."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor

from vllm_ddtree.metrics import ChainRequests
from vllm_ddtree.ops.path_tokens import gather_path_tokens
from vllm_ddtree.stop_tokens import StopTokens
from vllm_ddtree.tree import MAX_BUDGET, TreeBatch


@dataclass
class WalkResult:
    """The accepted path of every request of a step."""

    # [num_reqs, max_depth] int32, accepted rows, padding -1
    path: torch.Tensor
    # [num_reqs] int32, accepted rows and the bonus token; 0 while prefilling
    num_sampled: torch.Tensor


@dataclass
class VerifyRows:
    """The rows of one verify call, or of one chunk of it."""

    state: "TreeState"
    # [num_reqs]
    slots: torch.Tensor
    # [num_reqs + 1]
    cu_num_logits: torch.Tensor
    num_logits: int

    @cached_property
    def paths(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`gather_path_tokens` of the rows; only requests that need it cause it."""
        return gather_path_tokens(
            self.state.tree,
            self.slots,
            self.cu_num_logits,
            self.num_logits,
            self.state.max_depth,
        )


class TreeState:
    """Trees by request slot, and what the target's forward must know about them."""

    def __init__(
        self, max_num_reqs: int, budget: int, max_depth: int, device: torch.device
    ) -> None:
        self.max_depth = max_depth
        self.tree = TreeBatch.allocate(max_num_reqs, budget, device)
        # [max_num_reqs] int32: batch row -> slot of the tree in its query rows; -1
        # for a prefill, a row without drafts and graph padding, which all are causal.
        # Read by captured graphs, rewritten every step.
        self.tree_slots = torch.full(
            (max_num_reqs,), -1, dtype=torch.int32, device=device
        )
        # [2, max_num_reqs] by slot; graphs read the device's copy, since vLLM's buffers
        # in host memory take turns. Highest rank of a node, 1 makes the tree a chain,
        # and the length at which the request ends at the latest.
        self._limits = UvaBackedTensor((2, max_num_reqs), dtype=torch.int32)
        self.limits = torch.zeros((2, max_num_reqs), dtype=torch.int32, device=device)
        self.stop_tokens = StopTokens(max_num_reqs, device)
        # [max_num_reqs] by slot: sampling needs whole rows of logits.
        self.needs_rows: np.ndarray = np.zeros(max_num_reqs, dtype=bool)
        self.has_custom_processors = False
        self.chain_requests = ChainRequests()
        self.walk: WalkResult | None = None

    def add_request(
        self, req_state_idx: int, params: SamplingParams | None, max_seq_len: int
    ) -> None:
        """Give a slot to a new request; its tree is a bare root until it drafts."""
        self.stop_tokens.add_request(req_state_idx, params)
        reason = None
        if params is not None:
            reason = chain_reason(params, self.has_custom_processors)
        if reason is not None:
            self.chain_requests.add(reason)
        max_rank = MAX_BUDGET if reason is None else 1
        self._limits.np[:, req_state_idx] = max_rank, max_seq_len
        self.needs_rows[req_state_idx] = reason is not None or (
            params is not None and needs_whole_rows(params)
        )

    def apply_staged_writes(self) -> None:
        self.limits.copy_(self._limits.copy_to_uva(), non_blocking=True)
        self.stop_tokens.apply_staged_writes()


def needs_whole_rows(params: SamplingParams) -> bool:
    """Whether more than an argmax of logits, temperature and noise is asked for."""
    truncates = params.temperature > 0 and (
        params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
    )
    penalizes = (
        params.repetition_penalty != 1.0
        or params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
    )
    edits = params.logit_bias or params.allowed_token_ids or params.bad_words_token_ids
    return bool(
        truncates
        or penalizes
        or edits
        or params.min_tokens > 0
        or params.thinking_token_budget is not None
        or params.logprobs is not None
        or params.logprob_token_ids
    )


def chain_reason(params: SamplingParams, has_custom_processors: bool) -> str | None:
    """Why a request's drafts must form a chain, or None where they may branch.

    A grammar and a custom logits processor make a row's distribution depend on the
    rows above it, as if those were the drafts before it.
    """
    if params.structured_outputs is not None:
        return "structured_outputs"
    if has_custom_processors:
        return "custom_logits_processors"
    return None
