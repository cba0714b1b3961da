"""Known models by name, written in plain PyTorch.

They have the published sizes, but no trained weights, so nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from kernels.common.errors import UserError
from sweeps.capture.known_names import POSITIONS

TOKENS, IMAGES = "tokens", "images"
"""Kinds of input: token ids (batch, length), or images (batch, 3, size, size)."""


class Bottleneck(nn.Module):
    """Bottleneck block of ResNet v1.5.

    Unlike the original block (He et al. 2016), this block has the stride in its 3×3 convolution. It
    has ``channels`` input channels, ``width`` channels in the 3×3 convolution, and 4 · ``width``
    output channels.
    """

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        channels_out = 4 * width
        self.body = nn.Sequential(
            _convolution(channels, width, taps=1, stride=1),
            nn.ReLU(),
            _convolution(width, width, taps=3, stride=stride),
            nn.ReLU(),
            _convolution(width, channels_out, taps=1, stride=1),
        )
        # If the block changes the shape, the shortcut needs a convolution.
        if channels == channels_out and stride == 1:
            self.shortcut: nn.Module = nn.Identity()
        else:
            self.shortcut = _convolution(channels, channels_out, taps=1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, channels, h, w) to (n, 4·width, ⌈h/stride⌉, ⌈w/stride⌉)."""
        return functional.relu(self.body(x) + self.shortcut(x))


def _convolution(channels_in: int, channels_out: int, taps: int, stride: int) -> nn.Sequential:
    """Build a convolution with filters of ``taps`` × ``taps``, followed by a batch norm."""
    padding = taps // 2
    convolution = nn.Conv2d(channels_in, channels_out, taps, stride, padding, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(channels_out))


def resnet(
    stem: int = 64, width: int = 64, classes: int = 1000, blocks: tuple[int, ...] = (3, 4, 6, 3)
) -> nn.Sequential:
    """Build a ResNet that maps images (n, 3, h, w) to logits (n, classes).

    ``stem`` is the number of output channels of the first convolution. ``blocks`` has the number of
    bottleneck blocks in each stage. ``width`` is the width of the blocks in the first stage; each
    later stage is twice as wide as the one before it.
    """
    layers: list[nn.Module] = [
        _convolution(3, stem, taps=7, stride=2),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    channels = stem
    for stage, count in enumerate(blocks):
        stage_width = width * 2**stage
        for block in range(count):
            # Each stage except the first one begins by halving the image.
            stride = 2 if stage > 0 and block == 0 else 1
            layers.append(Bottleneck(channels, stage_width, stride))
            channels = 4 * stage_width
    head = nn.Linear(channels, classes)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)


