# SPDX-License-Identifier: Apache-2.0
"""vLLM's keyed Gumbel noise for one row of the vocabulary, bit for bit, in NumPy.

NumPy and not torch, because the interpreter computes with NumPy: its float32
logarithm differs from torch's in the last bit, and a sampled token may hang on that.
"""

from functools import cache

import numpy as np

_MASK32 = 0xFFFFFFFF
# Keeps the draft's noise apart from the target's (vLLM's _DRAFT_NOISE_SALT).
_DRAFT_NOISE_SALT = 1 << 30
# The second half of a 64-bit draw.
_HIGH_DOMAIN = 0x9E3779B9

_F32 = np.float32
# 1/8, 1/7, ..., 1/2: the series of -log(1 - x) / x.
_LOG1P_SERIES = tuple(_F32(1.0 / n) for n in range(8, 1, -1))


def gumbel_noise(
    seed: int, pos: int, num_keys: int, is_drafting: bool, use_fp64: bool
) -> np.ndarray:
    """Noise of the keys `0 .. num_keys - 1`, [num_keys] float32 or float64."""
    if is_drafting:
        pos += _DRAFT_NOISE_SALT
    if use_fp64:
        return -np.log(-np.log(uniform64(seed, pos, num_keys)))
    return -np.log(-_log1p_neg(uniform32(seed, pos, num_keys)))


def uniform32(seed: int, pos: int, num_keys: int) -> np.ndarray:
    """[num_keys] float32 in (0, 1)."""
    bits = murmur3_hash32(seed, pos, num_keys)
    high = (bits >> np.uint32(16)).astype(_F32)
    low = (bits & np.uint32(0xFFFF)).astype(_F32)
    return high * _F32(2**-16) + (low + _F32(0.5)) * _F32(2**-32)


def uniform64(seed: int, pos: int, num_keys: int) -> np.ndarray:
    """[num_keys] float64 in (0, 1)."""
    low: np.ndarray = murmur3_hash32(seed, pos, num_keys).astype(np.uint64)
    high: np.ndarray = murmur3_hash32(seed, pos, num_keys, _HIGH_DOMAIN).astype(
        np.uint64
    )
    random53 = ((high << np.uint64(32)) | low) >> np.uint64(11)
    uniform = (random53.astype(np.float64) + 0.5) * 2**-53
    return np.where(uniform == 1.0, uniform - 2**-53, uniform)


def murmur3_hash32(seed: int, pos: int, num_keys: int, domain: int = 0) -> np.ndarray:
    """Murmur3 of (seed, pos, key) for the keys `0 .. num_keys - 1`, uint32."""
    prefix = domain
    for word in (seed, seed >> 32, pos):
        prefix = _mix(prefix, _scramble(word & _MASK32))
    h = _rotl(_scrambled_keys(num_keys) ^ np.uint32(prefix), 13)
    h *= np.uint32(5)
    h += np.uint32(0xE6546B64)
    h ^= np.uint32(16)
    h ^= h >> np.uint32(16)
    h *= np.uint32(0x85EBCA6B)
    h ^= h >> np.uint32(13)
    h *= np.uint32(0xC2B2AE35)
    h ^= h >> np.uint32(16)
    return h


@cache
def _scrambled_keys(num_keys: int) -> np.ndarray:
    keys = np.arange(num_keys, dtype=np.uint32) * np.uint32(0xCC9E2D51)
    return _rotl(keys, 15) * np.uint32(0x1B873593)


def _rotl(values: np.ndarray, shift: int) -> np.ndarray:
    return (values << np.uint32(shift)) | (values >> np.uint32(32 - shift))


def _rotl_int(value: int, shift: int) -> int:
    return ((value << shift) | (value >> (32 - shift))) & _MASK32


def _scramble(word: int) -> int:
    return (_rotl_int(word * 0xCC9E2D51 & _MASK32, 15) * 0x1B873593) & _MASK32


def _mix(h: int, scrambled: int) -> int:
    return (_rotl_int(h ^ scrambled, 13) * 5 + 0xE6546B64) & _MASK32


def _log1p_neg(values: np.ndarray) -> np.ndarray:
    """log(1 - values), by series below 1/4 as vLLM does."""
    polynomial = np.full_like(values, _LOG1P_SERIES[0])
    for coefficient in _LOG1P_SERIES[1:]:
        polynomial *= values
        polynomial += coefficient
    polynomial *= values
    polynomial += _F32(1.0)
    direct = np.log(np.maximum(_F32(1.0) - values, _F32(2**-24)))
    return np.where(values < _F32(0.25), -values * polynomial, direct)
