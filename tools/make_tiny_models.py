#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Train the tiny target/drafter pairs used by the engine tests, on the CPU.

    python tools/make_tiny_models.py --out tests/assets [--only NAME]

Needs torch, transformers and tokenizers. Every pair takes a few minutes on one core;
the same seed on the same machine and library versions gives the same weights.
"""

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tiny_models.drafter import (
    Drafter,
    offline_check,
    save_drafter,
    train_drafter,
)
from tiny_models.language import Language, save_tokenizer
from tiny_models.target import build_target, save_target, train_target
from transformers import AutoModelForCausalLM

SEED = 0


@dataclass
class Pair:
    """A target of transformers' `<architecture>ForCausalLM` and its drafter."""

    architecture: str
    options: dict
    block: int
    layer_ids: list[int]
    draft_heads: dict[str, int]
    target_steps: int = 800
    draft_steps: int = 700


HEADS_32 = {"heads": 8, "kv_heads": 8, "head_dim": 32}
PAIRS = {
    "tiny-qwen3": Pair(
        "Qwen3",
        {
            "num_key_value_heads": 8,
            "head_dim": 32,
            "intermediate_size": 128,
            "tie_word_embeddings": True,
        },
        block=16,
        layer_ids=[0, 1, 2],
        draft_heads=HEADS_32,
    ),
    "tiny-llama": Pair(
        "Llama",
        {
            "num_key_value_heads": 2,
            "head_dim": 64,
            "intermediate_size": 128,
            "tie_word_embeddings": False,
        },
        block=16,
        layer_ids=[0, 1, 2],
        draft_heads={"heads": 8, "kv_heads": 2, "head_dim": 64},
    ),
    "tiny-qwen3-moe": Pair(
        "Qwen3Moe",
        {
            "num_key_value_heads": 8,
            "head_dim": 32,
            "intermediate_size": 128,
            "moe_intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "tie_word_embeddings": True,
        },
        block=8,
        layer_ids=[0, 1, 2],
        draft_heads=HEADS_32,
    ),
    # vLLM's MLA kernels are made for a latent of 512 + 64; fewer layers make up for it.
    "tiny-deepseek-v2": Pair(
        "DeepseekV2",
        {
            "num_hidden_layers": 3,
            "num_key_value_heads": 8,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 64,
            "v_head_dim": 16,
            "intermediate_size": 128,
            "moe_intermediate_size": 32,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
            "tie_word_embeddings": False,
        },
        block=8,
        layer_ids=[0, 1],
        draft_heads=HEADS_32,
    ),
}


def make_target(pair: Pair, folder: Path) -> None:
    """Train the target and write it to `folder`."""
    torch.manual_seed(SEED)
    target = build_target(pair.architecture, pair.options)
    train_target(target, Language(SEED), pair.target_steps)
    save_target(target, folder)
    save_tokenizer(folder)


def make_draft(pair: Pair, target_folder: Path, folder: Path) -> None:
    """Train the drafter of the target in `target_folder` and write it to `folder`."""
    torch.manual_seed(SEED)
    language = Language(SEED)
    target = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32)
    drafter = Drafter(
        target.config.hidden_size, pair.layer_ids, pair.block, **pair.draft_heads
    )
    train_drafter(drafter, target, language, pair.draft_steps)
    save_drafter(drafter, target, folder)
    print(json.dumps(offline_check(drafter, target, language)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", choices=list(PAIRS))
    parser.add_argument(
        "--keep-target", action="store_true", help="train the drafter only"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)  # the order of sums must not depend on the machine
    for name in [args.only] if args.only else PAIRS:
        begun, folder = time.process_time(), args.out / name
        if not args.keep_target:
            make_target(PAIRS[name], folder / "target")
        make_draft(PAIRS[name], folder / "target", folder / "draft")
        print(f"{name}: {time.process_time() - begun:.0f} s of CPU time", flush=True)


if __name__ == "__main__":
    main()
