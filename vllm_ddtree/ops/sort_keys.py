# SPDX-License-Identifier: Apache-2.0
"""Integers that sort as floats do, so that one reduction yields value and index."""

from vllm.triton_utils import tl, triton


@triton.jit
def float_to_ordered(x):
    """Map float32 to int32 so that a < b iff their integers compare alike."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def ordered_to_float(ordered):
    """Invert `float_to_ordered`."""
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)
