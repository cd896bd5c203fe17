# SPDX-License-Identifier: Apache-2.0
"""Reference of `ops.tree_attention`: the oracle, and the CPU engine's attention."""

import itertools

import torch

from vllm_ddtree.tree import WORD_BITS


def tree_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    tree_slots: torch.Tensor,
    ancestors: torch.Tensor,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Attention of every query row over its own context, in float32.

    With C = seq_len - query_len cached tokens, query row i of a causal request sees
    the keys [0, C + i]. Row i of a tree request sees the whole prefix [0, C) and, of
    the query rows, its ancestors and itself, as the bits of `ancestors` say.
    """
    starts = query_start_loc.tolist()
    for req_idx, seq_len in enumerate(seq_lens.tolist()):
        begin, end = starts[req_idx], starts[req_idx + 1]
        if begin == end:
            continue
        rows = torch.arange(end - begin)
        slot = int(tree_slots[req_idx])
        if slot < 0:
            among_queries = rows <= rows[:, None]
        else:
            among_queries = _visible_rows(ancestors[slot], end - begin)
        prefix = torch.ones(end - begin, seq_len - (end - begin), dtype=torch.bool)
        mask = torch.cat([prefix, among_queries], dim=1)
        keys, values = _gather_kv(kv_cache, block_table[req_idx], seq_len)
        out[begin:end] = _attend(query[begin:end], keys, values, mask, scale)


def merge_tree_attention(
    out: torch.Tensor,
    prefix: torch.Tensor,
    prefix_lse: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_start_loc: torch.Tensor,
    tree_slots: torch.Tensor,
    ancestors: torch.Tensor,
    scale: float,
) -> None:
    """Join the attention among a request's query rows with that over its prefix.

    Every part of the prefix, and the query rows as one more, comes with its own softmax
    and the logarithm of that softmax's denominator. The whole softmax is the average of
    the parts weighted by their denominators:
    out = sum_p exp(lse_p) out_p / sum_p exp(lse_p).
    """
    starts = query_start_loc.tolist()
    group = query.shape[1] // key.shape[1]
    for req_idx, (begin, end) in enumerate(itertools.pairwise(starts)):
        if begin == end:
            continue
        rows = torch.arange(end - begin)
        slot = int(tree_slots[req_idx])
        visible = rows <= rows[:, None]
        if slot >= 0:
            visible = _visible_rows(ancestors[slot], end - begin)
        queries = query[begin:end].float().transpose(0, 1)
        keys, values = (
            x[begin:end].float().transpose(0, 1).repeat_interleave(group, 0)
            for x in (key, value)
        )
        scores = queries @ keys.transpose(-1, -2) * scale
        scores = scores.masked_fill(~visible, -torch.inf)
        lse = scores.logsumexp(dim=-1)
        among = scores.softmax(dim=-1) @ values
        weights = torch.cat([prefix_lse[:, :, begin:end], lse[None]]).softmax(dim=0)
        attended = torch.cat(
            [prefix[:, begin:end].float().transpose(1, 2), among[None]]
        )
        # A part without keys may hold anything.
        attended = torch.where(weights[..., None] > 0, attended, 0.0)
        merged = (weights[..., None] * attended).sum(dim=0)
        out[begin:end] = merged.transpose(0, 1).to(out.dtype)


def _visible_rows(ancestors: torch.Tensor, num_rows: int) -> torch.Tensor:
    """`[num_rows, num_rows]` bool from the bit masks `[width, num_words]`."""
    rows = torch.arange(num_rows)
    words = ancestors[:num_rows][:, rows // WORD_BITS]
    return (words >> (rows % WORD_BITS)) & 1 == 1


def _gather_kv(
    # [num_blocks, num_kv_heads, block_size, 2 * head_size]
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_len: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values `[num_kv_heads, seq_len, head_size]` of one request."""
    block_size = kv_cache.shape[2]
    blocks = block_table[: -(-seq_len // block_size)].long()
    kv = kv_cache[blocks].transpose(0, 1).flatten(1, 2)[:, :seq_len]
    keys, values = kv.float().chunk(2, dim=-1)
    return keys, values


def _attend(
    # [num_rows, num_heads, head_size]
    query: torch.Tensor,
    # [num_kv_heads, seq_len, head_size]
    keys: torch.Tensor,
    values: torch.Tensor,
    # [num_rows, seq_len]
    mask: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    num_rows, num_heads, head_size = query.shape
    num_kv_heads = keys.shape[0]
    # Query heads of one KV head are consecutive.
    grouped = query.float().view(num_rows, num_kv_heads, -1, head_size)
    grouped = grouped.permute(1, 2, 0, 3)
    scores = grouped @ keys[:, None].transpose(-1, -2) * scale
    weights = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1)
    attended = (weights @ values[:, None]).permute(2, 0, 1, 3)
    return attended.reshape(num_rows, num_heads, head_size).to(query.dtype)
