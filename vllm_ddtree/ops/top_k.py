# SPDX-License-Identifier: Apache-2.0
"""Top-k log-probabilities in two stages: blocks of the vocabulary, then a merge.

A block of the vocabulary and a rank's shard of it are summarised alike (top-k values,
their ids, log-sum-exp), so the same merge joins the blocks of a shard and the shards
of a vocabulary.

Up to 64 tokens of a large vocabulary are found with less sorting: the best k tokens
lie in the k groups of 64 whose best tokens are the best, so one pass reads the logits
and keeps a maximum per group, and each row then sorts groups and the tokens of k.
"""

import torch
from vllm.triton_utils import tl, triton

from vllm_ddtree.ops.reference.top_k import local_top_k as local_top_k_reference
from vllm_ddtree.ops.reference.top_k import merge_top_k as merge_top_k_reference
from vllm_ddtree.ops.reference.top_k import top_k_log_probs as top_k_log_probs_reference
from vllm_ddtree.ops.sort_keys import float_to_ordered, ordered_to_float
from vllm_ddtree.tree import MAX_BUDGET

_BLOCK_VOCAB = 4096
# Tokens of a group, and the most tokens that are chosen by groups.
_GROUP = 64
# Groups that one program sorts: a shard of 262,144 tokens.
_MAX_GROUPS = 4096


@triton.jit
def _make_key(value, token_id):
    # Larger keys come first: by value, then by lower id; no token is the smallest.
    place = (token_id ^ 0x7FFFFFFF).to(tl.int64)
    key = (float_to_ordered(value).to(tl.int64) << 32) | place
    return tl.where(token_id >= 0, key, -(2**63))


@triton.jit
def _key_value(key):
    value = ordered_to_float((key >> 32).to(tl.int32))
    return tl.where(key == -(2**63), float("-inf"), value)


@triton.jit
def _key_id(key):
    token_id = (key & 0x7FFFFFFF).to(tl.int32) ^ 0x7FFFFFFF
    return tl.where(key == -(2**63), -1, token_id)


@triton.jit
def _log_sum_exp(x):
    top = tl.max(x, axis=1)
    shift = tl.where(top == float("-inf"), 0.0, top)
    return shift + tl.log(tl.sum(tl.exp(x - shift[:, None]), axis=1))


@triton.jit
def _load_logits(ptrs, mask):
    # NaN counts as -inf, and -0 equals 0 in a key.
    logits = tl.load(ptrs, mask=mask, other=float("-inf")).to(tl.float32)
    logits = tl.where(logits == logits, logits, float("-inf"))
    return tl.where(logits == 0.0, 0.0, logits)


