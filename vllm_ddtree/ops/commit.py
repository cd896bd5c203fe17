# SPDX-License-Identifier: Apache-2.0
"""Commit of the accepted path: KV rows of all layers in one launch, and the index
which brings hidden states into the same order."""

import math

import torch
from vllm.triton_utils import tl, triton

from vllm_ddtree.ops.reference.commit import commit_kv as commit_kv_reference
from vllm_ddtree.ops.reference.commit import path_index as path_index_reference

_WORD_DTYPES = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
_MAX_TILE = 2048
_BLOCK_TOKENS = 256


@triton.jit
def _commit_kv_kernel(
    # [num_planes] byte addresses
    plane_ptrs_ptr,
    # in words
    block_stride,
    slot_stride,
    row_words,
    # [num_reqs, max_blocks]
    block_table_ptr,
    block_table_stride,
    block_size,
    # [num_reqs]
    root_positions_ptr,
    # [num_reqs, max_depth]
    path_ptr,
    path_stride,
    # [num_reqs]
    num_sampled_ptr,
    WORD: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
):
    req_idx = tl.program_id(0).to(tl.int64)
    num_accepted = tl.load(num_sampled_ptr + req_idx) - 1
    if num_accepted <= 0:
        return
    depths = tl.arange(0, BLOCK_DEPTH)
    is_path = depths < num_accepted
    rows = tl.load(path_ptr + req_idx * path_stride + depths, mask=is_path, other=-1)
    moves = is_path & (rows != depths + 1)
    if tl.max(moves.to(tl.int32), axis=0) == 0:
        return

    root = tl.load(root_positions_ptr + req_idx).to(tl.int64)
    block_table_ptr += req_idx * block_table_stride
    plane = tl.load(plane_ptrs_ptr + tl.program_id(1)).to(tl.pointer_type(WORD))
    words = tl.program_id(2) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
    mask = moves[:, None] & (words < row_words)[None, :]

    source = root + rows
    block = tl.load(block_table_ptr + source // block_size, mask=moves, other=0)
    source = block.to(tl.int64) * block_stride + source % block_size * slot_stride
    tile = tl.load(plane + source[:, None] + words[None, :], mask=mask)
    target = root + depths + 1
    block = tl.load(block_table_ptr + target // block_size, mask=moves, other=0)
    target = block.to(tl.int64) * block_stride + target % block_size * slot_stride
    # A row may be the source of one move and the target of another.
    tl.debug_barrier()
    tl.store(plane + target[:, None] + words[None, :], tile, mask=mask)


@triton.jit
def _index_path_kernel(
    # [num_reqs, max_depth]
    path_ptr,
    path_stride,
    # [num_reqs]
    num_sampled_ptr,
    # [num_reqs + 1]
    query_start_loc_ptr,
    # [num_reqs + 1]
    cu_num_logits_ptr,
    # [num_tokens]
    out_ptr,
    num_reqs,
    num_tokens,
    SEARCH_STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # The last request that starts at or before the token, found by bisection.
    req_idx = tl.zeros([BLOCK], dtype=tl.int32)
    step = 1 << SEARCH_STEPS
    for _ in range(SEARCH_STEPS + 1):
        probe = req_idx + step
        in_batch = probe < num_reqs
        start = tl.load(query_start_loc_ptr + probe, mask=in_batch, other=0)
        req_idx = tl.where(in_batch & (start <= tokens), probe, req_idx)
        step = step >> 1

    end = tl.load(query_start_loc_ptr + req_idx + 1)
    num_rows = tl.load(cu_num_logits_ptr + req_idx + 1)
    num_rows -= tl.load(cu_num_logits_ptr + req_idx)
    depth = tokens - (end - num_rows)
    num_sampled = tl.load(num_sampled_ptr + req_idx)
    is_path = (depth > 0) & (depth < num_sampled) & (tokens < end)
    row = path_ptr + req_idx.to(tl.int64) * path_stride + depth - 1
    row = tl.load(row, mask=is_path, other=0)
    index = tl.where(is_path, end - num_rows + row, tokens)
    tl.store(out_ptr + tokens, index.to(tl.int64), mask=tokens < num_tokens)


def commit_kv(
    # [num_planes] int64 byte addresses
    plane_ptrs: torch.Tensor,
    block_stride: int,
    slot_stride: int,
    row_bytes: int,
    # [num_reqs, max_blocks]
    block_table: torch.Tensor,
    block_size: int,
    # [num_reqs] storage position of the root row
    root_positions: torch.Tensor,
    # [num_reqs, max_depth]
    path: torch.Tensor,
    # [num_reqs]
    num_sampled: torch.Tensor,
    *,
    word_bytes: int | None = None,
    use_kernel: bool = False,
) -> None:
    """Move row `path[r, j]` of every plane to row j + 1, for each accepted j.

    Storage position p of request r is the `row_bytes` bytes at
    `plane + block_table[r, p // block_size] * block_stride + p % block_size *
    slot_stride`; strides are in bytes. All rows are read before any is written, rows
    in place are skipped, and an identity path costs a return. The cache is changed
    in place, as raw bytes.

    Args:
        word_bytes: unit of the copy, which must divide the addresses, strides and
            `row_bytes`. None is the largest of 8, 4, 2, 1 that divides the strides
            and `row_bytes`, right whenever the planes are views of one allocation
            at multiples of those.

    One launch, no host sync, safe under CUDA graph capture. CPU tensors take the
    reference unless `use_kernel`.
    """
    if plane_ptrs.device.type == "cpu" and not use_kernel:
        commit_kv_reference(
            plane_ptrs,
            block_stride,
            slot_stride,
            row_bytes,
            block_table,
            block_size,
            root_positions,
            path,
            num_sampled,
        )
        return
    num_reqs, max_depth = path.shape
    if num_reqs == 0 or max_depth == 0:
        return
    unit = word_bytes or math.gcd(8, block_stride, slot_stride, row_bytes)
    row_words = row_bytes // unit
    block_depth = triton.next_power_of_2(max_depth)
    block_words = min(triton.next_power_of_2(row_words), _MAX_TILE // block_depth)
    num_chunks = triton.cdiv(row_words, block_words)
    _commit_kv_kernel[(num_reqs, plane_ptrs.shape[0], num_chunks)](
        plane_ptrs,
        block_stride // unit,
        slot_stride // unit,
        row_words,
        block_table,
        block_table.stride(0),
        block_size,
        root_positions,
        path,
        path.stride(0),
        num_sampled,
        WORD=_WORD_DTYPES[unit],
        BLOCK_DEPTH=block_depth,
        BLOCK_WORDS=block_words,
        num_warps=4,
    )


def path_index(
    # [num_reqs, max_depth]
    path: torch.Tensor,
    # [num_reqs]
    num_sampled: torch.Tensor,
    # [num_reqs + 1]
    query_start_loc: torch.Tensor,
    # [num_reqs + 1]
    cu_num_logits: torch.Tensor,
    num_tokens: int,
    # [>= num_tokens] int64
    out: torch.Tensor | None = None,
    *,
    use_kernel: bool = False,
) -> torch.Tensor:
    """Index that brings hidden states into path order: `hidden[index]`.

    A request's verify rows are the last `cu_num_logits[r + 1] - cu_num_logits[r]` of
    its tokens. The first num_sampled[r] of them become the root and the path; every
    other token, padding included, keeps its place.
    Returns `[num_tokens]` int64, the start of `out` if given, which is written in
    place. No host sync; safe under CUDA graph capture. CPU tensors take the
    reference unless `use_kernel`.
    """
    if path.device.type == "cpu" and not use_kernel:
        return path_index_reference(
            path, num_sampled, query_start_loc, cu_num_logits, num_tokens, out
        )
    if out is None:
        out = torch.empty(num_tokens, dtype=torch.int64, device=path.device)
    index = out[:num_tokens]
    num_reqs = path.shape[0]
    if num_reqs == 0:
        return torch.arange(num_tokens, out=index)
    if num_tokens == 0:
        return index
    _index_path_kernel[(triton.cdiv(num_tokens, _BLOCK_TOKENS),)](
        path,
        path.stride(0),
        num_sampled,
        query_start_loc,
        cu_num_logits,
        index,
        num_reqs,
        num_tokens,
        SEARCH_STEPS=max(num_reqs - 1, 0).bit_length(),
        BLOCK=_BLOCK_TOKENS,
    )
    return index
