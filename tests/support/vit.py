"""A small vision transformer in plain PyTorch (Dosovitskiy et al. 2021)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sweeps.capture.known import Gpt2Block


class Vit(nn.Module):
    """Patches of 16 × 16 pixels, a class token, blocks, and a head on the class token."""

    def __init__(self, hidden: int = 192, heads: int = 3, layers: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, hidden, 16, 16)
        self.token = nn.Parameter(torch.zeros(1, 1, hidden))
        self.blocks = nn.ModuleList(Gpt2Block(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, 1000)

    def forward(self, images: Tensor) -> Tensor:
        """Map (n, 3, h, w) to logits (n, 1000)."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))