@triton.jit
def _local_top_k_kernel(
    # [num_rows, shard_size]
    logits_ptr,
    logits_stride,
    # [num_rows, num_blocks, 2 * K + 1]
    packed_ptr,
    num_rows,
    shard_size,
    vocab_start,
    num_blocks,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_VOCAB: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    block_idx = tl.program_id(1)
    cols = block_idx * BLOCK_VOCAB + tl.arange(0, BLOCK_VOCAB)
    in_shard = (cols < shard_size)[None, :]
    mask = (rows < num_rows)[:, None] & in_shard
    logits = _load_logits(
        logits_ptr + rows[:, None] * logits_stride + cols[None, :], mask
    )
    token_ids = tl.where(in_shard, vocab_start + cols[None, :], -1)
    top = tl.topk(_make_key(logits, token_ids), BLOCK_K)

    packed_ptr += (rows * num_blocks + block_idx)[:, None] * (2 * K + 1)
    ranks = tl.arange(0, BLOCK_K)[None, :]
    mask = (rows < num_rows)[:, None] & (ranks < K)
    tl.store(packed_ptr + ranks, _key_value(top), mask=mask)
    ids = _key_id(top).to(tl.float32, bitcast=True)
    tl.store(packed_ptr + K + ranks, ids, mask=mask)
    log_z = _log_sum_exp(logits)[:, None]
    tl.store(packed_ptr + 2 * K, log_z, mask=(rows < num_rows)[:, None])


@triton.jit
def _group_maxima_kernel(
    # [num_rows, shard_size]
    logits_ptr,
    logits_stride,
    # [num_rows, num_groups]
    maxima_ptr,
    # [num_rows, num_blocks]
    log_z_ptr,
    shard_size,
    num_groups,
    num_blocks,
    GROUP: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block_idx = tl.program_id(1)
    groups = block_idx * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
    cols = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    logits = _load_logits(logits_ptr + row * logits_stride + cols, cols < shard_size)
    maxima = tl.max(logits, axis=1)
    out = maxima_ptr + row * num_groups + groups
    tl.store(out, maxima, mask=groups < num_groups)
    top = tl.max(maxima, axis=0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.sum(tl.exp(logits - shift), axis=1), axis=0)
    tl.store(log_z_ptr + row * num_blocks + block_idx, shift + tl.log(total))


@triton.jit
def _top_k_of_groups_kernel(
    # [num_rows, shard_size]
    logits_ptr,
    logits_stride,
    # [num_rows, num_groups]
    maxima_ptr,
    # [num_rows, num_blocks]
    log_z_ptr,
    # [num_rows, 2 * K + 1]
    packed_ptr,
    shard_size,
    vocab_start,
    num_groups,
    num_blocks,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_BLOCKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, BLOCK_GROUPS)[None, :]
    is_group = groups < num_groups
    maxima = tl.load(
        maxima_ptr + row * num_groups + groups, mask=is_group, other=float("-inf")
    )
    best = tl.topk(_make_key(maxima, tl.where(is_group, groups, -1)), BLOCK_K)
    best = tl.reshape(_key_id(best), [BLOCK_K, 1])
    cols = best * GROUP + tl.arange(0, GROUP)[None, :]
    mask = (best >= 0) & (cols < shard_size)
    logits = _load_logits(logits_ptr + row * logits_stride + cols, mask)
    keys = _make_key(logits, tl.where(mask, vocab_start + cols, -1))
    top = tl.topk(tl.reshape(keys, [1, BLOCK_K * GROUP]), BLOCK_K)

    packed_ptr += row * (2 * K + 1)
    ranks = tl.arange(0, BLOCK_K)[None, :]
    tl.store(packed_ptr + ranks, _key_value(top), mask=ranks < K)
    ids = _key_id(top).to(tl.float32, bitcast=True)
    tl.store(packed_ptr + K + ranks, ids, mask=ranks < K)
    blocks = tl.arange(0, BLOCK_BLOCKS)[None, :]
    log_z = tl.load(
        log_z_ptr + row * num_blocks + blocks,
        mask=blocks < num_blocks,
        other=float("-inf"),
    )
    tl.store(packed_ptr + 2 * K + tl.arange(0, 1), _log_sum_exp(log_z))


@triton.jit
def _merge_top_k_kernel(
    # [num_rows, num_shards, 2 * K + 1]
    packed_ptr,
    # [draft_vocab_size]
    token_map_ptr,
    # [num_rows, K]
    tokens_ptr,
    # [num_rows, K]
    log_probs_ptr,
    # [num_rows, 2 * K + 1]
    merged_ptr,
    num_rows,
    num_shards,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SHARDS: tl.constexpr,
    HAS_TOKEN_MAP: tl.constexpr,
    PACK: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    in_rows = (rows < num_rows)[:, None]
    shard_ptr = packed_ptr + (rows * num_shards)[:, None] * (2 * K + 1)
    shards = tl.arange(0, BLOCK_SHARDS)[None, :]
    log_z = tl.load(
        shard_ptr + shards * (2 * K + 1) + 2 * K,
        mask=in_rows & (shards < num_shards),
        other=float("-inf"),
    )
    log_z = _log_sum_exp(log_z)[:, None]

    # The best so far descends and the next shard is read ascending: the larger of
    # each pair are the best of both, in bitonic order.
    ranks = tl.arange(0, BLOCK_K)[None, :]
    backwards = BLOCK_K - 1 - ranks
    top = tl.full([BLOCK_ROWS, BLOCK_K], -(2**63), dtype=tl.int64)
    for _ in range(0, num_shards):
        mask = in_rows & (backwards < K)
        values = tl.load(shard_ptr + backwards, mask=mask, other=float("-inf"))
        ids = tl.load(shard_ptr + K + backwards, mask=mask, other=0.0)
        ids = tl.where(mask, ids.to(tl.int32, bitcast=True), -1)
        top = tl.maximum(top, _make_key(values, ids))
        top = tl.bitonic_merge(top, descending=True)
        shard_ptr += 2 * K + 1

    values = _key_value(top)
    token_ids = _key_id(top)
    mask = in_rows & (ranks < K)
    if PACK:
        merged_ptr += rows[:, None] * (2 * K + 1)
        tl.store(merged_ptr + ranks, values, mask=mask)
        ids = token_ids.to(tl.float32, bitcast=True)
        tl.store(merged_ptr + K + ranks, ids, mask=mask)
        tl.store(merged_ptr + 2 * K, log_z, mask=in_rows)
    else:
        tokens = token_ids.to(tl.int64)
        if HAS_TOKEN_MAP:
            is_token = mask & (token_ids >= 0)
            tokens = tl.load(token_map_ptr + tokens, mask=is_token, other=-1)
        log_probs = tl.where(values == float("-inf"), values, values - log_z)
        out = rows[:, None] * K + ranks
        tl.store(tokens_ptr + out, tokens, mask=mask)
        tl.store(log_probs_ptr + out, log_probs, mask=mask)


def _block_of(k: int) -> int:
    # Triton's compiler cannot sort rows of one element.
    return max(2, triton.next_power_of_2(k))


def _summarise_blocks(logits: torch.Tensor, k: int, vocab_start: int) -> torch.Tensor:
    """Summary `[num_rows, num_blocks, 2 * k + 1]` of each block of the vocabulary."""
    assert logits.stride(-1) == 1
    num_rows, shard_size = logits.shape
    block_k = _block_of(k)
    block_vocab = min(_BLOCK_VOCAB, triton.next_power_of_2(shard_size))
    block_vocab = max(block_vocab, block_k)
    num_blocks = triton.cdiv(shard_size, block_vocab)
    block_rows = max(1, _BLOCK_VOCAB // block_vocab)
    packed = logits.new_empty(num_rows, num_blocks, 2 * k + 1, dtype=torch.float32)
    _local_top_k_kernel[(triton.cdiv(num_rows, block_rows), num_blocks)](
        logits,
        logits.stride(0),
        packed,
        num_rows,
        shard_size,
        vocab_start,
        num_blocks,
        K=k,
        BLOCK_K=block_k,
        BLOCK_ROWS=block_rows,
        BLOCK_VOCAB=block_vocab,
        num_warps=8,
    )
    return packed


def _top_k_by_groups(
    logits: torch.Tensor, k: int, num_groups: int, vocab_start: int
) -> torch.Tensor:
    """What `local_top_k` returns, for at most `_GROUP` tokens."""
    num_rows, shard_size = logits.shape
    block_groups = _BLOCK_VOCAB // _GROUP
    num_blocks = triton.cdiv(num_groups, block_groups)
    maxima = logits.new_empty(num_rows, num_groups, dtype=torch.float32)
    log_z = logits.new_empty(num_rows, num_blocks, dtype=torch.float32)
    packed = logits.new_empty(num_rows, 2 * k + 1, dtype=torch.float32)
    _group_maxima_kernel[(num_rows, num_blocks)](
        logits,
        logits.stride(0),
        maxima,
        log_z,
        shard_size,
        num_groups,
        num_blocks,
        GROUP=_GROUP,
        BLOCK_GROUPS=block_groups,
        num_warps=4,
    )
    _top_k_of_groups_kernel[(num_rows,)](
        logits,
        logits.stride(0),
        maxima,
        log_z,
        packed,
        shard_size,
        vocab_start,
        num_groups,
        num_blocks,
        K=k,
        BLOCK_K=_block_of(k),
        GROUP=_GROUP,
        BLOCK_GROUPS=triton.next_power_of_2(num_groups),
        BLOCK_BLOCKS=triton.next_power_of_2(num_blocks),
        num_warps=8,
    )
    return packed


def _launch_merge(
    packed: torch.Tensor,
    k: int,
    token_map: torch.Tensor | None,
    tokens: torch.Tensor | None,
    log_probs: torch.Tensor | None,
    merged: torch.Tensor | None,
) -> None:
    num_rows, num_shards, _ = packed.shape
    block_k = _block_of(k)
    # Small k leaves most of a warp idle, so a program takes several rows.
    block_rows = max(1, 64 // block_k)
    _merge_top_k_kernel[(triton.cdiv(num_rows, block_rows),)](
        packed,
        token_map,
        tokens,
        log_probs,
        merged,
        num_rows,
        num_shards,
        K=k,
        BLOCK_K=block_k,
        BLOCK_ROWS=block_rows,
        BLOCK_SHARDS=triton.next_power_of_2(num_shards),
        HAS_TOKEN_MAP=token_map is not None,
        PACK=merged is not None,
        num_warps=max(1, block_k // 256),
    )


def _check_k(k: int) -> None:
    if not 1 <= k <= MAX_BUDGET:
        raise ValueError(f"k={k} is not in 1..{MAX_BUDGET}")


def local_top_k(
    # [num_rows, shard_size] any float dtype
    logits: torch.Tensor,
    k: int,
    vocab_start: int,
    *,
    use_kernel: bool = False,
) -> torch.Tensor:
    """Summarise a vocabulary shard: `[num_rows, 2 * k + 1]` float32 for one gather.

    Values descending, then their token ids (int32 bits), then the log-sum-exp of the
    shard. Equal logits are ordered by lower id; NaN counts as -inf. A shard smaller
    than k is padded with -inf and id -1. Copy the result only: as floats the ids are
    denormals and NaNs.
    No host sync; safe under CUDA graph capture. CPU tensors take the reference
    unless `use_kernel`.
    """
    _check_k(k)
    if logits.device.type == "cpu" and not use_kernel:
        return local_top_k_reference(logits, k, vocab_start)
    num_groups = triton.cdiv(logits.shape[1], _GROUP)
    if k <= _GROUP < num_groups <= _MAX_GROUPS:
        return _top_k_by_groups(logits, k, num_groups, vocab_start)
    packed = _summarise_blocks(logits, k, vocab_start)
    if packed.shape[1] == 1:
        return packed[:, 0]
    merged = packed.new_empty(packed.shape[0], 2 * k + 1)
    _launch_merge(packed, k, None, None, None, merged)
    return merged


def merge_top_k(
    # [num_rows, num_shards, 2 * k + 1] float32, from local_top_k
    packed: torch.Tensor,
    k: int,
    # [draft_vocab_size] target id of each draft id
    token_map: torch.Tensor | None = None,
    *,
    use_kernel: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Top-k of the whole vocabulary from the summaries of its shards.

    Returns `tokens` [num_rows, k] int64 and `log_probs` [num_rows, k] float32,
    descending, equal logits ordered by lower id, normalised in float32 over the full
    vocabulary; places that no shard could fill hold -1 and -inf. The order does not
    depend on the number of shards. `token_map` renames the tokens at the very end.
    No host sync; safe under CUDA graph capture. CPU tensors take the reference
    unless `use_kernel`.
    """
    _check_k(k)
    if packed.device.type == "cpu" and not use_kernel:
        return merge_top_k_reference(packed, k, token_map)
    assert packed.is_contiguous()
    num_rows = packed.shape[0]
    tokens = packed.new_empty(num_rows, k, dtype=torch.int64)
    log_probs = packed.new_empty(num_rows, k)
    _launch_merge(packed, k, token_map, tokens, log_probs, None)
    return tokens, log_probs


def top_k_log_probs(
    # [num_rows, vocab_size] any float dtype
    logits: torch.Tensor,
    k: int,
    # [draft_vocab_size] target id of each draft id
    token_map: torch.Tensor | None = None,
    *,
    use_kernel: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Top-k of an unsplit vocabulary, as `merge_top_k` of one shard."""
    _check_k(k)
    if logits.device.type == "cpu" and not use_kernel:
        return top_k_log_probs_reference(logits, k, token_map)
    packed = local_top_k(logits, k, 0, use_kernel=use_kernel)
    return merge_top_k(packed[:, None], k, token_map, use_kernel=use_kernel)
