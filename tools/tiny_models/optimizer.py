# SPDX-License-Identifier: Apache-2.0
"""How targets and drafters are trained: Muon for matrices, AdamW for the rest."""

import math

import torch
from torch import Tensor, nn

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.01


class Optimizer:
    """One cycle of `steps` steps; `peak` is the highest learning rate."""

    def __init__(self, model: nn.Module, steps: int, peak: float):
        # Embeddings and heads are tables rather than maps between features.
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        is_map = [
            p.dim() == 2 and "embed" not in n and "head" not in n for n, p in named
        ]
        maps = [p for (_, p), yes in zip(named, is_map, strict=True) if yes]
        others = [p for (_, p), yes in zip(named, is_map, strict=True) if not yes]
        self.parameters = maps + others
        self.parts: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                maps, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(others, betas=BETAS, weight_decay=WEIGHT_DECAY),
        ]
        self.step_idx, self.steps, self.peak = 0, steps, peak

    def step(self, loss: Tensor) -> None:
        """Backward pass, update, and a line of progress every 100 steps."""
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = self._rate()
            part.step()
            part.zero_grad()
        self.step_idx += 1
        if self.step_idx % 100 == 0:
            print(f"step {self.step_idx}: loss {loss.item():.3f}", flush=True)

    def _rate(self) -> float:
        """Linear warm-up over the first 5 %, then a cosine to 2 % of the peak."""
        warm = 0.05 * self.steps
        if self.step_idx < warm:
            return self.peak * (self.step_idx + 1) / warm
        share = (self.step_idx - warm) / (self.steps - warm)
        return self.peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * share)))
