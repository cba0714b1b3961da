"""Folding while other nodes end at the same time or join the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sweeps.folding.fold import fold
from sweeps.folding.health import health
from sweeps.folding.history import History, histories
from sweeps.store import Event, read_run, samples_path, write_run
from tests.support.fakes import planned
from tests.support.runs import a_run, carry, rows_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    carry(a_run(tmp_path, planned(3)))
    return tmp_path


def test_what_is_folded_already_is_not_folded_again(folder: Path) -> None:
    path = samples_path(folder, (1, 1))
    table = folder / "measurements.csv"
    table.unlink()
    assert fold(folder, [path])["counts"]["measured"] == 3
    assert not table.exists()
    with open(path, "a", encoding="utf-8") as file:
        file.write('{"event":"aside","case":"","cost":1.0,"at":1.0,"worker":"1/1"}\n')
    fold(folder, [path])
    assert sorted(rows_of(folder)) == [1, 2, 3]
    table.unlink()
    fold(folder)  # without a list of written files, the run is always folded
    assert table.exists()


@pytest.mark.parametrize("text", ["", "[]", '{"sizes": 1}', "{"])
def test_a_damaged_note_of_it_means_folding(folder: Path, text: str) -> None:
    (folder / "samples" / "folded.json").write_text(text, encoding="utf-8")
    (folder / "measurements.csv").unlink()
    fold(folder, [samples_path(folder, (1, 1))])
    assert (folder / "measurements.csv").exists()


def test_what_others_write_into_the_plan_meanwhile_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def joined(*arguments: Any) -> Any:
        write_run(folder, {**read_run(folder), "gpus": [{"gpu": 5, "node": 1}], "turns": [1]})
        return health(*arguments)

    monkeypatch.setattr("sweeps.folding.fold.health", joined)
    fold(folder)
    record = read_run(folder)
    assert record["gpus"] == [{"gpu": 5, "node": 1}]
    assert record["turns"] == [1]
    assert record["counts"]["measured"] == 3


def test_launch_gaps_seen_by_one_worker_are_not_hidden_by_a_worker_without_samples() -> None:
    """Both recordings of a merged one have the case, and neither of them has a time for it."""
    prepared: Event = {"event": "facts", "case": "a", "worker": "1/2", "facts": {"rel_error": 0.0}}
    exposed: Event = {"event": "sample", "case": "a", "worker": "2/2", "hidden": False, "s": 1e-5}
    for events in ([prepared, exposed], [exposed, prepared]):
        assert histories(events)["a"].only_exposed


def test_a_check_whose_samples_are_lost_leaves_nothing_to_name() -> None:
    """The line of the samples may be damaged, and the line of the check intact."""
    history = History()
    history.add({"event": "right", "case": "a", "worker": "1/1", "at": 0.0})
    assert not history.unnamed
