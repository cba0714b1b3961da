"""Test of the command ``rules``, which judges rules by a recording and measures nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.support.command_line import ANALYSIS, said
from tests.support.published import PUBLISHED, SLUG


def test_rules_are_judged_and_written_next_to_the_recording(tmp_path: Path) -> None:
    shutil.copytree(PUBLISHED, tmp_path / "results")
    result = said(ANALYSIS, "rules", "--machine", SLUG, "--results", str(tmp_path / "results"))
    assert (result.code, result.faults) == (0, []), result.err
    rules = json.loads((tmp_path / "results" / SLUG / "rules.json").read_text(encoding="utf-8"))
    for rule in rules:
        assert any(
            line.startswith(rule["id"]) and line.rstrip().endswith(rule["verdict"])
            for line in result.out.splitlines()
        )
    assert sum(rule["cases"] > 0 for rule in rules) > 15
