# SPDX-License-Identifier: Apache-2.0
"""Cut the cached prefix of one request into parts that are attended to side by side."""

import torch
from vllm.triton_utils import tl, triton

from vllm_ddtree.ops.reference import split_prefix as reference


@triton.jit
def _split_prefix_kernel(
    # [1]
    prefix_len_ptr,
    # [max_num_blocks]
    block_table_ptr,
    max_num_blocks,
    # [NUM_PARTS]
    part_lens_ptr,
    # [NUM_PARTS, width]
    part_blocks_ptr,
    width,
    BLOCK_SIZE: tl.constexpr,
    UNIT: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    part = tl.program_id(0)
    prefix_len = tl.load(prefix_len_ptr)
    num_units = tl.cdiv(prefix_len, BLOCK_SIZE * UNIT)
    blocks_per_part = tl.cdiv(num_units, NUM_PARTS) * UNIT
    first = part * blocks_per_part
    part_len = tl.minimum(prefix_len - first * BLOCK_SIZE, blocks_per_part * BLOCK_SIZE)
    part_len = tl.maximum(part_len, 0)
    num_blocks = tl.cdiv(part_len, BLOCK_SIZE)
    tl.store(part_lens_ptr + part, part_len)
    for start in range(0, width, BLOCK):
        i = start + tl.arange(0, BLOCK)
        blocks = tl.load(
            block_table_ptr + first + i,
            mask=(i < num_blocks) & (first + i < max_num_blocks),
            other=0,
        )
        tl.store(part_blocks_ptr + part * width + i, blocks, mask=i < width)


def part_width(max_num_blocks: int, num_parts: int, unit: int) -> int:
    """Blocks that a part of the longest prefix has."""
    return triton.cdiv(triton.cdiv(max_num_blocks, unit), num_parts) * unit


def split_prefix(
    # [1] int32
    prefix_len: torch.Tensor,
    # [max_num_blocks] int32
    block_table: torch.Tensor,
    block_size: int,
    # Blocks that stay together
    unit: int,
    # [num_parts] int32, written: tokens of every part
    part_lens: torch.Tensor,
    # [num_parts, part_width(...)] int32, written: blocks of every part, padding 0
    part_blocks: torch.Tensor,
    *,
    use_kernel: bool = False,
) -> None:
    """Give every part an equal share of the prefix, in whole units but for the last.

    The parts of a short prefix that get nothing come last. No host sync; safe under
    CUDA graph capture. CPU tensors take the reference unless `use_kernel`.
    """
    num_parts, width = part_blocks.shape
    assert width == part_width(block_table.shape[0], num_parts, unit)
    if not (use_kernel or prefix_len.is_cuda):
        reference.split_prefix(
            prefix_len, block_table, block_size, unit, part_lens, part_blocks
        )
        return
    _split_prefix_kernel[(num_parts,)](
        prefix_len,
        block_table,
        block_table.shape[0],
        part_lens,
        part_blocks,
        width,
        BLOCK_SIZE=block_size,
        UNIT=unit,
        NUM_PARTS=num_parts,
        BLOCK=1024,
    )
