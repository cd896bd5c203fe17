# SPDX-License-Identifier: Apache-2.0
"""The faster interpreter computes the same and leaves `triton.language` as it was."""

import inspect

import pytest
import torch
import triton
from ddtree_cpu_engine import interpreter_speed
from triton import language as tl


@triton.jit
def _add_halves(x, y):
    return tl.maximum(x, y) + tl.exp(x * 0.5)


@triton.jit
def _combine_rows_kernel(x_ptr, out_ptr, n, BLOCK_SIZE: tl.constexpr):
    row = tl.program_id(0)
    offsets = tl.arange(0, BLOCK_SIZE)
    x = tl.load(x_ptr + row * n + offsets, mask=offsets < n, other=float("-inf"))
    value, idx = tl.max(_add_halves(x, x * 2), axis=0, return_indices=True)
    if value > 0:
        idx = idx + tl.sum((x > 0).to(tl.int32))
    tl.store(out_ptr + row * 2, value)
    tl.store(out_ptr + row * 2 + 1, idx)


def combine_rows() -> torch.Tensor:
    torch.manual_seed(0)
    x = torch.randn(3, 50)
    out = torch.zeros(3, 2)
    _combine_rows_kernel[(3,)](x, out, 50, BLOCK_SIZE=64)
    return out


def language_members() -> list[tuple[str, int]]:
    return [
        (name, id(member))
        for package in (tl, tl.core, tl.math)
        for name, member in inspect.getmembers(package)
    ]


def test_results_do_not_change() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 50)
    combined = torch.maximum(x, 2 * x) + torch.exp(x * 0.5)
    values, indices = combined.max(dim=1)
    indices = torch.where(values > 0, indices + (x > 0).sum(dim=1), indices)
    expected = torch.stack([values, indices.float()], dim=1)

    interpreter_speed.install()
    torch.testing.assert_close(combine_rows(), expected)
    # Again, from the cached names.
    torch.testing.assert_close(combine_rows(), expected)


def test_a_launch_restores_the_language() -> None:
    interpreter_speed.install()
    combine_rows()
    before = language_members()
    combine_rows()
    assert language_members() == before
    assert interpreter_speed._launch is None


def test_a_failing_launch_restores_the_language() -> None:
    interpreter_speed.install()
    before = language_members()
    with pytest.raises(triton.runtime.errors.InterpreterError):
        _combine_rows_kernel[(1,)](None, None, 50, BLOCK_SIZE=64)
    assert language_members() == before
    assert interpreter_speed._launch is None
