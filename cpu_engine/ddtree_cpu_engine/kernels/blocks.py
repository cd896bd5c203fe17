# SPDX-License-Identifier: Apache-2.0
"""Rows of logits as NumPy arrays, cut into the blocks of a kernel's grid."""

import numpy as np
import torch


def float_row(tensor: torch.Tensor) -> np.ndarray:
    """A float32 array of `tensor` [N]; a view where it is float32 already."""
    return tensor.to(torch.float32).numpy()


def split_blocks(row: np.ndarray, block_size: int) -> np.ndarray:
    """[N] -> [ceil(N / block_size), block_size], padded with -inf."""
    padding = -len(row) % block_size
    if padding:
        row = np.concatenate([row, np.full(padding, -np.inf, dtype=row.dtype)])
    return row.reshape(-1, block_size)


def block_argmax(row: np.ndarray, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Maximum of each block and its leftmost index in `row`, skipping NaN."""
    blocks = split_blocks(row, block_size)
    if np.isnan(blocks).any():
        blocks = np.where(np.isnan(blocks), -np.inf, blocks).astype(row.dtype)
    local = blocks.argmax(axis=1)
    values = np.take_along_axis(blocks, local[:, None], axis=1)[:, 0]
    return values, local + np.arange(len(blocks)) * block_size


def block_logsumexp_parts(
    row: np.ndarray, block_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Maximum of each block, and the sum of exp(x - maximum), 0 for an empty block."""
    blocks = split_blocks(row, block_size)
    maxes = np.fmax.reduce(blocks, axis=1)
    with np.errstate(invalid="ignore"):
        sums = np.exp(blocks - maxes[:, None]).sum(axis=1)
    return maxes, np.where(maxes > -np.inf, sums, _ZERO)


_ZERO = np.float32(0.0)
