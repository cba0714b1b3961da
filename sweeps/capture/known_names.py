"""Names of known models.

This module does not import PyTorch, because that import takes seconds.
"""

from __future__ import annotations

from pathlib import Path

from kernels.common.errors import UserError, nearest

POSITIONS: dict[str, int | None] = {
    "gpt2": 1024,
    "gpt2-medium": 1024,
    "gpt2-large": 1024,
    "gpt2-xl": 1024,
    "llama-2-7b": 4096,
    "llama-3-8b": 8192,
    "resnet-50": None,
    "unet": None,
}
"""Longest sequence in tokens that each known model was made for, by name; None for images."""


def check_model(model: str) -> None:
    """Check that the command-line argument ``MODEL`` can name a model.

    Raises:
        UserError: if the argument is not a known name, an existing path, a path that ends with
            ``.json``, or ``module:factory``.
    """
    path = Path(model)
    if model not in POSITIONS and path.suffix != ".json" and not path.exists() and ":" not in model:
        raise UserError(
            f"{model!r} is not a config.json, a module:factory or a known model; "
            f"{nearest(model, POSITIONS)}"
        )
