# SPDX-License-Identifier: Apache-2.0
"""A scalar comparison works as part of a mask."""

import pytest
import torch
import triton
from ddtree_cpu_engine import interpreter_masks
from triton import language as tl


@triton.jit
def _store_row_kernel(out_ptr, idx_ptr, n, BLOCK_SIZE: tl.constexpr):
    idx = tl.load(idx_ptr).to(tl.int64)
    offsets = tl.arange(0, BLOCK_SIZE)
    tl.store(out_ptr + offsets, offsets, mask=(idx >= 0) & (offsets < n))


@pytest.mark.parametrize(
    ("idx", "expected"), [(3, [0, 1, 2, -1, -1]), (-1, [-1, -1, -1, -1, -1])]
)
def test_comparison_in_a_mask(idx: int, expected: list[int]) -> None:
    interpreter_masks.install()
    out = torch.full((5,), -1)
    _store_row_kernel[(1,)](out, torch.tensor([idx]), 3, BLOCK_SIZE=8)
    assert out.tolist() == expected
