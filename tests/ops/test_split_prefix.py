# SPDX-License-Identifier: Apache-2.0
"""The parts of a prefix, put together, are the prefix."""

import torch
from cases import property_of
from hypothesis import strategies as st

from vllm_ddtree.ops.reference import split_prefix as reference
from vllm_ddtree.ops.split_prefix import part_width, split_prefix


@property_of(
    1,
    block_size=st.sampled_from([16, 32, 64, 128, 144]),
    num_parts=st.integers(1, 32),
    max_num_blocks=st.integers(1, 300),
    fill=st.floats(0, 1),
)
def test_parts_are_the_prefix(device, rng, block_size, num_parts, max_num_blocks, fill):
    unit = max(1, 128 // block_size)
    length = round(fill * max_num_blocks * block_size)
    table = torch.from_numpy(rng.permutation(1000)[:max_num_blocks]).int()
    width = part_width(max_num_blocks, num_parts, unit)
    results = []
    for use_kernel in (True, False):
        lens = torch.full((num_parts,), -7, dtype=torch.int32)
        blocks = torch.full((num_parts, width), -7, dtype=torch.int32)
        prefix_len = torch.tensor([length], dtype=torch.int32)
        if use_kernel:
            moved = [x.to(device) for x in (prefix_len, table, lens, blocks)]
            prefix_len, table_there, lens, blocks = moved
            split_prefix(
                prefix_len,
                table_there,
                block_size,
                unit,
                lens,
                blocks,
                use_kernel=True,
            )
        else:
            reference.split_prefix(prefix_len, table, block_size, unit, lens, blocks)
        results.append((lens.cpu(), blocks.cpu()))
    (lens, blocks), (wanted_lens, wanted_blocks) = results
    assert torch.equal(lens, wanted_lens)
    assert torch.equal(blocks, wanted_blocks)

    assert int(lens.sum()) == length
    # A part ends within a block only where the prefix ends.
    is_last = lens.cumsum(0) == length
    assert (lens[~is_last] % (unit * block_size) == 0).all()
    used = [
        row[: -(-int(n) // block_size)] for row, n in zip(blocks, lens, strict=True)
    ]
    assert torch.equal(torch.cat(used), table[: -(-length // block_size)])
    # Equal shares, in units.
    assert int(lens.max()) <= -(-length // (num_parts * unit * block_size)) * (
        unit * block_size
    )
