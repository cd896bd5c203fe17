# SPDX-License-Identifier: Apache-2.0
"""A small made-up language: random, but with structure that a tiny model can learn.

A word is one to three syllables, and a syllable is a token, so the tokens after the
first one of a word are often certain. The next word is one of six; which six, and in
which order of likelihood, depends on the last word and on the topic of the sentence,
which its first word decides. Some words end a sentence, and some of these make the
next sentence repeat it ("again ... !"), which takes attention over the context.
"""

import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<bos>", "<eos>", "<mask>", "<unk>"]
PAD, BOS, EOS, MASK, UNK = range(len(SPECIAL))
STOP, REPEATED, AGAIN = range(len(SPECIAL), len(SPECIAL) + 3)
CONSONANTS = [
    "b",
    "c",
    "d",
    "f",
    "g",
    "h",
    "j",
    "k",
    "l",
    "m",
    "n",
    "p",
    "r",
    "s",
    "t",
    "v",
    "w",
    "z",
    "ch",
    "gl",
    "kr",
    "sh",
    "st",
    "tr",
]
SYLLABLES = [c + v for c in CONSONANTS for v in "aeiou"]
VOCABULARY = [*SPECIAL, ".", "!", "again", *SYLLABLES]

NUM_WORDS = 96
NUM_TOPICS = 4
NEXT_WORD = [0.45, 0.22, 0.14, 0.09, 0.06, 0.04]
STEPS = range(1, 16)
CLOSERS = range(0, NUM_WORDS, 6)
ECHOING = range(0, NUM_WORDS, 18)


class Language:
    """One fixed grammar, drawn from `seed`."""

    def __init__(self, seed: int):
        rng = random.Random(seed)
        syllables = range(AGAIN + 1, len(VOCABULARY))
        spellings: set[tuple[int, ...]] = set()
        while len(spellings) < NUM_WORDS:
            length = rng.choices([1, 2, 3], [35, 40, 25])[0]
            spellings.add(tuple(rng.choices(syllables, k=length)))
        self.spelling = sorted(spellings)
        rng.shuffle(self.spelling)
        words = range(NUM_WORDS)
        # successors[topic][word]: the words that may follow, most likely first. All
        # lie a little ahead on the ring of words, which keeps greedy text out of short
        # loops.
        self.successors = [
            [[(w + d) % NUM_WORDS for d in rng.sample(STEPS, 6)] for w in words]
            for _ in range(NUM_TOPICS)
        ]

    def document(self, rng: random.Random) -> list[int]:
        """Token ids from <bos> to <eos>."""
        ids, word = [BOS], rng.randrange(NUM_WORDS)
        while True:
            sentence, word = self._sentence(rng, word)
            tokens = [i for w in sentence for i in self.spelling[w]]
            ids += [*tokens, STOP]
            if sentence[-1] in ECHOING and rng.random() < 0.9:
                ids += [AGAIN, *tokens, REPEATED]
            if rng.random() < 0.04:
                return [*ids, EOS]

    def stream(self, rng: random.Random, length: int) -> Iterator[list[int]]:
        """Pieces of `length` tokens of consecutive documents."""
        buffer: list[int] = []
        while True:
            while len(buffer) < length:
                buffer += self.document(rng)
            yield buffer[:length]
            buffer = buffer[length:]

    def _sentence(self, rng: random.Random, word: int) -> tuple[list[int], int]:
        """The words of a sentence and the first word of the next one."""
        sentence, table = [word], self.successors[word % NUM_TOPICS]
        while True:
            word = rng.choices(table[word], NEXT_WORD)[0]
            if len(sentence) >= 3 and sentence[-1] in CLOSERS:
                return sentence, word
            sentence.append(word)


def save_tokenizer(folder: Path) -> None:
    """Word-level tokenizer: syllables and marks separated by spaces."""
    model = WordLevel({t: i for i, t in enumerate(VOCABULARY)}, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        mask_token="<mask>",
        unk_token="<unk>",
    )
    fast.chat_template = (
        "{{ bos_token }} {% for m in messages %}{{ m['content'] }} . {% endfor %}"
    )
    fast.save_pretrained(folder)
