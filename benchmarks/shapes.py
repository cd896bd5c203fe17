# SPDX-License-Identifier: Apache-2.0
"""Configurations of real models, to be run with dummy weights."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BLOCK_SIZE = 16

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "bos_token_id": 1,
    "dtype": "bfloat16",
    "eos_token_id": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151_936,
}

TARGETS: dict[str, dict[str, Any]] = {
    "qwen3-8b": _QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
    },
    "qwen3-30b-a3b": _QWEN3
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
    },
}
NUM_DRAFT_LAYERS = 5


@dataclass(frozen=True)
class Pair:
    target: Path
    draft: Path
    has_weights: bool


def find_pair(shape: str, folder: Path) -> Pair:
    """A pair of real shapes written to `folder`, or the models that `shape` holds.

    A name of `TARGETS` is written as two configurations, to be run with dummy weights.
    Anything else is a folder with models in `target` and `draft`.
    """
    if shape in TARGETS:
        return write_pair(shape, folder)
    pair = Pair(Path(shape, "target"), Path(shape, "draft"), has_weights=True)
    if not (pair.target / "config.json").is_file():
        raise SystemExit(
            f"--shape {shape} is neither one of {', '.join(TARGETS)} nor a folder with "
            "models in `target` and `draft`."
        )
    return pair


def write_pair(shape: str, folder: Path) -> Pair:
    """Configurations of a target and of a DFlash drafter of the same width."""
    target = TARGETS[shape]
    pair = Pair(folder / "target", folder / "draft", has_weights=False)
    for path, config in ((pair.target, target), (pair.draft, _drafter(target))):
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    return pair


def _drafter(target: dict[str, Any]) -> dict[str, Any]:
    last = target["num_hidden_layers"] - 3
    # A dense decoder, whatever the target is; features from evenly spaced layers.
    dense = {key: target[key] for key in (*_QWEN3, "hidden_size", "intermediate_size")}
    return dense | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": BLOCK_SIZE,
        "dflash_config": {
            "mask_token_id": target["vocab_size"] - 1,
            "target_layer_ids": sorted({1 + (last - 1) * i // 4 for i in range(5)}),
        },
        "layer_types": ["full_attention"] * NUM_DRAFT_LAYERS,
        "num_attention_heads": target["num_attention_heads"],
        "num_hidden_layers": NUM_DRAFT_LAYERS,
        "num_key_value_heads": target["num_key_value_heads"],
        "num_target_layers": target["num_hidden_layers"],
    }
