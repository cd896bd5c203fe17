# SPDX-License-Identifier: Apache-2.0
"""Adapters of the target's logits: every row of a tree has its request's."""

from typing import Any

from torch import nn
from vllm.lora.layers.logits_processor import LogitsProcessorWithLoRA
from vllm.v1.worker.gpu.input_batch import InputBatch


class LogitsAdapters:
    """Which adapter each row of logits uses.

    vLLM's runner names one for each request, as if every request had one row of
    logits (`LoraState.make_lora_inputs`).
    """

    def __init__(self, target_model: nn.Module) -> None:
        layers = (
            module
            for module in target_model.modules()
            if isinstance(module, LogitsProcessorWithLoRA)
        )
        layer = next(layers, None)
        self.mapping: Any = None if layer is None else layer.punica_wrapper

    def choose_for_rows(self, input_batch: InputBatch) -> None:
        """Give every row of logits the adapter of its token.

        Call it in every step between vLLM's choice of adapters, which is skipped
        where nothing changed, and the logits. No host sync beyond the one of vLLM's
        own preparation.
        """
        mapping = self.mapping
        if mapping is None:
            return
        num_logits = input_batch.logits_indices.shape[0]
        # The buffer is as long as the largest batch of tokens.
        mapping._sampler_indices[:num_logits] = mapping.token_lora_indices[
            input_batch.logits_indices
        ]
        mapping.indices_len[1] = num_logits
        on_gpu = getattr(mapping, "prompt_mapping_meta", None)
        if on_gpu is not None:
            on_gpu.prepare_tensors(mapping.sampler_indices)
