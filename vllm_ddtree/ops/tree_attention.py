# SPDX-License-Identifier: Apache-2.0
"""Attention among a step's query rows, merged with that over the cached prefix."""

import torch
from vllm.triton_utils import tl, triton

from vllm_ddtree.ops.reference import tree_attention as reference

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _merge_tree_attention_kernel(
    # [num_tokens, num_heads, head_size], holds the attention over the prefix
    out_ptr,
    out_stride,
    # [num_heads, num_tokens], natural logarithm
    prefix_lse_ptr,
    prefix_lse_stride,
    # [num_tokens, num_heads, head_size]
    query_ptr,
    query_stride,
    # [num_tokens, num_kv_heads, head_size]
    key_ptr,
    key_stride,
    # [num_tokens, num_kv_heads, head_size]
    value_ptr,
    value_stride,
    # [num_reqs + 1]
    query_start_loc_ptr,
    # [num_reqs]
    tree_slots_ptr,
    # [num_slots, width, NUM_WORDS]
    ancestors_ptr,
    ancestors_stride,
    scale,
    HEAD_SIZE: tl.constexpr,
    BLOCK_HEAD: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # A program holds BLOCK_M pairs of a row and a query head of one KV head.
    req_idx = tl.program_id(0)
    kv_head = tl.program_id(1)
    pairs = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    start = tl.load(query_start_loc_ptr + req_idx).to(tl.int64)
    num_rows = (tl.load(query_start_loc_ptr + req_idx + 1) - start).to(tl.int32)
    rows = pairs // GROUP
    last_row = (tl.program_id(2) * BLOCK_M + BLOCK_M - 1) // GROUP
    if tl.program_id(2) * BLOCK_M >= num_rows * GROUP:
        return
    slot = tl.load(tree_slots_ptr + req_idx).to(tl.int64)
    heads = kv_head * GROUP + pairs % GROUP
    is_row = rows < num_rows
    dims = tl.arange(0, BLOCK_HEAD)
    in_head = dims < HEAD_SIZE
    tokens = start + rows
    place = heads[:, None] * HEAD_SIZE + dims[None, :]
    tile = is_row[:, None] & in_head[None, :]
    query = tl.load(
        query_ptr + tokens[:, None] * query_stride + place, mask=tile, other=0.0
    )

    # The prefix opens the running softmax; without one it weighs nothing.
    lse = tl.load(
        prefix_lse_ptr + heads.to(tl.int64) * prefix_lse_stride + tokens,
        mask=is_row,
        other=float("-inf"),
    )
    has_prefix = lse > float("-inf")
    top = tl.where(has_prefix, lse * _LOG2E, float("-inf"))
    total = tl.where(has_prefix, 1.0, 0.0)
    out_ptrs = out_ptr + tokens[:, None] * out_stride + place
    prefix = tl.load(out_ptrs, mask=tile & has_prefix[:, None], other=0.0)
    acc = prefix.to(tl.float32)

    # Parents come before children, so no row sees one after it.
    for first in range(0, tl.minimum(last_row + 1, num_rows), BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        key_tile = (keys < num_rows)[:, None] & in_head[None, :]
        key_tokens = start + keys
        kv_place = kv_head * HEAD_SIZE + dims[None, :]
        key = tl.load(
            key_ptr + key_tokens[:, None] * key_stride + kv_place,
            mask=key_tile,
            other=0.0,
        )
        value = tl.load(
            value_ptr + key_tokens[:, None] * value_stride + kv_place,
            mask=key_tile,
            other=0.0,
        )
        if slot < 0:
            visible = keys[None, :] <= rows[:, None]
        else:
            # BLOCK_N divides a word, so a tile of keys lies within one.
            word = tl.load(
                ancestors_ptr
                + slot * ancestors_stride
                + rows * NUM_WORDS
                + first // 64,
                mask=is_row,
                other=0,
            )
            visible = ((word[:, None] >> (keys % 64)[None, :]) & 1) == 1
        visible = visible & (keys < num_rows)[None, :]
        scores = tl.dot(query, tl.trans(key), input_precision="ieee")
        scores = tl.where(visible, scores * (scale * _LOG2E), float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        # A row that has seen nothing yet keeps a finite difference.
        shift = tl.where(new_top > float("-inf"), new_top, 0.0)
        weights = tl.exp2(scores - shift[:, None])
        rescale = tl.exp2(top - shift)
        total = total * rescale + tl.sum(weights, axis=1)
        acc = acc * rescale[:, None]
        acc += tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        top = new_top
    # Rows past the end have seen nothing and are not stored.
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=tile)


def merge_tree_attention(
    # [num_tokens, num_heads, head_size], rewritten: attention over the prefix -> all
    out: torch.Tensor,
    # [num_heads, num_tokens] float32, natural logarithm, -inf without a prefix
    prefix_lse: torch.Tensor,
    # [num_tokens, num_heads, head_size]
    query: torch.Tensor,
    # [num_tokens, num_kv_heads, head_size]
    key: torch.Tensor,
    # [num_tokens, num_kv_heads, head_size]
    value: torch.Tensor,
    # [num_reqs + 1] int32
    query_start_loc: torch.Tensor,
    # [>= num_reqs] int32, negative for a causal request
    tree_slots: torch.Tensor,
    # [num_slots, width, num_words] int64
    ancestors: torch.Tensor,
    scale: float,
    max_query_len: int,
    *,
    use_kernel: bool = False,
) -> None:
    """Add the attention among a request's query rows to that over its prefix.

    Row i of a tree request sees the rows of its ancestor mask, row i of a causal one
    the rows [0, i]. The heads of a token must be contiguous.
    No host sync; safe under CUDA graph capture. CPU tensors take the reference unless
    `use_kernel`.
    """
    if not (use_kernel or out.is_cuda):
        reference.merge_tree_attention(
            out,
            prefix_lse,
            query,
            key,
            value,
            query_start_loc,
            tree_slots,
            ancestors,
            scale,
        )
        return
    num_heads, head_size = query.shape[1:]
    for tensor in (out, query, key, value):
        assert tensor.stride()[1:] == (head_size, 1)
    num_kv_heads = key.shape[1]
    group = num_heads // num_kv_heads
    # A tile of 64 rows of the largest heads would spill registers.
    tile = 64 if head_size <= 128 else 32
    block_m = min(tile, max(16, triton.next_power_of_2(max_query_len * group)))
    num_blocks = triton.cdiv(max_query_len * group, block_m)
    _merge_tree_attention_kernel[
        (query_start_loc.shape[0] - 1, num_kv_heads, num_blocks)
    ](
        out,
        out.stride(0),
        prefix_lse,
        prefix_lse.stride(0),
        query,
        query.stride(0),
        key,
        key.stride(0),
        value,
        value.stride(0),
        query_start_loc,
        tree_slots,
        ancestors,
        ancestors.stride(0),
        scale,
        HEAD_SIZE=head_size,
        BLOCK_HEAD=triton.next_power_of_2(head_size),
        GROUP=group,
        NUM_WORDS=ancestors.shape[2],
        BLOCK_M=block_m,
        BLOCK_N=32,
        num_warps=4 if head_size <= 64 else 8,
    )
