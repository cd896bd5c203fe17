# SPDX-License-Identifier: Apache-2.0
"""Top-k log-probabilities of a vocabulary that is split over ranks."""

from __future__ import annotations

import torch


def local_top_k(
    # [num_rows, shard_size] any float dtype
    logits: torch.Tensor,
    k: int,
    vocab_start: int,
) -> torch.Tensor:
    """Summarise a vocabulary shard: `[num_rows, 2 * k + 1]` float32 for one gather.

    Columns 0 .. k - 1 are the k largest logits, descending; columns k .. 2k - 1 their
    token ids, int32 bits in a float32 place; the last column is the log-sum-exp of
    the shard. Column j of `logits` is token `vocab_start + j`. Equal logits are
    ordered by lower id; NaN counts as -inf, and -0 equals 0. A shard smaller than k
    is padded with value -inf and id -1.

    Together with `merge_top_k` this is the top-k of the whole vocabulary with
    log-probabilities normalised over all of it, K = min(B, |V|) of Lemma 1 of arXiv
    2604.12989, for 2k + 1 numbers a row on the wire.
    """
    num_rows, shard_size = logits.shape
    values = logits.float()
    values = torch.where(values.isnan(), -torch.inf, values + 0.0)
    count = min(k, shard_size)
    # A stable sort keeps equal values in the order of their ids.
    top = torch.sort(values, dim=-1, descending=True, stable=True)
    packed = torch.full((num_rows, 2 * k + 1), -torch.inf, device=logits.device)
    packed[:, :count] = top.values[:, :count]
    ids = torch.full((num_rows, k), -1, dtype=torch.int32, device=logits.device)
    ids[:, :count] = top.indices[:, :count] + vocab_start
    packed[:, k : 2 * k] = ids.view(torch.float32)
    packed[:, 2 * k] = values.logsumexp(-1)
    return packed


def merge_top_k(
    # [num_rows, num_shards, 2 * k + 1] float32, from local_top_k
    packed: torch.Tensor,
    k: int,
    # [draft_vocab_size] target id of each draft id
    token_map: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Top-k of the whole vocabulary from the summaries of its shards.

    Returns `tokens` [num_rows, k] int64 and `log_probs` [num_rows, k] float32,
    descending, equal logits ordered by lower id. The log-probabilities are normalised
    in float32 over the full vocabulary. Places that no shard could fill hold token
    -1 and -inf. `token_map` renames the tokens at the very end, so ties are ordered
    by draft id.
    """
    values = packed[:, :, :k].flatten(1)
    ids = packed[:, :, k : 2 * k].contiguous().view(torch.int32).flatten(1)
    # Two stable sorts: by id with padding last, then by value.
    by_id = torch.where(ids < 0, torch.iinfo(torch.int32).max, ids)
    order = torch.sort(by_id, dim=-1, stable=True).indices
    by_value = values.gather(1, order)
    order = order.gather(
        1, torch.sort(by_value, dim=-1, descending=True, stable=True).indices
    )[:, :k]
    log_z = packed[:, :, 2 * k].logsumexp(-1, keepdim=True)
    top = values.gather(1, order)
    log_probs = torch.where(top == -torch.inf, -torch.inf, top - log_z)
    tokens = ids.gather(1, order).long()
    if token_map is not None:
        tokens = torch.where(tokens < 0, -1, token_map[tokens.clamp(min=0)])
    return tokens, log_probs


def top_k_log_probs(
    # [num_rows, vocab_size] any float dtype
    logits: torch.Tensor,
    k: int,
    # [draft_vocab_size] target id of each draft id
    token_map: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Top-k of an unsplit vocabulary: one shard, merged."""
    return merge_top_k(local_top_k(logits, k, 0)[:, None], k, token_map)
