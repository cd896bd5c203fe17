# SPDX-License-Identifier: Apache-2.0
"""The targets: tiny transformers models trained on the made-up language."""

import math
import random
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel, StaticCache

from .language import BOS, EOS, PAD, VOCABULARY, Language

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


def build_target(architecture: str, options: dict) -> PreTrainedModel:
    """A randomly initialised `<architecture>ForCausalLM`."""
    config_class = getattr(transformers, f"{architecture}Config")
    model_class = getattr(transformers, f"{architecture}ForCausalLM")
    config = config_class(**{**COMMON, **options}, attn_implementation="sdpa")
    return model_class(config)


def train_target(model: PreTrainedModel, language: Language, steps: int) -> None:
    """Next-token training for `steps` batches of BATCH pieces of LENGTH tokens."""
    rows = language.stream(random.Random(1), LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.01)
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = one_cycle(step, steps, peak=4e-3)
        ids = torch.tensor([next(rows) for _ in range(BATCH)])
        logits = model(ids, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), ids[:, 1:].flatten()
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 99:
            print(f"target step {step + 1}: loss {loss.item():.3f}", flush=True)
    model.eval()


def one_cycle(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over the first 5 %, then a cosine to 2 % of the peak."""
    warm = 0.05 * steps
    if step < warm:
        return peak * (step + 1) / warm
    share = (step - warm) / (steps - warm)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * share)))


def save_target(model: PreTrainedModel, folder: Path) -> None:
    """Round the weights to bfloat16, in place as well, and write the checkpoint."""
    model.bfloat16().save_pretrained(folder)
    model.float()


@torch.no_grad()
def write_texts(
    model: PreTrainedModel, language: Language, count: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts that the target wrote after the beginning of a document.

    Even rows are greedy, odd rows are sampled at temperature 1. Returns
    ids `[count, LENGTH]` and a mask `[count, LENGTH]` of the tokens to learn from: those
    of the target up to and including <eos>.
    """
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    starts = [2 + rng.randrange(24) for _ in range(count)]
    prompts = [next(language.stream(rng, LENGTH)) for _ in range(count)]
    ids, start = torch.tensor(prompts), torch.tensor(starts)
    cache = StaticCache(model.config, max_cache_len=LENGTH)
    for at in range(LENGTH - 1):
        out = model(ids[:, at : at + 1], past_key_values=cache, use_cache=True)
        probs = out.logits[:, -1].softmax(-1)
        token = torch.multinomial(probs, 1, generator=generator)[:, 0]
        token[::2] = probs[::2].argmax(-1)
        ids[:, at + 1] = torch.where(at + 1 < start, ids[:, at + 1], token)
    own = torch.arange(LENGTH) >= start[:, None]
    ended = ((ids == EOS) & own).long().cumsum(1) - ((ids == EOS) & own).long()
    return ids, own & (ended == 0)
