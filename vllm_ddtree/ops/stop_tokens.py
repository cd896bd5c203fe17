# SPDX-License-Identifier: Apache-2.0
"""A walk ends at the first token that ends its request."""

import torch
from vllm.triton_utils import tl, triton

from vllm_ddtree.ops.reference.stop_tokens import cut_at_stop as cut_at_stop_reference


@triton.jit
def _cut_at_stop_kernel(
    # [num_reqs, MAX_DEPTH]
    path_ptr,
    # [num_reqs, MAX_DEPTH + 1]
    sampled_ptr,
    # [num_reqs]
    num_sampled_ptr,
    idx_mapping_ptr,
    # [max_num_reqs, max_stop_tokens]
    stop_token_ids_ptr,
    stop_token_ids_stride,
    # [max_num_reqs]
    num_stop_token_ids_ptr,
    MAX_DEPTH: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
):
    req_idx = tl.program_id(0).to(tl.int64)
    req_state_idx = tl.load(idx_mapping_ptr + req_idx).to(tl.int64)
    num_stop_token_ids = tl.load(num_stop_token_ids_ptr + req_state_idx)
    num_sampled = tl.load(num_sampled_ptr + req_idx)
    path_ptr += req_idx * MAX_DEPTH
    sampled_ptr += req_idx * (MAX_DEPTH + 1)
    stop_token_ids_ptr += req_state_idx * stop_token_ids_stride

    levels = tl.arange(0, BLOCK_DEPTH)
    is_sampled = levels < num_sampled
    tokens = tl.load(sampled_ptr + levels, mask=is_sampled, other=-1)
    end = num_sampled
    # Most requests have one: the end of sequence.
    for i in range(num_stop_token_ids):
        is_stop = is_sampled & (tokens == tl.load(stop_token_ids_ptr + i))
        end = tl.minimum(end, tl.min(tl.where(is_stop, levels + 1, num_sampled)))

    tl.store(num_sampled_ptr + req_idx, end)
    # The stop token becomes the bonus token, so its row leaves the path with the rest.
    is_cut = is_sampled & (levels >= end)
    tl.store(sampled_ptr + levels, -1, mask=is_cut)
    tl.store(path_ptr + levels - 1, -1, mask=is_cut)


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
    *,
    use_kernel: bool = False,
) -> None:
    """End each walk at its first stop token, in place.

    `path`, `sampled` and `num_sampled` are what `walk_tree` returned. A stop token
    among the accepted ones becomes the bonus token: `num_sampled` counts up to and
    with it, its row and all later ones leave `path`, all later tokens leave
    `sampled`, and what is left over is padding, -1. So the token counts as one the
    target chose and not as an accepted draft, and nothing after it counts at all.
    No host sync. CPU tensors take the reference unless `use_kernel`.
    """
    args = (path, sampled, num_sampled, idx_mapping, stop_token_ids, num_stop_token_ids)
    if path.device.type == "cpu" and not use_kernel:
        cut_at_stop_reference(*args)
        return
    num_reqs, max_depth = path.shape
    if num_reqs == 0:
        return
    _cut_at_stop_kernel[(num_reqs,)](
        path,
        sampled,
        num_sampled,
        idx_mapping,
        stop_token_ids,
        stop_token_ids.stride(0),
        num_stop_token_ids,
        MAX_DEPTH=max_depth,
        BLOCK_DEPTH=triton.next_power_of_2(max_depth + 1),
        num_warps=1,
    )
