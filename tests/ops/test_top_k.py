# SPDX-License-Identifier: Apache-2.0
"""Top-k over a split vocabulary is the top-k of the whole one."""

import numpy as np
import pytest
import torch
from cases import property_of
from hypothesis import strategies as st

from vllm_ddtree.ops.reference import top_k as reference
from vllm_ddtree.ops.top_k import local_top_k, merge_top_k, top_k_log_probs

NUM_ROWS = 20
KINDS = ("random", "tied", "equal", "one_token", "minus_inf", "nan", "all_dead")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = 1e-5


def draw_logits(rng, num_rows: int, vocab_size: int) -> torch.Tensor:
    """`[num_rows, vocab_size]` float32, a kind for each row."""
    rows = np.empty((num_rows, vocab_size), dtype=np.float32)
    for row in rows:
        row[:] = rng.normal(size=vocab_size) * rng.choice([0.1, 1.0, 10.0])
        kind = rng.choice(KINDS)
        if kind == "tied":
            row[:] = np.round(row)
        elif kind == "equal":
            row[:] = rng.choice([0.0, -0.0], size=vocab_size)
        elif kind == "one_token":
            row[:] = -np.inf
            row[rng.integers(vocab_size)] = 3.0
        elif kind == "minus_inf":
            row[rng.random(vocab_size) < 0.7] = -np.inf
        elif kind == "nan":
            row[rng.random(vocab_size) < 0.2] = np.nan
        elif kind == "all_dead":
            row[:] = rng.choice([np.nan, -np.inf])
    return torch.from_numpy(rows)


def top_k_by_definition(logits: torch.Tensor, k: int) -> tuple[list, torch.Tensor]:
    """Python's sort, and log-probabilities in float64."""
    rows = torch.where(logits.isnan(), -torch.inf, logits.double()).cpu()
    log_probs = rows - rows.logsumexp(-1, keepdim=True)
    log_probs = torch.where(rows == -torch.inf, -torch.inf, log_probs)
    tokens = [
        sorted(range(len(row)), key=lambda j, row=row: (-row[j], j))[:k]
        for row in rows.tolist()
    ]
    return tokens, log_probs.gather(1, torch.tensor(tokens))


