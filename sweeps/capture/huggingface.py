"""Build models of the transformers package from a ``config.json``, without their weights."""

from __future__ import annotations

import importlib.util
import inspect
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from kernels.common.errors import UserError, nearest
from kernels.common.program import needs_extra
from sweeps.capture import attention
from sweeps.capture.step import (
    IMAGE_SIZE,
    TRAIN,
    ModelStep,
    StartedStep,
    first_line,
    images_of,
    mean_of,
    refuse_decoding,
    tokens_of,
)

_TEXT = "only the text part of the model"  # assumption that an audit prints
_IGNORED_ENTRIES = (
    "auto_map",
    "torch_dtype",
    "dtype",
    "quantization_config",
    "transformers_version",
    "return_dict",  # if it is false, a model returns a tuple, which transformers cannot read
)
"""Entries of a ``config.json`` that are left out, because they do not affect the shapes."""


@dataclass(frozen=True)
class HuggingFace:
    """A model that a ``config.json`` describes.

    Attributes:
        config: entries of the file that affect the model.
        text_only: True if only the text part of the model is built.
    """

    name: str
    config: Mapping[str, Any]
    new_sizes: Mapping[str, int]
    text_only: bool

    @property
    def sizes(self) -> Mapping[str, int]:
        """Whole numbers in the configuration, by name, with the defaults of missing entries."""
        entries = self._configuration({}).to_dict()
        return {name: value for name, value in entries.items() if type(value) is int}

    @property
    def positions(self) -> int | None:
        """Longest sequence in tokens; None if the configuration does not state it."""
        sizes = self.sizes
        return sizes.get("max_position_embeddings") or sizes.get("n_positions")

    def start(self, step: ModelStep, changes: Mapping[str, int]) -> StartedStep:
        """Build the model, and a function that calls it on token ids or images.

        If the model computes no loss in a training step, the loss is the mean of the first
        floating-point tensor in the model's result.

        Raises:
            UserError: if the model cannot be built, or if its input or the step is not supported.
        """
        config = self._configuration(changes)
        model_class = _class_of(config, self.config)
        takes_tokens = model_class.main_input_name == "input_ids"
        if getattr(config, "is_encoder_decoder", False) or not takes_tokens:
            refuse_decoding(self.name, step)
        model = _build(model_class, config, step)
        model.train(step.mode == TRAIN)
        inputs = _inputs(model_class, config, step)
        # In a decoding step, the number of keys of the captured attention is corrected later, so
        # the model needs no cache with the keys of earlier tokens.
        if "use_cache" in inspect.signature(model_class.forward).parameters:
            inputs["use_cache"] = False

        def call() -> Any:
            result = model(**inputs)
            if step.mode != TRAIN:
                return result
            loss = result.get("loss")
            return mean_of(result) if loss is None else loss

        if takes_tokens:
            assumptions = tokens_of(step)
        else:
            height, width = inputs[model_class.main_input_name].shape[-2:]
            assumptions = images_of(step, height, width)
        if self.text_only:
            assumptions = (*assumptions, _TEXT)
        return StartedStep(model, call, assumptions)

    def _configuration(self, changes: Mapping[str, int]) -> Any:
        """Return transformers' configuration after setting ``new_sizes``, and then ``changes``."""
        from transformers import AutoConfig

        settings = {**self.config, **self.new_sizes, **changes}
        family = settings.pop("model_type")
        try:
            return AutoConfig.for_model(family, **settings)
        except Exception as error:  # each family raises its own errors for sizes
            with_new_sizes = " with the new sizes" if self.new_sizes or changes else ""
            raise UserError(
                f"transformers does not accept the entries of {self.name}{with_new_sizes} "
                f"({first_line(error)}); correct them."
            ) from None


