# SPDX-License-Identifier: Apache-2.0
"""Reference of `ops.thinking_budget`."""

import torch

FORCED_LOGIT = 1.0e9
"""What vLLM writes for a token that must come next."""


def force_reasoning_end(
    # [num_logits, vocab_size] float32, changed in place
    logits: torch.Tensor,
    # [num_logits, max_depth] int64, padding -1
    path_tokens: torch.Tensor,
    # [num_logits] int32
    row_depths: torch.Tensor,
    # [num_logits]
    expanded_idx_mapping: torch.Tensor,
    # [max_num_reqs] int32, negative for no budget
    budgets: torch.Tensor,
    # [max_num_reqs, max_model_len] int32, prompt and committed output
    all_token_ids: torch.Tensor,
    # [max_num_reqs] int32, the root's token included
    total_len: torch.Tensor,
    # [max_num_reqs] int32, start of the last marker in the committed text, or -1
    last_start: torch.Tensor,
    last_end: torch.Tensor,
    # [any length] int32, each
    start_ids: torch.Tensor,
    natural_end_ids: torch.Tensor,
    end_ids: torch.Tensor,
) -> None:
    """Force the end sequence at every row whose reasoning is as long as its budget.

    A row reasons iff the last start marker of its history comes after the last
    natural end marker. Its reasoning began after the start marker; once it holds
    `budget` tokens, the token of the end sequence that follows the longest begun
    part of it gets a logit above all others.
    """
    start_marker, natural_end = start_ids.tolist(), natural_end_ids.tolist()
    end_marker = end_ids.tolist()
    for row, req_state_idx in enumerate(expanded_idx_mapping.tolist()):
        budget = int(budgets[req_state_idx])
        if budget < 0:
            continue
        num_committed = int(total_len[req_state_idx])
        history = all_token_ids[req_state_idx, :num_committed].tolist()
        history += path_tokens[row, : int(row_depths[row])].tolist()
        start = _last_marker(history, start_marker, num_committed)
        start = max(start, int(last_start[req_state_idx]))
        end = _last_marker(history, natural_end, num_committed)
        end = max(end, int(last_end[req_state_idx]))
        num_reasoning = len(history) - (start + len(start_marker))
        if start < 0 or start <= end or num_reasoning < budget:
            continue
        begun = max(
            length
            for length in range(len(end_marker))
            if length <= len(history)
            and history[len(history) - length :] == end_marker[:length]
        )
        logits[row, end_marker[begun]] = FORCED_LOGIT


def _last_marker(history: list[int], marker: list[int], num_committed: int) -> int:
    """Where the last marker that ends in the path starts, or -1."""
    first = max(num_committed - len(marker) + 1, 0)
    for begin in range(len(history) - len(marker), first - 1, -1):
        if history[begin : begin + len(marker)] == marker:
            return begin
    return -1
