# SPDX-License-Identifier: Apache-2.0
"""Moving the accepted path into place, byte by byte and row by row."""

from __future__ import annotations

import ctypes

import torch


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
) -> None:
    """Move each accepted row of the KV cache to where plain decoding would put it.

    Row i of a request's tree was written at storage position L + i, where L is
    `root_positions[r]`. The path a_1 < a_2 < ... < a_m holds the m = num_sampled - 1
    accepted rows; row a_j moves to position L + j. Its key was rotated for position
    L + depth(a_j) = L + j, so the moved bytes are those of a plain decode. As
    a_j >= j, sources and destinations may overlap: all rows are read before any is
    written. Rows already in place are not touched.

    A *plane* is what one address and two strides describe: the K or the V of one
    layer, or one KV head of it if heads lie outside the slots. Storage position p of
    request r is the `row_bytes` bytes at

        plane + block_table[r, p // block_size] * block_stride
              + p % block_size * slot_stride

    with strides in bytes. The bytes are moved as they are, so any cache dtype works.
    A request with num_sampled <= 1 accepted nothing.
    """
    for req_idx, count in enumerate(num_sampled.tolist()):
        root = int(root_positions[req_idx])
        moves = [
            (root + row, root + depth)
            for depth, row in enumerate(path[req_idx].tolist()[: max(count - 1, 0)], 1)
            if row != depth
        ]

        def address(plane: int, pos: int, table: torch.Tensor) -> int:
            block = int(table[pos // block_size])
            return plane + block * block_stride + pos % block_size * slot_stride

        table = block_table[req_idx]
        for plane in plane_ptrs.tolist():
            rows = [
                ctypes.string_at(address(plane, source, table), row_bytes)
                for source, _ in moves
            ]
            for (_, destination), row in zip(moves, rows, strict=True):
                ctypes.memmove(address(plane, destination, table), row, row_bytes)


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
) -> torch.Tensor:
    """Index that brings hidden states into path order: `hidden[index]`.

    The tokens of request r in the batch are `query_start_loc[r] ..
    query_start_loc[r + 1]`. The last `cu_num_logits[r + 1] - cu_num_logits[r]` of
    them are its verify rows, root first; what comes before (a prefill chunk) keeps
    its place. In place of the first num_sampled[r] rows the index has the root and
    then the path; everywhere else, past the last request too, it is the identity.
    Returns `[num_tokens]` int64, the start of `out` if given.
    """
    index = torch.arange(num_tokens, device=path.device)
    ends = query_start_loc[1:].tolist()
    num_rows = cu_num_logits.diff().tolist()
    for req_idx, count in enumerate(num_sampled.tolist()):
        root = ends[req_idx] - num_rows[req_idx]
        for depth in range(1, min(count, num_rows[req_idx])):
            index[root + depth] = root + path[req_idx, depth - 1]
    if out is None:
        return index
    out[:num_tokens] = index
    return out[:num_tokens]
