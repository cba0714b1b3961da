"""Find the model to audit: a known model, a Hugging Face ``config.json``, or a factory function."""

from __future__ import annotations

import importlib
import inspect
import os
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
    IMAGE_SIZE,
    TRAIN,
    ModelSource,
    ModelStep,
    StartedStep,
    first_line,
    images_of,
    mean_of,
    refuse_decoding,
    tokens_of,
)


@dataclass(frozen=True)
class KnownModel:
    """A model of :data:`sweeps.capture.known.KNOWN`, with new values for some of its sizes."""

    name: str
    new_sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def sizes(self) -> Mapping[str, int]:
        """Sizes by name: the model's published sizes, replaced or extended by ``new_sizes``."""
        return {**KNOWN[self.name].sizes, **self.new_sizes}

    @property
    def positions(self) -> int | None:
        """Longest sequence in tokens for which the model was made; None for an image model."""
        return POSITIONS[self.name]

    def start(self, step: ModelStep, changes: Mapping[str, int]) -> StartedStep:
        """Build the model, and a function that calls it on token ids or 224 × 224 images.

        The loss of a language model is its cross entropy. The loss of an image model is the mean
        of its result.

        Raises:
            UserError: if the sizes do not fit together, or if the step decodes and the model takes
                images.
        """
        known_model = KNOWN[self.name]
        model = _build(known_model.build, {**self.sizes, **changes}, step)
        model.train(step.mode == TRAIN)
        if known_model.takes == IMAGES:
            refuse_decoding(self.name, step)
            shape = (step.batch, 3, IMAGE_SIZE, IMAGE_SIZE)
            images = torch.empty(shape, dtype=step.parameter_dtype)
            images = images.to(memory_format=torch.channels_last)
            _store_channels_last(model)
            call = _with_loss(model, (images,), mean_of, step)
            return StartedStep(model, call, images_of(step, IMAGE_SIZE, IMAGE_SIZE))
        tokens = torch.zeros(step.batch, step.length, dtype=torch.long)

        def loss(logits: Tensor) -> Tensor:
            return functional.cross_entropy(logits.flatten(0, -2).float(), tokens.flatten())

        return StartedStep(model, _with_loss(model, (tokens,), loss, step), tokens_of(step))


@dataclass(frozen=True)
class Factory:
    """A function that builds a module, and a description of the module's inputs.

    Attributes:
        name: path of the function, as ``module:factory``.
        new_sizes: arguments to pass to the function, by name; all others keep their defaults.
        inputs: dtype and shape of each tensor that the module is called with; the dtype None means
            :attr:`ModelStep.parameter_dtype`.
    """

    name: str
    build: Callable[..., nn.Module]
    new_sizes: Mapping[str, int]
    inputs: tuple[tuple[torch.dtype | None, tuple[int, ...]], ...]

    @property
    def sizes(self) -> Mapping[str, int]:
        """New sizes, and the whole-number defaults of the other arguments, by name."""
        try:
            parameters = dict(inspect.signature(self.build).parameters)
        except ValueError:  # a function that is written in C may have no signature
            parameters = {}
        defaults = {
            name: parameter.default
            for name, parameter in parameters.items()
            if type(parameter.default) is int  # True and False are not sizes
        }
        return {**defaults, **self.new_sizes}

    @property
    def positions(self) -> int | None:
        """Always None, because a factory does not state the longest sequence of its module."""
        return None

    def start(self, step: ModelStep, changes: Mapping[str, int]) -> StartedStep:
        """Build the module, and a function that calls the module on ``inputs``.

        The loss is the mean of the first floating-point tensor that the module returns.

        Raises:
            UserError: if the step decodes, or if the factory does not return a module.
        """
        refuse_decoding(self.name, step)
        model = _build(self.build, {**self.new_sizes, **changes}, step)
        if not isinstance(model, nn.Module):
            raise UserError(
                f"{self.name} returns an object of type {type(model).__name__}; it must return an "
                "nn.Module."
            )
        model.train(step.mode == TRAIN)
        tensors = [
            torch.zeros(shape, dtype=dtype or step.parameter_dtype) for dtype, shape in self.inputs
        ]
        return StartedStep(model, _with_loss(model, tensors, mean_of, step), ("inputs as given",))


