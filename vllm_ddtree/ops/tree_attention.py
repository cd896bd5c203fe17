# SPDX-License-Identifier: Apache-2.0
"""Attention among a step's query rows, merged with that over the cached prefix."""

import torch
from vllm.triton_utils import tl, triton

from vllm_ddtree.ops.reference import tree_attention as reference

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _merge_tree_attention_kernel(
    # [num_tokens, num_heads, head_size]
    out_ptr,
    out_stride,
    # [NUM_PARTS, num_tokens, num_heads, head_size], the first may be `out`
    prefix_ptr,
    prefix_part_stride,
    prefix_stride,
    # [NUM_PARTS, num_heads, num_tokens], natural logarithm
    prefix_lse_ptr,
    prefix_lse_part_stride,
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
    NUM_PARTS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
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

    # The parts of the prefix open the running softmax; one without keys weighs nothing
    # and may hold anything.
    parts = tl.arange(0, BLOCK_PARTS)
    lse = tl.load(
        prefix_lse_ptr
        + parts[None, :] * prefix_lse_part_stride
        + heads[:, None].to(tl.int64) * prefix_lse_stride
        + tokens[:, None],
        mask=is_row[:, None] & (parts < NUM_PARTS)[None, :],
        other=float("-inf"),
    )
    lse *= _LOG2E
    top = tl.max(lse, axis=1)
    shift = tl.where(top > float("-inf"), top, 0.0)
    part_weights = tl.exp2(lse - shift[:, None])
    total = tl.sum(part_weights, axis=1)
    acc = tl.zeros([BLOCK_M, BLOCK_HEAD], tl.float32)
    for part in tl.range(0, NUM_PARTS, loop_unroll_factor=8):
        weight = tl.sum(tl.where(parts == part, part_weights, 0.0), axis=1)
        prefix = tl.load(
            prefix_ptr
            + part * prefix_part_stride
            + tokens[:, None] * prefix_stride
            + place,
            mask=tile & (weight > 0)[:, None],
            other=0.0,
        )
        acc += weight[:, None] * prefix.to(tl.float32)

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
    tl.store(
        out_ptr + tokens[:, None] * out_stride + place,
        acc.to(out_ptr.dtype.element_ty),
        mask=tile,
    )


def merge_tree_attention(
    # [num_tokens, num_heads, head_size], written
    out: torch.Tensor,
    # [num_parts, num_tokens, num_heads, head_size], the first part may be `out` itself
    prefix: torch.Tensor,
    # [num_parts, num_heads, num_tokens] float32, natural logarithm, -inf where a part
    # has no keys
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
    """Join the attention among a request's query rows with that over its prefix.

    The prefix comes in one or more parts, each with the logarithm of its softmax's
    denominator. Row i of a tree request sees the query rows of its ancestor mask, row i
    of a causal one the rows [0, i]. The heads of a token must be contiguous.
    No host sync; safe under CUDA graph capture. CPU tensors take the reference unless
    `use_kernel`.
    """
    if not (use_kernel or out.is_cuda):
        reference.merge_tree_attention(
            out,
            prefix,
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
    for tensor in (out, prefix[0], query, key, value):
        assert tensor.stride()[1:] == (head_size, 1)
    num_kv_heads = key.shape[1]
    group = num_heads // num_kv_heads
    num_parts = prefix.shape[0]
    block_head = triton.next_power_of_2(head_size)
    # Small tiles while a batch of few requests must fill the device, larger ones when
    # reading the same keys again costs more.
    pairs = max_query_len * group
    num_tiles = (query_start_loc.shape[0] - 1) * num_kv_heads * triton.cdiv(pairs, 16)
    block_m = 16 if num_tiles <= 256 else 32
    if num_tiles > 512 and head_size <= 128:
        block_m = 64
    num_blocks = triton.cdiv(pairs, block_m)
    _merge_tree_attention_kernel[
        (query_start_loc.shape[0] - 1, num_kv_heads, num_blocks)
    ](
        out,
        out.stride(0),
        prefix,
        prefix.stride(0),
        prefix.stride(1),
        prefix_lse,
        prefix_lse.stride(0),
        prefix_lse.stride(1),
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
        BLOCK_HEAD=block_head,
        GROUP=group,
        NUM_WORDS=ancestors.shape[2],
        NUM_PARTS=num_parts,
        BLOCK_PARTS=triton.next_power_of_2(num_parts),
        BLOCK_M=block_m,
        BLOCK_N=64 if block_m == 16 and head_size <= 128 else 32,
        num_warps=4 if block_m == 32 and head_size <= 128 else 8,
    )
