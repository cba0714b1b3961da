"""Build training steps of two models, to profile how much time GEMMs and convolutions take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from sweeps.capture.known import Gpt2Block, resnet


@dataclass(frozen=True)
class TrainedModel:
    """Model whose training step is profiled.

    Attributes:
        shape: shape of one input, without the batch dimension.
        batch: number of inputs per step, by kind of machine (``gpu`` or ``cpu``).
    """

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch: dict[str, int]
    memory_format: torch.memory_format = torch.preserve_format


MODELS = {
    # Convolutions are usually trained with their channels last.
    "resnet50": TrainedModel(
        resnet, (3, 224, 224), {"gpu": 64, "cpu": 1}, memory_format=torch.channels_last
    ),
    "gpt2-block": TrainedModel(Gpt2Block, (1024, 768), {"gpu": 8, "cpu": 1}),
}
"""Models whose steps are profiled, by name."""


def training_step(name: str, device: str, dtype: torch.dtype) -> Callable[[], None]:
    """Build a model of :data:`MODELS`, and return a function that runs one training step of it.

    A step computes a loss and all gradients, but does not update the parameters. On a GPU, the step
    may return before the device has finished its work. ``device`` is the name of a PyTorch device,
    such as ``cuda:0``.
    """
    model = MODELS[name]
    kind = "cpu" if device == "cpu" else "gpu"
    torch.manual_seed(0)
    net = model.build().to(device, dtype).to(memory_format=model.memory_format)
    inputs = torch.randn(model.batch[kind], *model.shape, device=device, dtype=dtype)
    inputs = inputs.to(memory_format=model.memory_format)

    def step() -> None:
        net.zero_grad(set_to_none=True)
        # The mean square of the outputs serves as the loss, so no labels are needed. It is computed
        # in fp32, in which the sum over many outputs stays accurate.
        loss = net(inputs).float().square().mean()
        loss.backward()

    return step
