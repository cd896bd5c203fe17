# SPDX-License-Identifier: Apache-2.0
"""The targets: tiny transformers models trained on the made-up language."""

import random
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from transformers import DynamicCache, PreTrainedModel

from .language import BOS, EOS, PAD, VOCABULARY, Language
from .optimizer import Optimizer

COMMON = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
LENGTH = 192
BATCH = 6
WRITE_BATCH = 64


def build_target(architecture: str, options: dict) -> PreTrainedModel:
    """A randomly initialised `<architecture>ForCausalLM`."""
    config_class = getattr(transformers, f"{architecture}Config")
    model_class = getattr(transformers, f"{architecture}ForCausalLM")
    config = config_class(**{**COMMON, **options}, attn_implementation="sdpa")
    return model_class(config)


def train_target(model: PreTrainedModel, language: Language, steps: int) -> None:
    """Next-token training for `steps` batches of BATCH pieces of LENGTH tokens."""
    rows = language.stream(random.Random(1), LENGTH)
    optimizer = Optimizer(model, steps, peak=5e-3)
    model.train()
    for _ in range(steps):
        ids = torch.tensor([next(rows) for _ in range(BATCH)])
        logits = model(ids, use_cache=False).logits[:, :-1]
        optimizer.step(F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()))
    model.eval()


def save_target(model: PreTrainedModel, folder: Path) -> None:
    """Round the weights to bfloat16, in place as well, and write the checkpoint."""
    model.bfloat16().save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    model.float()


def write_texts(
    model: PreTrainedModel, language: Language, count: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts that the target wrote after the beginning of a document.

    Even rows are greedy, odd rows are sampled at temperature 1. Returns ids
    `[count, LENGTH]` and a mask `[count, LENGTH]` of the tokens to learn from: those of
    the target up to and including <eos>.
    """
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    start = torch.tensor([2 + rng.randrange(24) for _ in range(count)])
    ids = torch.tensor([next(language.stream(rng, LENGTH)) for _ in range(count)])
    # Few rows at a time keep the KV cache in the processor's cache.
    for rows, begin in zip(
        ids.split(WRITE_BATCH), start.split(WRITE_BATCH), strict=True
    ):
        write_rows(model, rows, begin, generator)
    own = torch.arange(LENGTH) >= start[:, None]
    ends = ((ids == EOS) & own).long()
    return ids, own & (ends.cumsum(1) == ends)


@torch.no_grad()
def write_rows(
    model: PreTrainedModel,
    # [rows, LENGTH], overwritten from `start` on
    ids: torch.Tensor,
    # [rows]
    start: torch.Tensor,
    generator: torch.Generator,
) -> None:
    """Continue every row of `ids` from its `start`."""
    cache = DynamicCache(config=model.config)
    for at in range(LENGTH - 1):
        out = model(ids[:, at : at + 1], past_key_values=cache, use_cache=True)
        probs = out.logits[:, -1].softmax(-1)
        token = torch.multinomial(probs, 1, generator=generator)[:, 0]
        token[::2] = probs[::2].argmax(-1)
        ids[:, at + 1] = torch.where(at + 1 < start, ids[:, at + 1], token)
