# SPDX-License-Identifier: Apache-2.0
"""The drafter's most probable tokens, without gathering its logits across ranks."""

import torch
from torch import nn
from vllm.distributed import tensor_model_parallel_all_gather

from vllm_ddtree.ops.top_k import local_top_k, merge_top_k
from vllm_ddtree.vocab_shard import VocabShard


class DraftHead:
    """Top-k of the drafter's distributions; identical on every rank.

    The language-model head is sharded by vocabulary (and often the target's own).
    Each rank takes the top k and the log-sum-exp of its shard, and one all-gather of
    2 k + 1 numbers a row replaces that of the logits.
    """

    def __init__(self, model: nn.Module) -> None:
        self.shard = VocabShard(model)
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
        k = min(k, self.shard.vocab_size)
        logits = self.shard.compute(hidden_states)[:, : self.shard.size]
        if temperature is not None:
            scale = torch.where(temperature > 0, temperature, 1.0)
            logits = logits.float() / scale[:, None]
        packed = local_top_k(logits, k, self.shard.start)
        if self.shard.tp_size > 1:
            packed = tensor_model_parallel_all_gather(packed, dim=-1)
        shards = packed.view(packed.shape[0], self.shard.tp_size, -1)
        return merge_top_k(shards, k, self.token_map)
