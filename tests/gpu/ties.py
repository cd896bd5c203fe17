# SPDX-License-Identifier: Apache-2.0
"""Whether two greedy outputs in bfloat16 differ only where two tokens tie."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# In nats. Beyond it, a different choice is an error and not a rounding.
MAX_GAP = 0.25


@dataclass(frozen=True)
class Divergence:
    """The first difference between a prompt's outputs."""

    prompt: int
    position: int
    expected: int
    found: int
    gap: float
    """How much more probable the expected token was there, in plain decoding."""


def find_divergences(
    plain: Sequence[Any], found: Sequence[Sequence[int]]
) -> list[Divergence]:
    """First differences of `found` from plain decoding's outputs with logprobs."""
    divergences = []
    for prompt, (output, tokens) in enumerate(zip(plain, found, strict=True)):
        completion = output.outputs[0]
        expected = list(completion.token_ids)
        for position, (wanted, got) in enumerate(zip(expected, tokens, strict=True)):
            if wanted == got:
                continue
            logprobs = completion.logprobs[position]
            other = logprobs[got].logprob if got in logprobs else -float("inf")
            gap = logprobs[wanted].logprob - other
            divergences.append(Divergence(prompt, position, wanted, got, gap))
            break
    return divergences


def assert_ties_only(divergences: Sequence[Divergence], what: str) -> None:
    """Print every divergence, and fail on the first that is no tie."""
    for divergence in divergences:
        print(f"{what}: {divergence}")
    errors = [d for d in divergences if not d.gap <= MAX_GAP]
    assert not errors, f"{what}: {errors[0]}"
