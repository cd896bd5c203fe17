# SPDX-License-Identifier: Apache-2.0
"""A rank's part of a language-model head that is sharded by vocabulary."""

from typing import Any

import torch
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding


class VocabShard:
    """Logits of one shard, without the all-gather that vLLM does with them."""

    def __init__(self, model: Any) -> None:
        self.lm_head = model.lm_head
        self.logits_processor = model.logits_processor
        indices = self.lm_head.shard_indices
        self.start = indices.org_vocab_start_index
        self.size = indices.num_org_elements
        self.vocab_size = self.lm_head.org_vocab_size
        self.tp_size = self.lm_head.tp_size

    @staticmethod
    def fits(model: Any) -> bool:
        """Whether the model's head is a plain vocabulary-parallel one."""
        head: Any = getattr(model, "lm_head", None)
        processor: Any = getattr(model, "logits_processor", None)
        return (
            isinstance(head, VocabParallelEmbedding)
            and type(processor) is LogitsProcessor
            and not processor.logits_as_input
            and head.num_added_embeddings == 0
        )

    def compute(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`[num_rows, padded shard]`; the padding comes last."""
        return self.logits_processor(self.lm_head, hidden_states, skip_gather=True)

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits `[num_rows, vocab_size]` from those of `compute` on every rank."""
        return tensor_model_parallel_all_gather(logits)[:, : self.vocab_size]