def read_config(path: Path, new_sizes: Mapping[str, int]) -> HuggingFace:
    """Read the ``config.json`` of a model, and replace the sizes that ``new_sizes`` names.

    Raises:
        UserError: if transformers is not installed, or if the file or the new sizes cannot be
            used.
    """
    config = _read_json(path)
    if importlib.util.find_spec("transformers") is None:
        raise UserError(needs_extra("transformers", "models"))
    from transformers import CONFIG_MAPPING, logging

    logging.set_verbosity_error()  # warnings of transformers would appear between our own lines
    # 1. Take only the text part of a model that also has others, such as one for images.
    text_config: Any = config.get("text_config")
    text_only = isinstance(text_config, dict) and "model_type" in text_config
    if text_only:
        config = text_config
    # 2. Check the family.
    family = config.get("model_type")
    if not isinstance(family, str):
        raise UserError(f"{path} has no model_type; add it, or give the model as module:factory.")
    if family not in CONFIG_MAPPING:
        if "auto_map" in config:
            advice = "the model comes with its own code, so give it as module:factory"
        else:
            # Most often, the model is newer than the installed package.
            advice = (
                "correct the model_type, update transformers, or give the model as module:factory"
            )
        raise UserError(
            f"{path} has the model_type {family!r}, which the installed version of transformers "
            f"does not know; {advice}."
        )
    # 3. Leave out entries that do not affect the shapes, and check the names of the new sizes.
    used_entries = {name: value for name, value in config.items() if name not in _IGNORED_ENTRIES}
    source = HuggingFace(str(path), used_entries, dict(new_sizes), text_only)
    # transformers accepts any name, so the names are compared with a configuration without them.
    original = replace(source, new_sizes={})
    original_entries = original._configuration({}).to_dict()
    source._configuration({})  # raises UserError if transformers does not accept the new sizes
    for name in new_sizes:
        if name not in original_entries:
            raise UserError(f"{path} has no size {name!r}; {nearest(name, original.sizes)}")
    return source


def _class_of(config: Any, entries: Mapping[str, Any]) -> Any:
    """Return the class of a model: one from its ``architectures``, or else the family's default.

    The default is the family's causal language model or, if the family has none, its base model.
    """
    import transformers

    names = entries.get("architectures")
    if not isinstance(names, list):
        names = []
    for name in names:
        candidate = getattr(transformers, str(name), None)
        if isinstance(candidate, type) and issubclass(candidate, transformers.PreTrainedModel):
            return candidate
    for mapping in (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_MAPPING):
        if type(config) in mapping:
            candidate = mapping[type(config)]
            # A few families have several classes, of which the first one is used.
            return candidate[0] if isinstance(candidate, tuple) else candidate
    raise UserError(
        f"transformers has no model class for the model_type {config.model_type!r}; give the model "
        "as module:factory."
    )


def _build(model_class: Any, config: Any, step: ModelStep) -> Any:
    """Build a model with attention as one operation and experts as grouped GEMMs, where supported.

    The chosen implementations of attention and experts are stored in ``config``, and the attention
    operation stays registered with transformers.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.initialization import no_init_weights

    AttentionInterface.register(attention.NAME, attention.for_transformers)
    AttentionMaskInterface.register(attention.NAME, lambda *args, **kwargs: None)
    failure: Exception | None = None
    for mechanism, experts in product((attention.NAME, "sdpa", "eager"), ("grouped_mm", None)):
        config._attn_implementation = mechanism
        config._experts_implementation = experts
        try:
            with warnings.catch_warnings(), no_init_weights():
                warnings.simplefilter("ignore")
                model = model_class._from_config(config, dtype=step.parameter_dtype)
            model.tie_weights()  # no_init_weights() skips this together with the initial values
            return model
        except Exception as error:  # each family raises its own error for what it lacks
            failure = error
    # Only the last failure is about the model itself. Earlier ones may be about an implementation
    # of attention or of experts that the family lacks.
    assert failure is not None
    raise UserError(
        f"the model cannot be built ({first_line(failure)}); correct its sizes, or give the "
        "model as module:factory."
    ) from failure


def _inputs(model_class: Any, config: Any, step: ModelStep) -> dict[str, Any]:
    """Return the arguments with which the model is called, by name."""
    name = model_class.main_input_name
    if name == "pixel_values":
        # If a configuration states no size, square images in three colours are assumed.
        size = getattr(config, "image_size", IMAGE_SIZE)
        if isinstance(size, list | tuple):
            height, width = size
        else:  # one number stands for both directions
            height = size
            width = size
        channels = getattr(config, "num_channels", 3)
        shape = (step.batch, channels, height, width)
        return {name: torch.empty(shape, dtype=step.parameter_dtype)}
    if name != "input_ids":
        raise UserError(
            f"models whose main input is {name!r} are not supported; give this model as "
            "module:factory."
        )
    tokens = torch.zeros(step.batch, step.length, dtype=torch.long)
    inputs: dict[str, Any] = {"input_ids": tokens}
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = tokens
    # If they get labels, models of these classes compute the loss themselves.
    computes_loss = model_class.__name__.endswith(
        ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")
    )
    if step.mode == TRAIN and computes_loss:
        inputs["labels"] = tokens
    return inputs


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}); check its path and permissions."
        ) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({error}); correct it.") from None
    if not isinstance(data, dict):
        raise UserError(f"{path} does not contain a JSON object; give a model's config.json.")
    return data
