"""Whether times of two recordings may be compared: by anchors, by cases, or nothing tells."""

from __future__ import annotations

from pathlib import Path

import pytest

from sweeps.merging.comparing import compare
from sweeps.merging.merge import Merged, merge
from tests.support.fakes import planned
from tests.support.mergeable import record
from tests.support.runs import rows_of

CASES, ANCHORS = planned(8), planned(16)[8:]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``a``, ``same`` and ``slow`` (by 5 %) have all cases in common, and anchors; ``slow-anchors``
    has only these, ``other`` nothing.
    """
    folder = tmp_path_factory.mktemp("made")
    record(folder / "a", CASES, anchors=ANCHORS)
    record(folder / "same", CASES, anchors=ANCHORS)
    record(folder / "slow", CASES, seconds=1.05e-4, anchors=ANCHORS)
    record(folder / "slow-anchors", planned(20)[16:], seconds=1.05e-4, anchors=ANCHORS)
    record(folder / "other", planned(20)[16:], seconds=1.05e-4)
    return folder


def merged(made: Path, into: Path, *names: str) -> Merged:
    return merge([made / name for name in names], into / "all", into)


def test_what_is_as_fast_is_not_named(made: Path, tmp_path: Path) -> None:
    result = merged(made, tmp_path, "a", "same")
    (comparison,) = result.comparisons
    assert comparison.verdict == "alike"
    assert [found and found["cases"] for found in comparison.judged.values()] == [8, 8]
    assert "agree within 3%" in result.sentences[0]
    assert "not comparable" not in " ".join(result.sentences)


def test_a_planted_difference_is_named_and_the_merge_still_happens(
    made: Path, tmp_path: Path
) -> None:
    result = merged(made, tmp_path, "a", "slow")
    (comparison,) = result.comparisons
    assert comparison.verdict == "apart"
    for found in comparison.judged.values():
        assert found is not None
        assert found["lo"] <= found["ratio"] <= found["hi"]
        assert found["ratio"] == pytest.approx(1.05, abs=0.005)
    a, slow = made / "a", made / "slow"
    assert result.sentences[0].startswith(f"Times of {a} and {slow} are not comparable as they are")
    assert "8 cases were timed by several of them" in result.sentences[1]
    text = (tmp_path / "all" / "merged.md").read_text(encoding="utf-8")
    assert "Times of 1/2 and 2/2 are not comparable as they are: in 2/2 8 anchors take 1.0" in text
    assert sum(line.startswith("| (") or " fake |" in line for line in text.splitlines()) == 8
    assert str(made) not in text
    assert len(rows_of(result.folder)) == 8


def test_anchors_tell_where_no_case_is_common(made: Path, tmp_path: Path) -> None:
    result = merged(made, tmp_path, "a", "slow-anchors")
    (comparison,) = result.comparisons
    assert (comparison.verdict, comparison.judged["cases"]) == ("apart", None)
    assert "No case was timed by two of them." in result.sentences
    workers = {line.split(",")[1] for line in _lines(tmp_path / "all" / "anchors.csv")}
    assert workers == {"1/2", "2/2"}


def test_nothing_tells_without_either(made: Path, tmp_path: Path) -> None:
    result = merged(made, tmp_path, "a", "other")
    assert result.comparisons[0].verdict == "unknown"
    assert result.sentences[0].startswith("Nothing tells whether times of ")


def test_of_three_any_two_are_compared(made: Path, tmp_path: Path) -> None:
    result = merged(made, tmp_path, "a", "same", "slow")
    verdicts = {(c.one, c.other): c.verdict for c in result.comparisons}
    assert verdicts == {(0, 1): "alike", (0, 2): "apart", (1, 2): "apart"}
    assert {row["worker"] for row in rows_of(result.folder).values()} <= {"1/3", "2/3", "3/3"}


def test_too_few_or_too_noisy_is_not_certain() -> None:
    few = compare([{}, {}], [{"a": 1.0, "b": 2.0}, {"a": 1.1, "b": 2.2}])[0]
    assert few.verdict == "unclear"
    assert "2 cases that both timed take 1.100× the time (too few" in few.sentence(["x", "y"])
    ratios = (0.7, 0.8, 1.0, 1.08, 1.1, 1.2, 1.3)
    times = {str(ratio): ratio for ratio in ratios}
    noisy = compare([{}, {}], [dict.fromkeys(times, 1.0), times])[0]
    assert noisy.verdict == "unclear"
    assert compare([{"a": 1.0}, {"a": 1.0}], [{}, {}])[0].verdict == "unclear"


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()[1:]
