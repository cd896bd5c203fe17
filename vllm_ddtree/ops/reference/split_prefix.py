# SPDX-License-Identifier: Apache-2.0
"""Reference of `ops.split_prefix`."""

import math

import torch


def split_prefix(
    prefix_len: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    unit: int,
    part_lens: torch.Tensor,
    part_blocks: torch.Tensor,
) -> None:
    """Deal the units of a prefix out in runs, the first parts first."""
    num_parts = part_lens.shape[0]
    length = int(prefix_len)
    share = math.ceil(math.ceil(length / (block_size * unit)) / num_parts) * unit
    part_blocks.zero_()
    for part in range(num_parts):
        first = part * share
        tokens = min(max(length - first * block_size, 0), share * block_size)
        blocks = block_table[first : first + math.ceil(tokens / block_size)]
        part_lens[part] = tokens
        part_blocks[part, : len(blocks)] = blocks
