"""Sentences of the page."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from analysis.page.page_findings import verdict


@pytest.mark.parametrize(
    ("health", "words"), [({"verdict": "noisy"}, "noisy run"), ({}, "run not judged")]
)
def test_the_verdict_on_a_run_is_a_phrase(health: dict[str, str], words: str) -> None:
    report: Any = SimpleNamespace(
        analysis=SimpleNamespace(recording=SimpleNamespace(public=None, health=health))
    )
    assert verdict(report) == words
