# SPDX-License-Identifier: Apache-2.0
"""The drafters: DFlash block-diffusion models (arXiv 2602.06036) in vLLM's format.

A drafter shares the target's embedding and LM head. Hidden states of a few target
layers, projected by `fc` and normed, give every layer the keys and values of the
context. The query is the block [last token, <mask>, <mask>, ...]; without a causal
mask, slot j predicts the token j places after the last one.
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from .language import BOS, EOS, MASK
from .optimizer import Optimizer
from .target import write_texts

NUM_LAYERS = 2
ROPE_THETA = 10000.0
EPS = 1e-6
ROWS = 8
ANCHORS = 12
DECAY = 4.0


class Attention(nn.Module):
    """Qwen3 attention of block queries to the context and the block itself."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, head_dim: int):
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = nn.Linear(hidden, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False)
        self.q_norm = nn.RMSNorm(head_dim, eps=EPS)
        self.k_norm = nn.RMSNorm(head_dim, eps=EPS)

    def forward(self, x: Tensor, context: Tensor, pos: Tensor, mask: Tensor) -> Tensor:
        # x: [rows, A * block, hidden], context: [rows, L, hidden]
        # pos: [rows, A * block], mask: [rows, 1, A * block, L + A * block]
        both = torch.cat([context, x], 1)
        context_pos = torch.arange(context.shape[1]).expand(len(x), -1)
        q = rotate(self.q_norm(self._split(self.q_proj(x))), pos)
        k = self.k_norm(self._split(self.k_proj(both)))
        k = rotate(k, torch.cat([context_pos, pos], 1))
        v = self._split(self.v_proj(both))
        out = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (-1, self.head_dim)).transpose(1, 2)


