"""Build transformers' models from a ``config.json``, for every family it knows, without weights."""

from __future__ import annotations

import importlib.util
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from kernels.common.errors import UserError, nearest
from kernels.common.program import needs_extra
from sweeps.capture import attention
from sweeps.capture.step import (
    TRAIN,
    ModelStep,
    StartedStep,
    first_line,
    mean_of,
    refuse_decoding,
    tokens_of,
)

_TEXT = "only the text part of the model"


@dataclass(frozen=True)
class HuggingFace:
    """A model that a ``config.json`` describes.

    ``config`` is the content of the file, and ``given`` has the sizes that replace its own.
    ``of_text`` says that only the text part of the model is built.
    """

    name: str
    config: Mapping[str, Any]
    given: Mapping[str, int]
    of_text: bool

    @property
    def sizes(self) -> Mapping[str, int]:
        """Whole numbers of the configuration, including those that the file leaves out."""
        entries = self._configuration({}).to_dict()
        return {name: value for name, value in entries.items() if type(value) is int}

    @property
    def positions(self) -> int | None:
        """Longest sequence according to the configuration; None if it does not say."""
        sizes = self.sizes
        return sizes.get("max_position_embeddings") or sizes.get("n_positions")

    def start(self, step: ModelStep, changes: Mapping[str, int]) -> StartedStep:
        """Build the model, and its call on token ids or pixels.

        A training step uses the loss that the model computes itself, or else the mean of the
        model's result.
        """
        config = self._configuration(changes)
        model_class = _class_of(config, self.config)
        takes_tokens = model_class.main_input_name == "input_ids"
        if getattr(config, "is_encoder_decoder", False) or not takes_tokens:
            refuse_decoding(self.name, step)
        model = _build(model_class, config, step)
        model.train(step.mode == TRAIN)
        inputs = _inputs(model_class, config, step)
        # The keys of earlier tokens are added to the captured products, so no cache is needed here.
        arguments = model_class.forward.__code__.co_varnames
        if "use_cache" in arguments:
            inputs["use_cache"] = False

        def call() -> Any:
            result = model(**inputs)
            if step.mode != TRAIN:
                return result
            loss = result.get("loss")
            return mean_of(result) if loss is None else loss

        assumptions = list(tokens_of(step)) if takes_tokens else []
        if self.of_text:
            assumptions.append(_TEXT)
        return StartedStep(model, call, tuple(assumptions))

    def _configuration(self, changes: Mapping[str, int]) -> Any:
        """Return transformers' configuration, with some sizes changed.

        Raises:
            UserError: if the family refuses these sizes.
        """
        from transformers import AutoConfig

        settings = {**self.config, **self.given, **changes}
        family = settings.pop("model_type")
        try:
            return AutoConfig.for_model(family, **settings)
        except Exception as error:  # each family raises its own errors for sizes
            raise UserError(f"{self.name}: {first_line(error)}") from None


def read_config(path: Path, given: Mapping[str, int]) -> HuggingFace:
    """Read the configuration of a model.

    Raises:
        UserError: if the file cannot be read, if transformers is missing or does not know the
            family, or if the model has no size of a given name.
    """
    config = _read_json(path)
    if importlib.util.find_spec("transformers") is None:
        raise UserError(needs_extra("transformers", "models"))
    from transformers import CONFIG_MAPPING

    # 1. Take the text part of a model that has several, such as one of text and images.
    text_config = config.get("text_config")
    of_text = False
    if isinstance(text_config, dict) and "model_type" in text_config:
        of_text = True
        config = text_config
    # 2. Check the family.
    family = config.get("model_type")
    if not isinstance(family, str):
        raise UserError(f"{path} has no model_type, so the model's family is unknown.")
    if family not in CONFIG_MAPPING:
        has_own_code = "auto_map" in config
        advice = (
            ": it brings its own code, so give the model as module:factory."
            if has_own_code
            else f"; {nearest(family, CONFIG_MAPPING)}"
        )
        raise UserError(
            f"{path} is of the family {family!r}, which the installed transformers does not know"
            f"{advice}"
        )
    # 3. Leave out entries that do not affect the shapes, and check the given sizes.
    ignored = ("auto_map", "torch_dtype", "dtype", "quantization_config", "transformers_version")
    used_entries = {name: value for name, value in config.items() if name not in ignored}
    source = HuggingFace(str(path), used_entries, dict(given), of_text)
    sizes = source.sizes
    for name in given:
        if name not in sizes:
            raise UserError(f"{path} has no size {name!r}; {nearest(name, sizes)}")
    return source


def _class_of(config: Any, entries: Mapping[str, Any]) -> Any:
    """Return the class that the configuration names, else the family's language model or base.

    ``config`` is transformers' configuration, and ``entries`` are those of the file.

    Raises:
        UserError: if transformers has no such class.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    names = entries.get("architectures")
    for name in names if isinstance(names, list) else ():
        candidate = getattr(transformers, str(name), None)
        if isinstance(candidate, type) and issubclass(candidate, transformers.PreTrainedModel):
            return candidate
    for mapping in (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_MAPPING):
        if type(config) in mapping:
            candidate = mapping[type(config)]
            # A few families have several classes.
            return candidate[0] if isinstance(candidate, tuple) else candidate
    raise UserError(f"transformers has no language model of the family {config.model_type!r}.")


def _build(model_class: Any, config: Any, step: ModelStep) -> Any:
    """Build a model with attention as one operation and experts as grouped GEMMs.

    Where a family does not support that, its attention is PyTorch's function or its own code.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.initialization import no_init_weights

    AttentionInterface.register(attention.NAME, attention.for_transformers)
    AttentionMaskInterface.register(attention.NAME, lambda *args, **kwargs: None)
    first_failure: Exception | None = None
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
            first_failure = first_failure or error
    assert first_failure is not None
    raise UserError(f"the model cannot be built: {first_line(first_failure)}") from first_failure


def _inputs(model_class: Any, config: Any, step: ModelStep) -> dict[str, Any]:
    """Return the arguments with which a model is called: images or token ids.

    Raises:
        UserError: if the model takes something else.
    """
    name = model_class.main_input_name
    if name == "pixel_values":
        size = getattr(config, "image_size", 224)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        channels = getattr(config, "num_channels", 3)
        shape = (step.batch, channels, height, width)
        return {name: torch.empty(shape, dtype=step.parameter_dtype)}
    if name != "input_ids":
        raise UserError(
            f"a model with the main input {name!r} is not supported: give it as module:factory."
        )
    tokens = torch.zeros(step.batch, step.length, dtype=torch.long)
    inputs: dict[str, Any] = {"input_ids": tokens}
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = tokens
    # With labels, these classes compute the loss themselves.
    computes_loss = model_class.__name__.endswith(
        ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")
    )
    if step.mode == TRAIN and computes_loss:
        inputs["labels"] = tokens
    return inputs


def _read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        UserError: if the file cannot be read, or does not contain a JSON object.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}.") from None
    if not isinstance(data, dict):
        raise UserError(f"{path} is not a JSON object, as a model's config.json must be.")
    return data