def find_source(
    model: str, new_sizes: Mapping[str, int] | None = None, inputs: Sequence[str] = ()
) -> ModelSource:
    """Return the model that the command-line argument ``MODEL`` names.

    Args:
        model: a key of :data:`KNOWN`, a ``config.json`` or its folder, or ``module:factory``.
        new_sizes: new values of the model's sizes, by name.
        inputs: inputs of the ``nn.Module`` that ``module:factory`` returns, each as dtype and
            shape, such as ``int64[8,2048]``.

    Raises:
        UserError: if the model cannot be found, read or imported, if transformers is needed but
            not installed, or if the sizes or the inputs are not valid. Only the names of a known
            model's sizes are checked here, and the sizes of a factory are not checked.
    """
    check_model(model)
    new_sizes = dict(new_sizes or {})
    path = Path(model)
    is_config = path.suffix == ".json" or os.path.exists(model)
    if inputs and (model in KNOWN or is_config):
        raise UserError(
            f"--input works only with module:factory, not with {model}; leave out --input."
        )
    if model in KNOWN:
        parameters = inspect.signature(KNOWN[model].build, eval_str=True).parameters
        # A ResNet's blocks are a tuple with a number for each stage, so they are not a size.
        names = [name for name, parameter in parameters.items() if parameter.annotation is int]
        for name in new_sizes:
            if name not in names:
                raise UserError(f"{model} has no size {name!r}; {nearest(name, names)}")
        return KnownModel(model, new_sizes)
    if is_config:
        from sweeps.capture.huggingface import read_config

        file = path / "config.json" if path.is_dir() else path
        return read_config(file, new_sizes)
    return _import_factory(model, new_sizes, inputs)


def _import_factory(name: str, new_sizes: Mapping[str, int], inputs: Sequence[str]) -> Factory:
    """Import the factory that ``module:factory`` names."""
    module_name, _, function_name = name.partition(":")
    if not inputs:
        raise UserError(
            f"the inputs of the nn.Module that {name} returns are missing; give each with --input, "
            "for example --input 'int64[8,2048]'."
        )
    sys.path.insert(0, "")  # look for the module in the current folder first
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything
        raise UserError(
            f"{module_name!r} cannot be imported ({first_line(error)}); run this command in the "
            "folder that contains the module, or correct the module."
        ) from None
    finally:
        # The factory may import further modules of this folder when it is called. At the end of the
        # path, they do not take the place of installed modules that are imported later.
        sys.path.remove("")
        if "" not in sys.path:
            sys.path.append("")
    build = getattr(module, function_name, None)
    if build is None:
        raise UserError(
            f"{module_name} has no {function_name!r}; name one of its functions after the colon."
        )
    if not callable(build):
        raise UserError(f"{name} is not a function; name one that returns an nn.Module.")
    return Factory(name, build, new_sizes, tuple(map(_parse_input, inputs)))


def _parse_input(text: str) -> tuple[torch.dtype | None, tuple[int, ...]]:
    """Parse text such as ``int64[8,2048]`` into a dtype and a shape.

    The letter ``x`` in place of a dtype, as in ``x[8,3,224,224]``, is returned as None. It means
    :attr:`ModelStep.parameter_dtype`.
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
            f"--input: {name!r} is not a dtype of PyTorch; use one such as int64 or bfloat16, or x "
            "for the dtype of the model's parameters."
        )
    return dtype, shape


def _build(build: Callable[..., nn.Module], sizes: Mapping[str, int], step: ModelStep) -> nn.Module:
    """Build a module whose parameters have ``step.parameter_dtype`` from the start.

    The dtype cannot be changed later, because ``Module.to`` fails on fake tensors.
    """
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(step.parameter_dtype)
    try:
        return build(**sizes)
    finally:
        torch.set_default_dtype(default_dtype)


def _store_channels_last(model: nn.Module) -> None:
    """Replace filters with channels-last copies, because ``Module.to`` fails on fake tensors."""
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter) and weight.dim() == 4:
            stored = weight.detach().contiguous(memory_format=torch.channels_last)
            module.weight = nn.Parameter(stored)


def _with_loss(
    model: nn.Module, inputs: Sequence[Tensor], loss: Callable[[Any], Tensor], step: ModelStep
) -> Callable[[], Any]:
    """Return a function that runs the forward pass, and computes the loss if the step trains."""

    def call() -> Any:
        result = model(*inputs)
        return loss(result) if step.mode == TRAIN else result

    return call
