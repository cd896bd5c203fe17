# SPDX-License-Identifier: Apache-2.0
"""Forbidden token sequences that may begin in the output and end in a draft."""

import torch
from vllm.triton_utils import tl, triton

from vllm_ddtree.ops.reference.bad_words import mask_bad_words as reference


@triton.jit
def _mask_bad_words_kernel(
    # [num_logits, vocab_size]
    logits_ptr,
    logits_stride,
    # [num_logits, MAX_DEPTH]
    path_tokens_ptr,
    # [num_logits]
    row_depths_ptr,
    expanded_idx_mapping_ptr,
    # [max_num_reqs, max_total_tokens]
    word_tokens_ptr,
    word_tokens_stride,
    # [max_num_reqs, max_num_words + 1]
    word_offsets_ptr,
    word_offsets_stride,
    # [max_num_reqs]
    num_words_ptr,
    # [max_num_reqs, max_model_len]
    all_token_ids_ptr,
    all_token_ids_stride,
    # [max_num_reqs]
    prompt_len_ptr,
    total_len_ptr,
    MAX_DEPTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    word_idx = tl.program_id(1)
    req_state_idx = tl.load(expanded_idx_mapping_ptr + row).to(tl.int64)
    if word_idx >= tl.load(num_words_ptr + req_state_idx):
        return
    offsets = word_offsets_ptr + req_state_idx * word_offsets_stride + word_idx
    start = tl.load(offsets)
    last = tl.load(offsets + 1) - 1
    words = word_tokens_ptr + req_state_idx * word_tokens_stride
    committed = all_token_ids_ptr + req_state_idx * all_token_ids_stride

    # Position `total_len` of the history is the first token of the path.
    total_len = tl.load(total_len_ptr + req_state_idx)
    begin = total_len + tl.load(row_depths_ptr + row) - (last - start)
    if begin < tl.load(prompt_len_ptr + req_state_idx):
        return
    is_match = True
    for i in range(0, last - start):
        pos = begin + i
        in_path = pos >= total_len
        path_token = path_tokens_ptr + row * MAX_DEPTH + pos - total_len
        path_token = tl.load(path_token, mask=in_path, other=-1)
        token = tl.load(committed + pos, mask=in_path == 0, other=-1)
        token = tl.where(in_path, path_token, token.to(tl.int64))
        is_match &= token == tl.load(words + start + i)
    token = tl.load(words + last)
    tl.store(logits_ptr + row * logits_stride + token, float("-inf"), mask=is_match)


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
    *,
    use_kernel: bool = False,
) -> None:
    """Set to -inf each token that would complete a bad word at its row.

    A word's beginning may lie in the output and in the row's path, never in the
    prompt. No host sync. CPU tensors take the reference unless `use_kernel`.
    """
    args = (logits, path_tokens, row_depths, expanded_idx_mapping)
    words = (word_tokens, word_offsets, num_words)
    history = (all_token_ids, prompt_len, total_len)
    if logits.device.type == "cpu" and not use_kernel:
        reference(*args, *words, *history, max_num_words)
        return
    assert logits.stride(-1) == 1 and path_tokens.is_contiguous()
    num_logits, max_depth = path_tokens.shape
    _mask_bad_words_kernel[(num_logits, max_num_words)](
        logits,
        logits.stride(0),
        path_tokens,
        row_depths,
        expanded_idx_mapping,
        word_tokens,
        word_tokens.stride(0),
        word_offsets,
        word_offsets.stride(0),
        num_words,
        all_token_ids,
        all_token_ids.stride(0),
        prompt_len,
        total_len,
        MAX_DEPTH=max_depth,
        num_warps=1,
    )
