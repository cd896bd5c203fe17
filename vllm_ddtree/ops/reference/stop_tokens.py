# SPDX-License-Identifier: Apache-2.0
"""The end of a walk at a stop token, one request at a time."""

from __future__ import annotations

import torch


def cut_at_stop(
    # [num_reqs, max_depth] int32
    path: torch.Tensor,
    # [num_reqs, max_depth + 1] int64
    sampled: torch.Tensor,
    # [num_reqs] int32
    num_sampled: torch.Tensor,
    # [num_reqs] slot of each request in the two tables
    idx_mapping: torch.Tensor,
    # [max_num_reqs, max_stop_tokens] int32
    stop_token_ids: torch.Tensor,
    # [max_num_reqs] int32, how many of a row are in use
    num_stop_token_ids: torch.Tensor,
) -> None:
    """End each walk at its first stop token, in place.

        for each request: find the first stop token among its sampled tokens
                          keep the tokens up to and with it
                          keep the rows before it: its own row was never needed,
                          it is the last token, as the bonus token is

    The rest becomes padding, -1. A walk without a stop token, or with one as its
    last token, stays as it is.
    """
    for req_idx, slot in enumerate(idx_mapping.tolist()):
        stops = set(stop_token_ids[slot, : int(num_stop_token_ids[slot])].tolist())
        tokens = sampled[req_idx, : int(num_sampled[req_idx])].tolist()
        for end, token in enumerate(tokens, 1):
            if token in stops:
                num_sampled[req_idx] = end
                sampled[req_idx, end:] = -1
                path[req_idx, end - 1 :] = -1
                break
