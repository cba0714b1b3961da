"""Titles of the plots of a model's step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from analysis.plots.audit import levers_finding, step_finding


def account(machine: str, **by_role: float) -> Any:
    """Return the parts of an account that the title needs."""
    return SimpleNamespace(machine=machine, by_role=by_role, step_us=100.0)


def test_the_title_of_a_step_names_the_largest_role_and_one_of_several_machines() -> None:
    one = {"one": account("one", head=40.0, q=10.0, other=50.0)}
    assert step_finding(one) == "head takes 40% of the step"
    three = account("one", head=20.0, q=10.0, k=10.0, v=10.0)
    assert step_finding({"one": three}) == "q, k, v take 30% of the step"
    assert step_finding({"one": three, "two": three}) == "q, k, v take 30% of the step on one"
    assert step_finding({"one": account("one", other=9.0)}) == "no operation has a known role"


def lever(words: str, gain: float, after_costs: float) -> Any:
    """Return a stand-in for a worthwhile lever, with only the attributes that the title needs."""
    return SimpleNamespace(
        words=words, gain=SimpleNamespace(value=gain), expected_gain=after_costs, verdict="likely"
    )


def test_the_title_of_changes_names_one_of_several_machines() -> None:
    levers = {
        "one": [lever("vocab 100 → 128", 0.01, 0.01)],
        "two": [lever("width 60 → 64", 0.02, 0.02)],
    }
    assert levers_finding(levers) == "width 60 → 64 makes the step 2.0% faster on two"
    assert levers_finding({"one": levers["one"]}) == "vocab 100 → 128 makes the step 1.0% faster"
    assert levers_finding({"one": []}) == "no change of the model's dimensions is worth making"


def test_the_title_of_changes_names_the_best_change_of_the_report() -> None:
    # The first change computes less, so most of its gain comes from fewer FLOPs.
    levers = {
        "one": [lever("width 65 → 60", 0.09, 0.01), lever("vocab 100 → 128", 0.03, 0.02)],
    }
    assert levers_finding(levers) == "vocab 100 → 128 makes the step 3.0% faster"
