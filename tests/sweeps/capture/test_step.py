"""Test what a step of a model is by default."""

from __future__ import annotations

import pytest

from sweeps.capture.step import default_seq


@pytest.mark.parametrize(
    ("positions", "mode", "tokens", "seq"),
    [
        (None, "train", 1, 2048),  # a module of the user's states no positions
        (8192, "train", 1, 2048),
        (1024, "train", 1, 1024),
        (1024, "decode", 8, 1016),  # the new tokens need positions, too
        (4, "decode", 8, 1),
    ],
)
def test_the_default_length_is_what_the_model_has_room_for(
    positions: int | None, mode: str, tokens: int, seq: int
) -> None:
    assert default_seq(positions, mode, tokens) == seq