class Mlp(nn.Module):
    def __init__(self, hidden: int, intermediate: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int, head_dim: int):
        super().__init__()
        self.self_attn = Attention(hidden, heads, kv_heads, head_dim)
        self.mlp = Mlp(hidden, 2 * hidden)
        self.input_layernorm = nn.RMSNorm(hidden, eps=EPS)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=EPS)

    def forward(self, x: Tensor, context: Tensor, pos: Tensor, mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, pos, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """The trained part; parameter names are those of vLLM's checkpoint."""

    def __init__(self, hidden: int, layer_ids: list[int], block: int, **heads: int):
        super().__init__()
        self.layer_ids, self.block, self.heads = layer_ids, block, heads
        self.layers = nn.ModuleList(Layer(hidden, **heads) for _ in range(NUM_LAYERS))
        self.fc = nn.Linear(hidden * len(layer_ids), hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(hidden, eps=EPS)
        self.norm = nn.RMSNorm(hidden, eps=EPS)

    def forward(
        self, target: PreTrainedModel, features: Tensor, ids: Tensor, anchor: Tensor
    ) -> Tensor:
        """Logits `[rows, A, block - 1, V]` of the tokens after each anchor.

        features `[rows, L, F * hidden]` and ids `[rows, L]` are the texts; anchor
        `[rows, A]` is the position of the last known token of each block.
        """
        rows, num_anchors = anchor.shape
        block_ids = torch.full((rows, num_anchors, self.block), MASK)
        block_ids[..., 0] = ids.gather(1, anchor)
        pos = (anchor[..., None] + torch.arange(self.block)).flatten(1)
        mask = block_mask(anchor, self.block, ids.shape[1])
        context = self.hidden_norm(self.fc(features))
        x = target.get_input_embeddings()(block_ids.flatten(1))
        for layer in self.layers:
            x = layer(x, context, pos, mask)
        x = self.norm(x).view(rows, num_anchors, self.block, -1)
        return target.get_output_embeddings()(x[:, :, 1:])


def rotate(x: Tensor, pos: Tensor) -> Tensor:
    """Rotary embedding (NeoX halves) of x `[rows, heads, n, d]` at pos `[rows, n]`."""
    d = x.shape[-1]
    angle = pos[:, None, :, None] * ROPE_THETA ** (-torch.arange(0, d, 2) / d)
    a, b = x.chunk(2, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def block_mask(anchor: Tensor, block: int, length: int) -> Tensor:
    """Who sees whom: `[rows, 1, A * block, length + A * block]`.

    A block sees the context before its anchor, and itself.
    """
    context = torch.arange(length) < anchor[..., None]
    owner = torch.arange(anchor.shape[1]).repeat_interleave(block)
    own = (owner[:, None] == owner).expand(len(anchor), -1, -1)
    return torch.cat([context.repeat_interleave(block, 1), own], -1)[:, None]


@torch.no_grad()
def target_features(target: PreTrainedModel, ids: Tensor, layers: list[int]) -> Tensor:
    """The hidden states after `layers`, side by side: `[rows, L, F * hidden]`."""
    parts = []
    for rows in ids.split(64):
        hidden = target.model(rows, output_hidden_states=True).hidden_states
        parts.append(torch.cat([hidden[i + 1] for i in layers], -1))
    return torch.cat(parts)


def train_drafter(
    drafter: Drafter, target: PreTrainedModel, language, steps: int
) -> None:
    """Cross entropy of the target's own tokens, earlier slots weighing more."""
    target.requires_grad_(False)
    ids, own = write_texts(target, language, count=768, seed=2)
    features = target_features(target, ids, drafter.layer_ids)
    optimizer = Optimizer(drafter, steps, peak=5e-3)
    generator = torch.Generator().manual_seed(3)
    weight = torch.exp(-torch.arange(drafter.block - 1) / DECAY)
    for _ in range(steps):
        rows = torch.randint(len(ids), (ROWS,), generator=generator)
        logits, label, known = draft(
            drafter, target, features[rows], ids[rows], own[rows], generator
        )
        loss = F.cross_entropy(logits.flatten(0, 2), label.flatten(), reduction="none")
        share = known * weight
        optimizer.step((loss.view_as(share) * share).sum() / share.sum())


def draft(
    drafter: Drafter,
    target: PreTrainedModel,
    features: Tensor,
    ids: Tensor,
    own: Tensor,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor, Tensor]:
    """Drafts at random anchors whose next token is the target's.

    Returns logits `[rows, A, block - 1, V]`, the target's tokens there
    `[rows, A, block - 1]`, and which of them exist.
    """
    chance = torch.rand(own[:, 1:].shape, generator=generator) * own[:, 1:]
    anchor = chance.topk(ANCHORS, 1).indices
    logits = drafter(target, features, ids, anchor)
    where = anchor[..., None] + torch.arange(1, drafter.block)
    inside = where < ids.shape[1]
    where = where.clamp(max=ids.shape[1] - 1).flatten(1)
    shape = inside.shape
    label, known = ids.gather(1, where).view(shape), own.gather(1, where).view(shape)
    return logits, label, known & inside


@torch.no_grad()
def offline_check(drafter: Drafter, target: PreTrainedModel, language) -> dict:
    """What the chain accepts, and where the target's token ranks at its first miss.

    Separately for greedy and for sampled texts that were not trained on, over blocks
    that lie inside the text: `length` is 1 + the mean of the leading hits, `rank_2_8`
    the share of first misses with the target's token among ranks 2 to 8.
    """
    ids, own = write_texts(target, language, count=192, seed=4)
    generator = torch.Generator().manual_seed(5)
    features = target_features(target, ids, drafter.layer_ids)
    logits, label, known = draft(drafter, target, features, ids, own, generator)
    of_label = logits.gather(-1, label[..., None])
    rank = 1 + (logits > of_label).sum(-1)
    hits = (rank == 1).long().cumprod(-1).sum(-1)
    whole = known.all(-1)
    result = {}
    for name, start in (("greedy", 0), ("sampled", 1)):
        n, r = hits[start::2][whole[start::2]], rank[start::2][whole[start::2]]
        miss = n < r.shape[-1]
        first = r[miss].gather(1, n[miss][:, None])
        result[name] = {
            "length": round(1 + n.float().mean().item(), 2),
            "rank_2_8": round((first <= 8).float().mean().item(), 2),
        }
    return result


def save_drafter(drafter: Drafter, target: PreTrainedModel, folder: Path) -> None:
    """Write the checkpoint of `DFlashDraftModel` in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {k: v.detach().bfloat16() for k, v in drafter.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": target.config.vocab_size,
        "hidden_size": target.config.hidden_size,
        "intermediate_size": 2 * target.config.hidden_size,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": drafter.heads["heads"],
        "num_key_value_heads": drafter.heads["kv_heads"],
        "head_dim": drafter.heads["head_dim"],
        "max_position_embeddings": target.config.max_position_embeddings,
        "tie_word_embeddings": False,
        "rms_norm_eps": EPS,
        "hidden_act": "silu",
        "attention_bias": False,
        "rope_theta": ROPE_THETA,
        "torch_dtype": "bfloat16",
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "block_size": drafter.block,
        "num_target_layers": target.config.num_hidden_layers,
        "layer_types": ["full_attention"] * NUM_LAYERS,
        "dflash_config": {
            "mask_token_id": MASK,
            "target_layer_ids": drafter.layer_ids,
        },
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
