"""Two whole models' training steps from plain PyTorch, to see what share of a step is matrix work.

They are built here, with random weights: nothing is downloaded. Only shapes matter to time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


class Bottleneck(nn.Module):
    """ResNet's block of 1×1, 3×3 and 1×1 convolutions beside a shortcut (He et al. 2016)."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.body = nn.Sequential(
            _convolution(channels, width, 1, 1), nn.ReLU(),
            _convolution(width, width, 3, stride), nn.ReLU(),
            _convolution(width, out, 1, 1),
        )  # fmt: skip
        same = channels == out and stride == 1
        self.shortcut = nn.Identity() if same else _convolution(channels, out, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """(n, channels, h, w) to (n, 4·width, h/stride, w/stride)."""
        return functional.relu(self.body(x) + self.shortcut(x))


def _convolution(channels: int, out: int, size: int, stride: int) -> nn.Sequential:
    convolution = nn.Conv2d(channels, out, size, stride, size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(out))


def resnet50() -> nn.Sequential:
    """ResNet-50: images (n, 3, 224, 224) to logits (n, 1000)."""
    layers: list[nn.Module] = [_convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            layers.append(Bottleneck(channels, width, 1 if block else stride))
            channels = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


class Gpt2Block(nn.Module):
    """One block of GPT-2: attention and a feed-forward layer, normalised before (Radford 2019)."""

    def __init__(self, width: int = 768, heads: int = 12) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(sequences, length, width) to the same."""
        n, length, width = x.shape
        parts = self.qkv(self.norm_1(x)).view(n, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(n, length, width))
        hidden = functional.gelu(self.up(self.norm_2(x)), approximate="tanh")
        return x + self.down(hidden)


@dataclass(frozen=True)
class TrainedModel:
    """A model and its input: images or sequences per step, by kind of machine."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    images: dict[str, int]


MODELS = {
    "resnet50": TrainedModel(resnet50, (3, 224, 224), {"gpu": 64, "cpu": 1}),
    "gpt2-block": TrainedModel(Gpt2Block, (1024, 768), {"gpu": 8, "cpu": 1}),
}
"""Models whose steps are profiled, by name."""


def training_step(name: str, device: str, dtype: torch.dtype) -> Callable[[], None]:
    """A call that computes a loss and all gradients of a model once."""
    model = MODELS[name]
    kind = "cpu" if device == "cpu" else "gpu"
    channels_last = torch.channels_last if name == "resnet50" else torch.preserve_format
    torch.manual_seed(0)
    net = model.build().to(device, dtype).to(memory_format=channels_last)
    x = torch.randn(model.images[kind], *model.shape, device=device, dtype=dtype)
    x = x.to(memory_format=channels_last)

    def step() -> None:
        net.zero_grad(set_to_none=True)
        net(x).float().square().mean().backward()

    return step
