# SPDX-License-Identifier: Apache-2.0
"""vLLM's history-dependent logits processing, for rows of a tree.

For a vLLM without `DraftPaths`; `node_logits` is for one that has them.

vLLM takes the drafts before a row to be the rows above it, which holds for a chain.
Here they are the row's path. All state of the requests stays vLLM's; while no tree is
being verified the processors are vLLM's own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.logits_processor.interface import (
    LogitsContext,
    LogitsProcessor,
)
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.thinking_budget import (
    ThinkingBudgetState,
    apply_thinking_budget,
)

from vllm_ddtree.ops.bad_words import mask_bad_words
from vllm_ddtree.ops.penalties import penalize_path
from vllm_ddtree.ops.thinking_budget import force_reasoning_end
from vllm_ddtree.state import VerifyRows


class CurrentRows:
    """The rows that the sampler is processing for the verifier, if any."""

    def __init__(self) -> None:
        self.rows: VerifyRows | None = None

    @contextmanager
    def being(self, rows: VerifyRows) -> Iterator[None]:
        self.rows = rows
        try:
            yield
        finally:
            self.rows = None


class PathPenalties(LogitsProcessor):
    """Repetition, frequency and presence penalties over output and path."""

    def __init__(self, inner: PenaltiesState, current: CurrentRows) -> None:
        self.inner = inner
        self.current = current

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        return self.inner.add_request(req_idx, sampling_params)

    def apply_staged_writes(self) -> None:
        self.inner.apply_staged_writes()

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        state, rows = self.inner, self.current.rows
        if rows is None or not np.any(state.use_penalty[ctx.idx_mapping_np]):
            return state.apply(logits, ctx)
        path_tokens, row_depths = rows.paths
        raw = logits.gather(1, path_tokens.clamp(min=0))
        # As if every row were a root: the committed tokens only.
        roots = torch.zeros_like(ctx.expanded_local_pos)
        logits = state.apply(logits, replace(ctx, expanded_local_pos=roots))
        penalize_path(
            logits,
            raw,
            path_tokens,
            row_depths,
            ctx.expanded_idx_mapping,
            state.repetition_penalty.gpu,
            state.frequency_penalty.gpu,
            state.presence_penalty.gpu,
            state.prompt_bin_mask,
            state.output_bin_counts,
        )
        return logits


class PathBadWords(LogitsProcessor):
    """Bad words that may begin in the output or on the path."""

    def __init__(self, inner: BadWordsState, current: CurrentRows) -> None:
        self.inner = inner
        self.current = current

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        return self.inner.add_request(req_idx, sampling_params)

    def apply_staged_writes(self) -> None:
        self.inner.apply_staged_writes()

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        state, rows = self.inner, self.current.rows
        if rows is None:
            return state.apply(logits, ctx)
        max_num_words = int(state.num_bad_words.np[ctx.idx_mapping_np].max())
        if max_num_words > 0:
            mask_bad_words(
                logits,
                *rows.paths,
                ctx.expanded_idx_mapping,
                state.bad_word_token_ids.gpu,
                state.bad_word_offsets.gpu,
                state.num_bad_words.gpu,
                state.req_states.all_token_ids.gpu,
                state.req_states.prompt_len.gpu,
                state.req_states.total_len.gpu,
                max_num_words,
            )
        return logits


class PathThinkingBudget:
    """Thinking budgets that count the reasoning tokens of the path."""

    def __init__(self, inner: ThinkingBudgetState, current: CurrentRows) -> None:
        self.inner = inner
        self.current = current

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        return self.inner.add_request(req_idx, sampling_params)

    def apply_staged_writes(self) -> None:
        self.inner.apply_staged_writes()

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> None:
        state, rows = self.inner, self.current.rows
        if rows is None:
            state.apply(logits, ctx)
            return
        if not state.enabled or not np.any(
            state.use_thinking_budget[ctx.idx_mapping_np]
        ):
            return
        budgets = state.thinking_token_budget.gpu
        history = (state.req_states.all_token_ids.gpu, state.req_states.total_len.gpu)
        markers = (
            state.reasoning_start_token_ids,
            state.natural_reasoning_end_token_ids,
            state.reasoning_end_token_ids,
        )
        # Without rows vLLM's function brings its record of the committed markers up
        # to date and does nothing else.
        apply_thinking_budget(
            logits[:0],
            ctx.idx_mapping,
            ctx.expanded_idx_mapping,
            budgets,
            *history,
            ctx.input_ids,
            ctx.expanded_local_pos,
            state.cached_last_start,
            state.cached_last_end,
            state.cached_scan_pos,
            *markers,
        )
        force_reasoning_end(
            logits,
            *rows.paths,
            ctx.expanded_idx_mapping,
            budgets,
            *history,
            state.cached_last_start,
            state.cached_last_end,
            *markers,
        )


class NodeLogits:
    """A sampler whose logits processing follows each row's path.

    The processors of the sampler that look at drafts are replaced. Processors that
    are not vLLM's own still take every request's drafts to be a chain.
    """

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.current = CurrentRows()
        self.has_custom_processors = False
        processors: list[LogitsProcessor] = []
        for processor in sampler.logits_processors:
            if isinstance(processor, PenaltiesState):
                processor = PathPenalties(processor, self.current)
            elif isinstance(processor, BadWordsState):
                processor = PathBadWords(processor, self.current)
            elif not isinstance(processor, LogitBiasState):
                self.has_custom_processors = True
            processors.append(processor)
        sampler.logits_processors = processors
        thinking_budget: Any = PathThinkingBudget(
            sampler.thinking_budget_state, self.current
        )
        sampler.thinking_budget_state = thinking_budget

    def process(
        self, rows: VerifyRows, logits: torch.Tensor, *args: Any
    ) -> torch.Tensor:
        """`Sampler.apply_sampling_params(logits, *args)` for rows of trees."""
        with self.current.being(rows):
            return self.sampler.apply_sampling_params(logits, *args)
