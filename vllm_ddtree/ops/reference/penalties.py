# SPDX-License-Identifier: Apache-2.0
"""Reference of `ops.penalties`."""

import torch


def penalize_path(
    # [num_logits, vocab_size] float32, penalized for the committed tokens; changed
    # in place at the tokens of each row's path
    logits: torch.Tensor,
    # [num_logits, max_depth] float32, the path tokens' logits before penalties
    raw: torch.Tensor,
    # [num_logits, max_depth] int64, padding -1
    path_tokens: torch.Tensor,
    # [num_logits] int32
    row_depths: torch.Tensor,
    # [num_logits]
    expanded_idx_mapping: torch.Tensor,
    # [max_num_reqs] float32, each
    repetition_penalty: torch.Tensor,
    frequency_penalty: torch.Tensor,
    presence_penalty: torch.Tensor,
    # [max_num_reqs, cdiv(vocab_size, 32)] int32, bits of the tokens in the prompt
    prompt_bin_mask: torch.Tensor,
    # [max_num_reqs, vocab_size] int32, committed output tokens
    output_bin_counts: torch.Tensor,
) -> None:
    """Penalize a row's path tokens as if they had been committed.

    With c the number of times x occurs in output and path,

        z = z / r if z > 0 else z * r    where x is in the prompt or c > 0
        z = z - frequency * c - presence * [c > 0]

    All operations are in float32 and in this order, so the result is bit for bit
    that of vLLM's kernel on a chain.
    """
    for row, depth in enumerate(row_depths.tolist()):
        req_state_idx = int(expanded_idx_mapping[row])
        repetition = repetition_penalty[req_state_idx]
        frequency = frequency_penalty[req_state_idx]
        presence = presence_penalty[req_state_idx]
        if depth == 0 or (repetition == 1 and frequency == 0 and presence == 0):
            continue
        tokens = path_tokens[row, :depth]
        in_path = (tokens[:, None] == tokens).sum(-1)
        counts = output_bin_counts[req_state_idx, tokens] + in_path
        is_output = counts > 0
        values = raw[row, :depth]
        if repetition != 1:
            words = prompt_bin_mask[req_state_idx, tokens // 32]
            is_prompt = (words >> (tokens % 32)) & 1 == 1
            scale = torch.where(is_prompt | is_output, repetition, 1.0)
            values = values * torch.where(values > 0, 1.0 / scale, scale)
        values = values - frequency * counts.float()
        values = values - presence * is_output.float()
        logits[row, tokens] = values