class UNet(nn.Module):
    """A U-Net (Ronneberger et al. 2015) with padded convolutions.

    The network has ``width`` channels at full resolution. It halves the resolution ``depth`` times,
    and doubles the number of channels each time.
    """

    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        input_widths = [3, *widths[:-1]]
        self.down = nn.ModuleList(
            _pair(channels_in, channels_out)
            for channels_in, channels_out in zip(input_widths, widths, strict=True)
        )
        # Each transposed convolution halves the number of channels, and a skip connection then
        # doubles it again.
        self.rise = nn.ModuleList(
            nn.ConvTranspose2d(2 * channels, channels, 2, 2) for channels in reversed(widths[:-1])
        )
        self.up = nn.ModuleList(_pair(2 * channels, channels) for channels in reversed(widths[:-1]))
        self.last = nn.Conv2d(width, 2, 1)  # two classes, as in the paper

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, 3, h, w) to (n, 2, h, w); h and w must be multiples of ``2**depth``."""
        skips = []
        for level, block in enumerate(self.down):
            if level > 0:
                x = functional.max_pool2d(x, 2)
            x = block(x)
            skips.append(x)
        skips.pop()  # the lowest level has no skip connection
        for rise, block in zip(self.rise, self.up, strict=True):
            x = block(torch.cat([rise(x), skips.pop()], dim=1))
        return self.last(x)


def _pair(channels_in: int, channels_out: int) -> nn.Sequential:
    """Build two padded 3×3 convolutions, each followed by a batch norm and a ReLU."""
    return nn.Sequential(
        _convolution(channels_in, channels_out, taps=3, stride=1),
        nn.ReLU(),
        _convolution(channels_out, channels_out, taps=3, stride=1),
        nn.ReLU(),
    )


class Gpt2Block(nn.Module):
    """Block of GPT-2 (Radford et al. 2019): attention and a feed-forward layer, each after a norm.

    ``ffn`` is the width of the feed-forward layer; 0 means 4 · ``hidden``.
    """

    def __init__(self, hidden: int = 768, heads: int = 12, ffn: int = 0) -> None:
        super().__init__()
        _check_multiple("hidden", hidden, "heads", heads)
        ffn_width = ffn or 4 * hidden
        self.heads = heads
        self.norm_1 = nn.LayerNorm(hidden)
        self.norm_2 = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.up = nn.Linear(hidden, ffn_width)
        self.down = nn.Linear(ffn_width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Map (sequences, length, hidden) to the same shape."""
        # 1. Attention: q, k and v are (sequences, heads, length, width of a head).
        n, length, hidden = x.shape
        qkv = self.qkv(self.norm_1(x)).view(n, length, 3, self.heads, hidden // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(n, length, hidden))
        # 2. Feed-forward.
        wide = functional.gelu(self.up(self.norm_2(x)), approximate="tanh")
        return x + self.down(wide)


class LlamaBlock(nn.Module):
    """One block of Llama (Touvron et al. 2023): grouped-query attention, RoPE and a gated FFN.

    Queries have ``heads`` heads, and keys and values each have ``kv_heads`` heads.
    """

    def __init__(self, hidden: int, heads: int, kv_heads: int, ffn: int, head_width: int) -> None:
        super().__init__()
        _check_multiple("heads", heads, "kv_heads", kv_heads)
        self.heads = heads
        self.kv_heads = kv_heads
        self.width = head_width
        self.norm_1 = nn.RMSNorm(hidden)
        self.norm_2 = nn.RMSNorm(hidden)
        self.q = nn.Linear(hidden, heads * head_width, bias=False)
        self.k = nn.Linear(hidden, kv_heads * head_width, bias=False)
        self.v = nn.Linear(hidden, kv_heads * head_width, bias=False)
        self.out = nn.Linear(heads * head_width, hidden, bias=False)
        self.gate = nn.Linear(hidden, ffn, bias=False)
        self.up = nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (sequences, length, hidden) to the same shape."""
        # 1. Attention: q, k and v are (sequences, heads, length, width of a head).
        n, length, _ = x.shape
        attention_input = self.norm_1(x)
        q = self.q(attention_input).view(n, length, self.heads, self.width).transpose(1, 2)
        k = self.k(attention_input).view(n, length, self.kv_heads, self.width).transpose(1, 2)
        v = self.v(attention_input).view(n, length, self.kv_heads, self.width).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(
            _rotated(q), _rotated(k), v, is_causal=True, enable_gqa=True
        )
        x = x + self.out(mixed.transpose(1, 2).reshape(n, length, -1))
        # 2. Feed-forward with a gate.
        ffn_input = self.norm_2(x)
        return x + self.down(functional.silu(self.gate(ffn_input)) * self.up(ffn_input))


def _rotated(x: Tensor) -> Tensor:
    """Apply RoPE (Su et al. 2021) with ones for cosines and sines, because only shapes matter."""
    angles = torch.ones(x.shape[-2], x.shape[-1], dtype=x.dtype, device=x.device)
    first, second = x.chunk(2, dim=-1)
    return x * angles + torch.cat([-second, first], dim=-1) * angles


def _check_multiple(name: str, size: int, divisor_name: str, divisor: int) -> None:
    if size % divisor:
        raise UserError(
            f"{name} ({size}) is not a multiple of {divisor_name} ({divisor}); change one of them."
        )


class LanguageModel(nn.Module):
    """Language model that consists of an embedding, blocks, a norm and a head.

    ``positions`` is the number of learned position embeddings; None means that the model has none.
    """

    def __init__(
        self,
        blocks: list[nn.Module],
        norm: nn.Module,
        vocab: int,
        hidden: int,
        positions: int | None = None,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden)
        self.positions = nn.Embedding(positions, hidden) if positions else None
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm
        self.head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token ids (sequences, length) to logits (sequences, length, vocab)."""
        return self.head(self.hidden_states(tokens))

    def hidden_states(self, tokens: Tensor) -> Tensor:
        """Map token ids (sequences, length) to the head's input (sequences, length, hidden)."""
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def gpt2(
    hidden: int = 768, heads: int = 12, layers: int = 12, vocab: int = 50257, ffn: int = 0
) -> nn.Module:
    """Build a GPT-2 whose head is tied to the embedding; ``ffn`` is as in :class:`Gpt2Block`."""
    blocks: list[nn.Module] = [Gpt2Block(hidden, heads, ffn) for _ in range(layers)]
    positions = POSITIONS["gpt2"]  # all sizes of GPT-2 have the same number
    model = LanguageModel(blocks, nn.LayerNorm(hidden), vocab, hidden, positions)
    model.head.weight = model.embedding.weight
    return model


def llama(
    hidden: int, heads: int, kv_heads: int, ffn: int, layers: int, vocab: int, head_width: int = 128
) -> nn.Module:
    """Build a Llama whose head is not tied to the embedding."""
    blocks: list[nn.Module] = [
        LlamaBlock(hidden, heads, kv_heads, ffn, head_width) for _ in range(layers)
    ]
    return LanguageModel(blocks, nn.RMSNorm(hidden), vocab, hidden)


@dataclass(frozen=True)
class Known:
    """A known model: its factory, its published sizes, and its kind of input."""

    build: Callable[..., nn.Module]
    sizes: Mapping[str, int]
    takes: str = TOKENS


KNOWN = {
    "gpt2": Known(gpt2, {"hidden": 768, "heads": 12, "layers": 12, "vocab": 50257}),
    "gpt2-medium": Known(gpt2, {"hidden": 1024, "heads": 16, "layers": 24, "vocab": 50257}),
    "gpt2-large": Known(gpt2, {"hidden": 1280, "heads": 20, "layers": 36, "vocab": 50257}),
    "gpt2-xl": Known(gpt2, {"hidden": 1600, "heads": 25, "layers": 48, "vocab": 50257}),
    "llama-2-7b": Known(
        llama,
        {"hidden": 4096, "heads": 32, "kv_heads": 32, "ffn": 11008, "layers": 32, "vocab": 32000},
    ),
    "llama-3-8b": Known(
        llama,
        {"hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "layers": 32, "vocab": 128256},
    ),
    "resnet-50": Known(resnet, {"stem": 64, "width": 64, "classes": 1000}, IMAGES),
    "unet": Known(UNet, {"width": 64, "depth": 4}, IMAGES),
}
"""Known models by name.

Sources of the sizes: Radford et al. 2019, Touvron et al. 2023, Grattafiori et al. 2024 (Llama 3),
He et al. 2016, Ronneberger et al. 2015."""
