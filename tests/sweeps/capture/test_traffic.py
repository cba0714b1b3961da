"""Check the kinds of other operations, and the bytes that they move."""

from __future__ import annotations

import functools

import pytest
from torch import Tensor, nn
from torch.nn import functional

from kernels.common.errors import UserError
from sweeps.capture.capture import capture
from sweeps.capture.sources import find_source
from sweeps.capture.step import ModelStep

ROWS, WIDTH = 6, 32
BYTES = 2 * ROWS * WIDTH  # of a matrix in bf16
WEIGHT = 2 * WIDTH


class Layer(nn.Module):
    """A linear layer, and one more operation by name."""

    def __init__(self, then: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.RMSNorm(WIDTH)
        self.norm_of_features = nn.BatchNorm1d(WIDTH)
        self.scale = nn.Parameter(self.linear.weight[0].clone())
        self.then = then

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, width) to a tensor."""
        x = self.linear(x)
        if self.then == "rms":
            return self.norm(x)
        if self.then == "batch":
            return self.norm_of_features(x)
        if self.then == "transpose":
            return x.t().contiguous()
        if self.then == "broadcast":
            return x * self.scale
        if self.then == "sum":
            return x.sum(0)
        return functional.log_softmax(x, -1)


rms, batch, transpose, broadcast, total, loss = (
    functools.partial(Layer, then)
    for then in ("rms", "batch", "transpose", "broadcast", "sum", "loss")
)


def moved(factory: str, mode: str) -> dict[str, int]:
    source = find_source(f"{__name__}:{factory}", inputs=[f"x[{ROWS},{WIDTH}]"])
    return {entry.what: entry.bytes for entry in capture(source, ModelStep(mode)).moved}


@pytest.mark.parametrize(
    ("factory", "expected"),
    [
        ("rms", {"normalisation": 2 * BYTES + WEIGHT}),
        ("transpose", {"strided access": 2 * BYTES}),
        ("broadcast", {"strided access": 2 * BYTES + WEIGHT}),
        ("total", {"reduction": BYTES + WEIGHT}),
        ("loss", {"loss": 2 * BYTES}),
    ],
)
def test_an_operation_has_the_kind_that_its_kernel_has(
    factory: str, expected: dict[str, int]
) -> None:
    assert moved(factory, "prefill") == expected


def test_normalisations_with_sums_read_their_inputs_twice() -> None:
    # The forward pass reads x twice. The backward pass reads x and the gradient twice. Each writes
    # one matrix. The rest are vectors of statistics and of parameters.
    many = moved("batch", "train")["normalisation"]
    assert 8 * BYTES < many < 8 * BYTES + 60 * WIDTH * 4
    # In inference, a batch norm applies recorded statistics, so it reads x once.
    inference = moved("batch", "prefill")["normalisation"]
    assert 2 * BYTES < inference < 2 * BYTES + 60 * WIDTH * 4
    # An RMS norm reads x once in the forward pass.
    fewer = moved("rms", "train")["normalisation"]
    assert 7 * BYTES < fewer < 7 * BYTES + 10 * WEIGHT


class WrongWidth(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, [16])


def test_a_norm_over_another_width_than_the_input_s_is_refused() -> None:
    source = find_source(f"{__name__}:WrongWidth", inputs=["x[8,32]"])
    with pytest.raises(UserError, match=r"an RMS norm over \[16\] got an input of shape \[8, 32\]"):
        capture(source, ModelStep("prefill"))
