# SPDX-License-Identifier: Apache-2.0
"""Prompts of the engine tests."""

import json
import random
from itertools import islice
from pathlib import Path

from transformers import AutoTokenizer

PROMPTS = Path(__file__).resolve().parents[2] / "benchmarks" / "prompts"


def chat_prompts(model: Path, name: str, count: int) -> list[list[int]]:
    """The first `count` prompts of a set as token ids, in the model's chat format."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    with (PROMPTS / f"{name}.jsonl").open() as lines:
        texts = [json.loads(line)["prompt"] for line in islice(lines, count)]
    return [
        tokenizer(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}],
                tokenize=False,
                add_generation_prompt=True,
            )
        )["input_ids"]
        for text in texts
    ]


def random_prompts(model: Path, count: int, seed: int = 0) -> list[list[int]]:
    """Prompts of 5 to 30 random tokens, none of them special."""
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    chooser = random.Random(seed)
    return [
        [chooser.randrange(8, vocab_size) for _ in range(chooser.randint(5, 30))]
        for _ in range(count)
    ]
