# SPDX-License-Identifier: Apache-2.0
"""The drafter's most probable tokens, without gathering its logits across ranks."""

import torch
from torch import nn
from vllm.distributed import tensor_model_parallel_all_gather

from vllm_ddtree.ops.top_k import local_top_k, merge_top_k


class DraftHead:
    """Top-k of the drafter's distributions; identical on every rank.

    The language-model head is sharded by vocabulary (and often the target's own).
    Each rank takes the top k and the log-sum-exp of its shard, and one all-gather of
    2 k + 1 numbers a row replaces that of the logits.
    """

    def __init__(self, model: nn.Module) -> None:
        self.lm_head = model.lm_head
        self.logits_processor = model.logits_processor
        shard = self.lm_head.shard_indices
        self.vocab_start = shard.org_vocab_start_index
        self.shard_size = shard.num_org_elements
        self.vocab_size = self.lm_head.org_vocab_size
        # [draft vocabulary] draft token -> target token, or None where they agree
        self.token_map: torch.Tensor | None = None
        offsets = getattr(model, "draft_id_to_target_id", None)
        if offsets is not None:
            base = torch.arange(offsets.shape[0], device=offsets.device)
            self.token_map = base + offsets

    def top_k(
        self,
        # [num_rows, hidden_size]
        hidden_states: torch.Tensor,
        # [num_rows] applied before normalising, 0 for none; None is none at all
        temperature: torch.Tensor | None,
        k: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns tokens `[num_rows, k]` int64 of the target's vocabulary and their
        log-probabilities `[num_rows, k]` float32, most probable first; fewer than k
        columns where the vocabulary has fewer tokens."""
        k = min(k, self.vocab_size)
        logits = self.logits_processor(self.lm_head, hidden_states, skip_gather=True)
        # The shard's padding comes last.
        logits = logits[:, : self.shard_size]
        if temperature is not None:
            scale = torch.where(temperature > 0, temperature, 1.0)
            logits = logits.float() / scale[:, None]
        packed = local_top_k(logits, k, self.vocab_start)
        tp_size = self.lm_head.tp_size
        if tp_size > 1:
            packed = tensor_model_parallel_all_gather(packed, dim=-1)
        shards = packed.view(packed.shape[0], tp_size, -1)
        return merge_top_k(shards, k, self.token_map)
