# SPDX-License-Identifier: Apache-2.0
"""Bad words that span output and path."""

from dataclasses import dataclass

import numpy as np
import torch
from cases import property_of
from histories import (
    MAX_DEPTH,
    NUM_REQS,
    NUM_SLOTS,
    Batch,
    assert_equal_bits,
    chain_rows,
    draw_batch,
)
from hypothesis import strategies as st
from vllm.v1.worker.gpu.sample.bad_words import apply_bad_words

from vllm_ddtree.ops.bad_words import mask_bad_words
from vllm_ddtree.ops.path_tokens import gather_path_tokens

MAX_WORDS = 6
MAX_WORD_LEN = 5
# Few tokens, so that words occur.
vocab_sizes = st.integers(2, 4)


@dataclass
class BadWords:
    words: list[list[list[int]]]
    # [num_slots, MAX_WORDS * MAX_WORD_LEN]
    tokens: torch.Tensor
    # [num_slots, MAX_WORDS + 1]
    offsets: torch.Tensor
    # [num_slots]
    num_words: torch.Tensor

    def args(self) -> tuple[torch.Tensor, ...]:
        return self.tokens, self.offsets, self.num_words


def draw_bad_words(rng: np.random.Generator, batch: Batch) -> BadWords:
    vocab_size = batch.logits.shape[1]
    shape = (NUM_SLOTS, MAX_WORDS * MAX_WORD_LEN)
    tokens = torch.full(shape, 2**31 - 1, dtype=torch.int32)
    offsets = torch.full((NUM_SLOTS, MAX_WORDS + 1), 2**31 - 1, dtype=torch.int32)
    words: list[list[list[int]]] = []
    for slot in range(NUM_SLOTS):
        lengths = rng.integers(1, MAX_WORD_LEN + 1, size=rng.integers(0, MAX_WORDS + 1))
        words.append([rng.integers(vocab_size, size=n).tolist() for n in lengths])
        flat = [token for word in words[-1] for token in word]
        tokens[slot, : len(flat)] = torch.tensor(flat, dtype=torch.int32)
        ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        offsets[slot, : len(ends)] = torch.from_numpy(ends)
    num_words = torch.tensor([len(each) for each in words], dtype=torch.int32)
    device = batch.logits.device
    return BadWords(words, tokens.to(device), offsets.to(device), num_words.to(device))


def mask(batch: Batch, bad: BadWords, use_kernel: bool) -> torch.Tensor:
    logits = batch.logits.clone()
    paths = gather_path_tokens(
        batch.tree, batch.slots, batch.cu_num_logits, batch.num_logits, MAX_DEPTH
    )
    history = (batch.all_token_ids, batch.prompt_len, batch.total_len)
    rows = batch.expanded_idx_mapping
    mask_bad_words(
        logits, *paths, rows, *bad.args(), *history, MAX_WORDS, use_kernel=use_kernel
    )
    return logits


@property_of(NUM_REQS, vocab_size=vocab_sizes)
def test_bad_words_by_definition(device, rng, vocab_size):
    """A word is bad where text of output, path and token ends with it."""
    batch = draw_batch(rng, vocab_size, device)
    bad = draw_bad_words(rng, batch)
    expected = batch.logits.clone()
    rows = batch.expanded_idx_mapping.tolist()
    for row, (slot, path) in enumerate(zip(rows, batch.paths(), strict=True)):
        first, last = int(batch.prompt_len[slot]), int(batch.total_len[slot])
        output = batch.all_token_ids[slot, first:last].tolist()
        for token in range(vocab_size):
            text = bytes([*output, *path, token])
            if any(text.endswith(bytes(word)) for word in bad.words[slot]):
                expected[row, token] = -torch.inf
    for use_kernel in (True, False):
        assert_equal_bits(mask(batch, bad, use_kernel), expected)


@property_of(NUM_REQS, vocab_size=vocab_sizes)
def test_a_chain_is_masked_as_by_vllm(device, rng, vocab_size):
    batch = draw_batch(rng, vocab_size, device, is_chain=True)
    batch.slots = batch.req_state_idx.int()
    bad = draw_bad_words(rng, batch)
    expected = batch.logits.clone()
    apply_bad_words(
        expected,
        batch.expanded_idx_mapping,
        *bad.args(),
        batch.all_token_ids,
        batch.prompt_len,
        batch.total_len,
        *chain_rows(batch),
        MAX_WORDS,
    )
    for use_kernel in (True, False):
        assert_equal_bits(mask(batch, bad, use_kernel), expected)
