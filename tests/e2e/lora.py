# SPDX-License-Identifier: Apache-2.0
"""A random LoRA adapter in PEFT's format, made for a tiny target."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK = 8
SCALE = 0.15
MODULES = ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")


def make_adapter(target: Path, folder: Path, seed: int, *, with_head: bool) -> Path:
    """Write an adapter that changes the text, also of the logits if `with_head`."""
    config = json.loads((target / "config.json").read_text())
    hidden = config["hidden_size"]
    heads = config["num_attention_heads"] * config["head_dim"]
    # (inputs, outputs) of each module
    shapes = {
        "self_attn.q_proj": (hidden, heads),
        "self_attn.o_proj": (heads, hidden),
        "mlp.down_proj": (config["intermediate_size"], hidden),
    }
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    layers = range(config["num_hidden_layers"])
    names = {
        f"model.layers.{layer}.{module}": shapes[module]
        for layer in layers
        for module in MODULES
    }
    if with_head:
        names["lm_head"] = (hidden, config["vocab_size"])
    for name, (inputs, outputs) in names.items():
        for factor, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
            weight = torch.randn(shape, generator=generator) * SCALE
            tensors[f"base_model.model.{name}.lora_{factor}.weight"] = weight
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    adapter = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "bias": "none",
        "target_modules": sorted({name.split(".")[-1] for name in names}),
    }
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    return folder
