# SPDX-License-Identifier: Apache-2.0
"""Tree attention on a GPU, as the engine calls it, against float32."""

import itertools

import pytest
import torch

from benchmarks.attention import MAX_RMS_RATIO, relative_error
from benchmarks.attention_peers import AttentionCase, AttentionShape, peers

CONTEXTS = (1, 15, 16, 17, 127, 1000, 8192)
WIDTHS = (16, 31, 33, 64, 128, 256)


@pytest.mark.gpu
@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("block_size", [16, 64])
def test_tree_and_causal_equal_float32(head_size: int, block_size: int) -> None:
    device = torch.device("cuda")
    for context, num_rows in itertools.product(CONTEXTS, WIDTHS):
        shape = AttentionShape(3, context, num_rows, 16, 4, head_size, block_size)
        case = AttentionCase(shape, device, seed=0)
        # Stock FlashAttention is the measure of what bfloat16 allows.
        errors = {
            name: relative_error(peers(device)[name](case)(), case.expected(name))
            for name in ("causal", "tree")
        }
        limit = max(MAX_RMS_RATIO["tree"], 1.2 * errors["causal"])
        assert errors["tree"] <= limit, (shape, errors)


@pytest.mark.gpu
def test_xformers_agrees() -> None:
    """A second oracle, by other authors."""
    pytest.importorskip("xformers")
    device = torch.device("cuda")
    shape = AttentionShape(2, 512, 64, 32, 8, 128, 16)
    case = AttentionCase(shape, device, seed=0)
    ours = peers(device)["tree"](case)().clone()
    theirs = peers(device)["xformers"](case)()
    assert relative_error(theirs, ours) < MAX_RMS_RATIO["xformers"]
