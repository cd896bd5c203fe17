# SPDX-License-Identifier: Apache-2.0
"""Reference of `ops.bad_words`."""

import itertools

import torch


def mask_bad_words(
    # [num_logits, vocab_size] float32, changed in place
    logits: torch.Tensor,
    # [num_logits, max_depth] int64, padding -1
    path_tokens: torch.Tensor,
    # [num_logits] int32
    row_depths: torch.Tensor,
    # [num_logits]
    expanded_idx_mapping: torch.Tensor,
    # [max_num_reqs, max_total_tokens] int32, a request's words one after the other
    word_tokens: torch.Tensor,
    # [max_num_reqs, max_num_words + 1] int32, where each word begins
    word_offsets: torch.Tensor,
    # [max_num_reqs] int32
    num_words: torch.Tensor,
    # [max_num_reqs, max_model_len] int32, prompt and committed output
    all_token_ids: torch.Tensor,
    # [max_num_reqs] int32
    prompt_len: torch.Tensor,
    # [max_num_reqs] int32, the root's token included
    total_len: torch.Tensor,
    # host's largest `num_words` of the batch
    max_num_words: int,
) -> None:
    """Forbid the last token of every bad word whose beginning ends the history.

    The history of a row is the committed output and then the row's path.
    """
    num_words_np = num_words.tolist()
    for row, req_state_idx in enumerate(expanded_idx_mapping.tolist()):
        count = min(num_words_np[req_state_idx], max_num_words)
        if count == 0:
            continue
        first, last = int(prompt_len[req_state_idx]), int(total_len[req_state_idx])
        history = all_token_ids[req_state_idx, first:last].tolist()
        history += path_tokens[row, : int(row_depths[row])].tolist()
        tokens = word_tokens[req_state_idx].tolist()
        offsets = word_offsets[req_state_idx, : count + 1].tolist()
        for start, end in itertools.pairwise(offsets):
            *beginning, token = tokens[start:end]
            length = len(beginning)
            if length <= len(history) and history[len(history) - length :] == beginning:
                logits[row, token] = -torch.inf
