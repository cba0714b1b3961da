"""Names of known models.

This module does not import PyTorch, because that import takes seconds.
"""

from __future__ import annotations

import os
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
"""Maximum sequence length, in tokens, of each known model; None for image models."""


def check_model(model: str) -> None:
    """Check the command-line argument ``MODEL`` without loading the model.

    Raises:
        UserError: if the argument is not the name of a known model, the name of a ``.json`` file,
            an existing path or ``module:factory``.
    """
    may_be_model = (
        model in POSITIONS
        or Path(model).suffix == ".json"
        or ":" in model
        or os.path.exists(model)  # Path.exists raises an error for a name that is too long
    )
    if not may_be_model:
        raise UserError(
            f"{model!r} is not a config.json, a module:factory or a known model; "
            f"{nearest(model, POSITIONS)}"
        )
