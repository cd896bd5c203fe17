# SPDX-License-Identifier: Apache-2.0
"""Logits processing of a tree's rows by vLLM's own processors."""

from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.logits_processor.interface import DraftPaths
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState
from vllm.v1.worker.gpu.sample.sampler import Sampler

from vllm_ddtree.state import VerifyRows

_OWN_PROCESSORS = (LogitBiasState, PenaltiesState, BadWordsState)


class NodeLogits:
    """A sampler whose logits processing follows each row's path.

    Processors that are not vLLM's own take every request's drafts to be a chain.
    """

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.has_custom_processors = any(
            not isinstance(processor, _OWN_PROCESSORS)
            for processor in sampler.logits_processors
        )

    def process(
        self,
        rows: VerifyRows,
        logits: torch.Tensor,
        expanded_idx_mapping: torch.Tensor,
        idx_mapping: torch.Tensor,
        idx_mapping_np: np.ndarray,
        *args: Any,
    ) -> torch.Tensor:
        """`Sampler.apply_sampling_params(logits, ...)` for rows of trees."""
        paths = None
        if np.any(self.sampler.needs_logits_processing[idx_mapping_np]):
            tokens, depths = rows.paths
            paths = DraftPaths(tokens.int(), depths)
        return self.sampler.apply_sampling_params(
            logits,
            expanded_idx_mapping,
            idx_mapping,
            idx_mapping_np,
            *args,
            draft_paths=paths,
        )
