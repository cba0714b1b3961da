"""Checks of JSON documents, and the messages about damaged ones."""

from __future__ import annotations

from typing import Any

import pytest

from kernels.common.documents import COUNT, POSITIVE, Each, Maybe, Number, misfit

SHAPE = {
    "name": str, "times": [POSITIVE], "by": Each(COUNT), "maybe": Maybe({"x": Number(-1, 1)}),
    "also?": bool,
}  # fmt: skip
SOUND: dict[str, Any] = {"name": "a", "times": [1, 0.5], "by": {"a": 0}, "maybe": {"x": 0.5}}


@pytest.mark.parametrize(
    "more",
    [{}, {"also": True}, {"maybe": None}, {"times": []}, {"by": {}}, {"unknown": object()}],
)
def test_valid_documents_have_no_misfit(more: dict[str, Any]) -> None:
    assert misfit({**SOUND, **more}, SHAPE) == ""


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"name": 1}, "it.name is 1, not text"),
        ({"times": 1}, "it.times is 1, not a list"),
        ({"times": [1, 0]}, "it.times[1] is 0, not a number from"),
        ({"times": [float("nan")]}, "it.times[0] is nan"),
        ({"times": [float("inf")]}, "it.times[0] is inf"),
        ({"times": [10**400]}, "it.times[0] is 1000000"),
        ({"times": ["1"]}, "it.times[0] is '1'"),
        ({"times": [True]}, "it.times[0] is True"),
        ({"by": {"a": 1.5}}, "it.by.a is 1.5, not a whole number from 0"),
        ({"by": []}, "it.by is [], not a mapping"),
        ({"maybe": {}}, "it.maybe has no 'x'"),
        ({"maybe": {"x": 2}}, "it.maybe.x is 2"),
        ({"also": 1}, "it.also is 1, not true or false"),
    ],
)
def test_the_message_names_the_path_to_an_invalid_value(more: dict[str, Any], words: str) -> None:
    assert words in misfit({**SOUND, **more}, SHAPE)


@pytest.mark.parametrize("key", SOUND)
def test_the_message_names_a_missing_key(key: str) -> None:
    assert misfit({k: v for k, v in SOUND.items() if k != key}, SHAPE) == f"it has no {key!r}"


@pytest.mark.parametrize("value", [None, 1, "text", []])
def test_a_document_that_is_not_a_mapping(value: object) -> None:
    assert "not a mapping" in misfit(value, SHAPE, "the document")