def assert_close(log_probs: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(
        log_probs.cpu().double(), expected.cpu().double(), rtol=1e-6, atol=TOLERANCE
    )


def split(logits: torch.Tensor, k: int, num_shards: int, **kwargs) -> torch.Tensor:
    """Summaries of `num_shards` shards of almost equal size, as if gathered."""
    shards, start = [], 0
    for shard in logits.tensor_split(num_shards, dim=-1):
        shards.append(local_top_k(shard, k, start, **kwargs))
        start += shard.shape[-1]
    return torch.stack(shards, dim=1)


def assert_same_bits(left: torch.Tensor, right: torch.Tensor) -> None:
    assert torch.equal(left.view(torch.int32), right.view(torch.int32))


@property_of(
    NUM_ROWS,
    num_shards=st.sampled_from([1, 2, 4, 8]),
    vocab_size=st.integers(8, 300),
    dtype=st.sampled_from(DTYPES),
)
def test_sharded_equals_whole(device, rng, num_shards, vocab_size, dtype):
    """Any number of shards gives the same tokens; shards may be smaller than k."""
    k = int(rng.integers(1, min(vocab_size, 64) + 1))
    logits = draw_logits(rng, NUM_ROWS, vocab_size).to(device, dtype)
    packed = split(logits, k, num_shards, use_kernel=True)
    expected = split(logits, k, num_shards)
    # Values and ids are exact, the log-sum-exp is a sum in another order.
    assert_same_bits(packed[..., : 2 * k], expected[..., : 2 * k])
    tokens, log_probs = merge_top_k(packed, k, use_kernel=True)
    expected_tokens, expected_log_probs = top_k_by_definition(logits, k)
    assert tokens.tolist() == expected_tokens
    assert_close(log_probs, expected_log_probs)
    if device == "cpu":
        reference_tokens, reference_log_probs = reference.merge_top_k(expected, k)
        assert torch.equal(tokens, reference_tokens)
        assert_close(log_probs, reference_log_probs)


@property_of(NUM_ROWS, k=st.sampled_from([1, 16, 63, 64, 65]), packs=st.booleans())
def test_vocabulary_of_several_blocks(device, rng, k, packs):
    """By groups, or by blocks merged as shards are; ties cross their borders."""
    vocab_size = int(rng.integers(4097, 9000))
    logits = draw_logits(rng, NUM_ROWS, vocab_size).to(device)
    if packs:
        packed = local_top_k(logits, k, 7, use_kernel=True)
        expected = reference.local_top_k(logits, k, 7)
        assert_same_bits(packed[:, : 2 * k], expected[:, : 2 * k])
        assert_close(packed[:, 2 * k], expected[:, 2 * k])
        return
    tokens, log_probs = top_k_log_probs(logits, k, use_kernel=True)
    expected_tokens, expected_log_probs = reference.top_k_log_probs(logits, k)
    assert torch.equal(tokens, expected_tokens)
    assert_close(log_probs, expected_log_probs)


@property_of(NUM_ROWS, vocab_size=st.integers(1, 64))
def test_probabilities_of_the_whole_vocabulary_sum_to_one(device, rng, vocab_size):
    logits = draw_logits(rng, NUM_ROWS, vocab_size).to(device)
    _, log_probs = top_k_log_probs(logits, vocab_size, use_kernel=True)
    is_dead = (log_probs == -torch.inf).all(-1)
    total = log_probs.double().exp().sum(-1)
    torch.testing.assert_close(total, (~is_dead).double(), rtol=0, atol=TOLERANCE)


@property_of(NUM_ROWS, num_shards=st.sampled_from([1, 4]))
def test_draft_ids_are_mapped_at_the_end(device, rng, num_shards):
    vocab_size, k = 40, 8
    logits = draw_logits(rng, NUM_ROWS, vocab_size).to(device)
    token_map = torch.from_numpy(rng.permutation(1000)[:vocab_size]).to(device)
    packed = split(logits, k, num_shards)
    plain, log_probs = merge_top_k(packed, k, use_kernel=True)
    mapped, mapped_log_probs = merge_top_k(packed, k, token_map, use_kernel=True)
    assert torch.equal(mapped, token_map[plain])
    assert_same_bits(mapped_log_probs, log_probs)


def test_places_without_a_token_hold_minus_one(device):
    """k above the vocabulary, with and without a map."""
    logits = torch.tensor([[1.0, 2.0, 3.0]], device=device)
    token_map = torch.tensor([30, 20, 10], device=device)
    for mapping, expected in ((None, [2, 1, 0, -1]), (token_map, [10, 20, 30, -1])):
        tokens, log_probs = top_k_log_probs(logits, 4, mapping, use_kernel=True)
        assert tokens.tolist() == [expected]
        assert log_probs[0, 3] == -torch.inf
        reference_tokens, _ = reference.top_k_log_probs(logits, 4, mapping)
        assert torch.equal(tokens, reference_tokens)


def test_a_token_of_no_probability_precedes_an_empty_place(device):
    logits = torch.full((1, 2), -torch.inf, device=device)
    packed = torch.stack([local_top_k(logits, 3, start) for start in (0, 2)], dim=1)
    for use_kernel in (False, True):
        tokens, _ = merge_top_k(packed, 3, use_kernel=use_kernel)
        assert tokens.tolist() == [[0, 1, 2]]


def test_rows_may_be_strided(device):
    buffer = torch.randn(4, 100, device=device)
    tokens, _ = top_k_log_probs(buffer[:, 20:60], 5, use_kernel=True)
    expected, _ = top_k_log_probs(buffer[:, 20:60].contiguous(), 5, use_kernel=True)
    assert torch.equal(tokens, expected)


def test_offsets_beyond_two_to_the_31(device):
    """The last row starts past element 2**31; untouched pages cost no memory here."""
    stride = 2**31 + 64
    logits = torch.from_numpy(np.zeros(stride + 32, dtype=np.float16)).to(device)
    logits = logits.as_strided((2, 32), (stride, 1))
    logits.copy_(torch.arange(64).view(2, 32) % 37)
    tokens, _ = top_k_log_probs(logits, 4, use_kernel=True)
    assert tokens.tolist() == [[31, 30, 29, 28], [4, 3, 2, 1]]


@pytest.mark.parametrize("k", [0, 1025])
def test_k_out_of_range_is_refused(device, k):
    with pytest.raises(ValueError, match=r"is not in 1\.\.1024"):
        top_k_log_probs(torch.zeros(1, 2000, device=device), k)
