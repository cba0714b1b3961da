"""Test of the command ``rules``, which judges rules by a recording and measures nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.support.command_line import ANALYSIS, said
from tests.support.published import RECORDED, SLUG


def test_rules_are_judged_and_written_next_to_the_recording(tmp_path: Path) -> None:
    folder = tmp_path / SLUG
    shutil.copytree(RECORDED, folder)
    header, *lines = (folder / "measurements.csv").read_text(encoding="utf-8").splitlines(True)
    # One sweep is enough, and is judged and drawn within seconds.
    lines = [line for line in lines if ",alignment," in line]
    (folder / "measurements.csv").write_text("".join([header, *lines]), encoding="utf-8")
    result = said(ANALYSIS, "rules", "--machine", SLUG, "--results", str(tmp_path))
    assert (result.code, result.faults) == (0, []), result.err
    rules = json.loads((folder / "rules.json").read_text(encoding="utf-8"))
    for rule in rules:
        assert any(
            line.startswith(rule["id"]) and line.rstrip().endswith(rule["verdict"])
            for line in result.out.splitlines()
        )
    assert sum(rule["cases"] > 0 for rule in rules) >= 2


def test_the_needed_sweeps_are_one_json_document() -> None:
    text = said(ANALYSIS, "rules", "--sweeps")
    document = said(ANALYSIS, "rules", "--sweeps", "--json")
    assert json.loads(document.out) == text.out.split()


def test_a_dtype_without_a_table_is_refused(tmp_path: Path) -> None:
    result = said(ANALYSIS, "rules", "--dtype", "bf16", "--results", str(tmp_path))
    assert result.code == 2
    assert result.err.startswith("--dtype needs --table")
