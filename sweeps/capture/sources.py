"""Find the model to audit: by name, from transformers' ``config.json``, or from a factory."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kernels.common.errors import UserError, nearest
from sweeps.capture.known import IMAGES, KNOWN
from sweeps.capture.known_names import POSITIONS, check_model
from sweeps.capture.step import (
    TRAIN,
    ModelSource,
    ModelStep,
    StartedStep,
    first_line,
    mean_of,
    refuse_decoding,
    tokens_of,
)


@dataclass(frozen=True)
class KnownModel:
    """A model of :data:`sweeps.capture.known.KNOWN`, with sizes that replace its own."""

    name: str
    given: Mapping[str, int] = field(default_factory=dict)

    @property
    def sizes(self) -> Mapping[str, int]:
        """Sizes as its factory takes them."""
        return {**KNOWN[self.name].sizes, **self.given}

    @property
    def positions(self) -> int | None:
        """Longest sequence that the model was made for."""
        return POSITIONS[self.name]

    def start(self, step: ModelStep, changes: Mapping[str, int]) -> StartedStep:
        """Build the model, and its call on token ids or on images of 224 by 224 pixels.

        The loss of a language model is its cross entropy, that of other models the mean of the
        result.
        """
        factory = KNOWN[self.name]
        model = _built(factory.build, {**self.sizes, **changes}, step)
        if factory.takes == IMAGES:
            refuse_decoding(self.name, step)
            images = torch.empty(step.batch, 3, 224, 224, dtype=step.parameter_dtype)
            images = images.to(memory_format=torch.channels_last)
            _store_channels_last(model)
            assumptions = (f"a batch of {step.batch}", "images of 224 by 224")
            return StartedStep(model, _with_loss(model, (images,), mean_of, step), assumptions)
        tokens = torch.zeros(step.batch, step.length, dtype=torch.long)

        def loss(logits: Tensor) -> Tensor:
            return functional.cross_entropy(logits.flatten(0, -2).float(), tokens.flatten())

        return StartedStep(model, _with_loss(model, (tokens,), loss, step), tokens_of(step))


@dataclass(frozen=True)
class Factory:
    """A function that builds a module, and the tensors that the module is called with."""

    name: str
    build: Callable[..., nn.Module]
    given: Mapping[str, int]
    inputs: tuple[tuple[torch.dtype | None, tuple[int, ...]], ...]

    @property
    def sizes(self) -> Mapping[str, int]:
        """Whole-number arguments of the factory, as given or by default."""
        parameters = inspect.signature(self.build).parameters
        defaults = {
            name: parameter.default
            for name, parameter in parameters.items()
            if type(parameter.default) is int  # True and False are not sizes
        }
        return {**defaults, **self.given}

    @property
    def positions(self) -> int | None:
        """None, because a factory does not state its longest sequence."""
        return None

    def start(self, step: ModelStep, changes: Mapping[str, int]) -> StartedStep:
        """Build the module, and its call on the given inputs.

        The loss is the mean of the first tensor of floating-point numbers that the module returns.
        """
        refuse_decoding(self.name, step)
        model = _built(self.build, {**self.given, **changes}, step)
        if not isinstance(model, nn.Module):
            raise UserError(f"{self.name} returns a {type(model).__name__}, not an nn.Module.")
        tensors = [
            torch.zeros(shape, dtype=dtype or step.parameter_dtype) for dtype, shape in self.inputs
        ]
        return StartedStep(model, _with_loss(model, tensors, mean_of, step), ("inputs as given",))


def find_source(
    model: str, given: Mapping[str, int] | None = None, inputs: Sequence[str] = ()
) -> ModelSource:
    """Return the model that ``MODEL`` on the command line means.

    Args:
        model: a ``config.json`` or its folder, a name of :data:`KNOWN`, or ``module:factory``.
        given: sizes that replace the model's own.
        inputs: inputs of a factory's module, such as ``int64[8,2048]``.

    Raises:
        UserError: if the model is none of these, or cannot be read.
    """
    check_model(model)
    given = dict(given or {})
    if model in KNOWN:
        arguments = inspect.signature(KNOWN[model].build).parameters
        for name in given:
            if name not in arguments:
                raise UserError(f"{model} has no size {name!r}; {nearest(name, arguments)}")
        return KnownModel(model, given)
    path = Path(model)
    if path.suffix == ".json" or path.exists():
        from sweeps.capture.huggingface import read_config

        file = path / "config.json" if path.is_dir() else path
        return read_config(file, given)
    return _factory(model, given, inputs)


def _factory(name: str, given: Mapping[str, int], inputs: Sequence[str]) -> Factory:
    """Import the factory that ``module:factory`` names.

    Raises:
        UserError: if it cannot be imported, is not a function, or has no inputs.
    """
    module, _, function = name.partition(":")
    if not inputs:
        raise UserError(f"{name} needs its module's inputs, such as --input 'int64[8,2048]'.")
    sys.path.insert(0, "")  # the module may lie in the current folder
    try:
        imported = importlib.import_module(module)
    except Exception as error:  # a user's module may raise anything
        raise UserError(f"{module!r} cannot be imported: {first_line(error)}.") from None
    finally:
        sys.path.remove("")
    build = getattr(imported, function, None)
    if build is None:
        raise UserError(f"{module} has no {function!r}.")
    if not callable(build):
        raise UserError(f"{name} is not a function.")
    return Factory(name, build, given, tuple(map(_input, inputs)))


def _input(text: str) -> tuple[torch.dtype | None, tuple[int, ...]]:
    """Parse ``int64[8,2048]`` into a dtype and a shape.

    The dtype of ``x[8,3,224,224]`` is None, which stands for that of the step.
    """
    match = re.fullmatch(r"(\w+)\[(\d+(?:,\d+)*)\]", text.replace(" ", ""))
    if not match:
        raise UserError(f"--input takes a dtype and sizes, such as int64[8,2048], not {text!r}.")
    name, sizes = match.groups()
    shape = tuple(int(size) for size in sizes.split(","))
    if name == "x":
        return None, shape
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UserError(
            f"--input: {name!r} is not a dtype of PyTorch; x means the dtype of the step."
        )
    return dtype, shape


def _built(build: Callable[..., nn.Module], sizes: Mapping[str, int], step: ModelStep) -> nn.Module:
    """Build a module directly in its dtype, because converting one fails among fake tensors."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(step.parameter_dtype)
    try:
        return build(**sizes)
    finally:
        torch.set_default_dtype(before)


def _store_channels_last(model: nn.Module) -> None:
    """Store a model's filters with their channels last.

    ``Module.to`` would do that, but fails on fake tensors.
    """
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter) and weight.dim() == 4:
            stored = weight.detach().contiguous(memory_format=torch.channels_last)
            module.weight = nn.Parameter(stored)


def _with_loss(
    model: nn.Module, inputs: Sequence[Tensor], loss: Callable[[Any], Tensor], step: ModelStep
) -> Callable[[], Any]:
    """Return the call of the forward pass, including the loss if the step trains.

    This also puts the model into the mode of the step.
    """
    trains = step.mode == TRAIN
    model.train(trains)

    def call() -> Any:
        result = model(*inputs)
        return loss(result) if trains else result

    return call
