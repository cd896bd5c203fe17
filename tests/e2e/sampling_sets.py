# SPDX-License-Identifier: Apache-2.0
"""Random sampling parameters that matter for the text a model really writes."""

import random
from collections.abc import Callable, Sequence
from typing import Any

Options = dict[str, Any]

# The engine is told that these mark reasoning; the first ends every other sentence.
REASONING = {"reasoning_start_str": ".", "reasoning_end_str": "be bi"}


class Chooser:
    """Options for one request, drawn from a seed and from text of the model."""

    def __init__(self, seed: int, text: Sequence[int], words: Sequence[str]) -> None:
        self.rng = random.Random(seed)
        self.text = list(text)
        self.words = words

    def token(self) -> int:
        return self.rng.choice(self.text)

    def tokens(self, most: int) -> list[int]:
        count = self.rng.randint(1, most)
        return sorted({self.token() for _ in range(count)})

    def phrase(self) -> str:
        """One to three tokens that follow each other in the text."""
        length = self.rng.randint(1, 3)
        start = self.rng.randrange(len(self.text) - length)
        return " ".join(self.words[t] for t in self.text[start : start + length])


def _allowed(chooser: Chooser) -> Options:
    return {"allowed_token_ids": sorted({2, *chooser.text[:20], *chooser.tokens(20)})}


def _logit_bias(chooser: Chooser) -> Options:
    biases = (-100.0, -3.0, 2.0, 5.0)
    bias = {token: chooser.rng.choice(biases) for token in chooser.tokens(8)}
    return {"logit_bias": bias}


def _min_tokens(chooser: Chooser) -> Options:
    return {
        "min_tokens": chooser.rng.randint(1, 12),
        "stop_token_ids": chooser.tokens(6),
        "ignore_eos": False,
    }


def _thinking(chooser: Chooser) -> Options:
    return {"thinking_token_budget": chooser.rng.randint(0, 6), "max_tokens": 40}


SINGLE: dict[str, Callable[[Chooser], Options]] = {
    "none": lambda _: {},
    "temperature": lambda c: {"temperature": c.rng.choice([0.05, 0.3, 0.6, 1.5, 2.0])},
    "greedy": lambda _: {"temperature": 0.0},
    "top_k": lambda c: {"top_k": c.rng.choice([1, 2, 5, 20])},
    "top_p": lambda c: {"top_p": c.rng.choice([0.2, 0.7, 0.95])},
    "min_p": lambda c: {"min_p": c.rng.choice([0.02, 0.1, 0.5])},
    "repetition_penalty": lambda c: {
        "repetition_penalty": c.rng.choice([0.8, 1.1, 1.5])
    },
    "presence_penalty": lambda c: {
        "presence_penalty": c.rng.choice([-2.0, 2.0]),
        "max_tokens": 48,
    },
    "frequency_penalty": lambda c: {
        "frequency_penalty": c.rng.choice([-1.0, 0.7, 2.0])
    },
    "bad_words": lambda c: {
        "bad_words": [c.phrase() for _ in range(c.rng.randint(1, 6))]
    },
    "logit_bias": _logit_bias,
    "allowed_token_ids": _allowed,
    "min_tokens": _min_tokens,
    "stop_token_ids": lambda c: {"stop_token_ids": c.tokens(3)},
    "stop": lambda c: {"stop": [c.phrase(), c.words[c.token()], c.words[c.token()]]},
    "thinking_token_budget": _thinking,
}
"""Options that set one thing, or what only makes sense together."""


def single(name: str, chooser: Chooser) -> Options:
    return _complete(SINGLE[name](chooser), chooser)


def combined(chooser: Chooser) -> Options:
    """Two to six options at once."""
    names = chooser.rng.sample(sorted(SINGLE), k=chooser.rng.randint(2, 6))
    options: Options = {}
    for name in names:
        options.update(SINGLE[name](chooser))
    # vLLM refuses or ignores the others at temperature 0.
    return _complete(options, chooser)


def _complete(options: Options, chooser: Chooser) -> Options:
    defaults = {
        "temperature": 1.0,
        "seed": chooser.rng.randrange(2**40),
        "max_tokens": chooser.rng.randint(12, 40),
        "ignore_eos": True,
    }
    return defaults | options
