# SPDX-License-Identifier: Apache-2.0
"""The tokens that end each request, where a walk can see them."""

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor, UvaBackedTensor

from vllm_ddtree.ops.stop_tokens import cut_at_stop

MAX_STOP_TOKENS = 128
"""A request may have more; walks do not end at the others, only the request does."""


class StopTokens:
    """The end of sequence and the stop tokens of every request slot."""

    def __init__(self, max_num_reqs: int, device: torch.device) -> None:
        self.token_ids = StagedWriteTensor(
            (max_num_reqs, MAX_STOP_TOKENS), dtype=torch.int32, device=device
        )
        self.num_token_ids = UvaBackedTensor(max_num_reqs, dtype=torch.int32)

    def add_request(self, req_state_idx: int, params: SamplingParams | None) -> None:
        """Give a slot to a new request."""
        token_ids = stop_token_ids(params)[:MAX_STOP_TOKENS]
        self.num_token_ids.np[req_state_idx] = len(token_ids)
        self.token_ids.stage_write(req_state_idx, 0, token_ids)

    def apply_staged_writes(self) -> None:
        self.num_token_ids.copy_to_uva()
        self.token_ids.apply_write()

    def cut(
        self,
        # [num_reqs, max_depth]
        path: torch.Tensor,
        # [num_reqs, max_depth + 1]
        sampled: torch.Tensor,
        # [num_reqs]
        num_sampled: torch.Tensor,
        # [num_reqs]
        idx_mapping: torch.Tensor,
    ) -> None:
        """End the walks at their first stop token, in place.

        The engine drops what comes after it, but only once the counters of accepted
        tokens have been told.
        """
        cut_at_stop(
            path,
            sampled,
            num_sampled,
            idx_mapping,
            self.token_ids.gpu,
            self.num_token_ids.gpu,
        )


def stop_token_ids(params: SamplingParams | None) -> list[int]:
    """Tokens at which the scheduler ends a request, ascending.

    Not `SamplingParams.all_stop_token_ids`: that has the end of sequence with
    `ignore_eos` too.
    """
    if params is None:
        return []
    token_ids = set(params.stop_token_ids or ())
    if params.eos_token_id is not None:
        token_ids.add(params.eos_token_id)
    return sorted(token_ids)
