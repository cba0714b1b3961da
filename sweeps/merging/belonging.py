"""Checks that recordings belong together: one machine, the same versions, and none given twice."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

from kernels.common.errors import UserError
from sweeps.merging.source import MergeSource
from sweeps.running.devices import limits_apart
from sweeps.store import other_software

_OWN = ("name", "memory_bytes", "sources")
"""Facts that each device of a model reports for itself, and that may differ."""
_MEASURED = ("peaks", "bandwidth")
"""Facts of a CPU that every run measures again."""


def refuse_twice(folders: Sequence[Path]) -> None:
    """Refuse a single folder, or one that is given twice.

    Raises:
        UserError: if there are fewer than two folders, or if one is given twice.
    """
    if len(folders) < 2:
        raise UserError("merging needs at least two recordings; give two or more folders.")
    for one, other in combinations(folders, 2):
        if os.path.realpath(one) == os.path.realpath(other):
            raise UserError(f"{other} is given twice; give each recording once.")


def refuse_strangers(sources: Sequence[MergeSource]) -> None:
    """Refuse recordings that cannot be merged with one another.

    Raises:
        UserError: if recordings are of different machines, of one machine in different settings, or
            of different PyTorch or driver versions, or if they contain the same samples.
    """
    for one, other in combinations(sources, 2):
        if why := _why_apart(one, other):
            raise UserError(why)
    seen: dict[tuple[str, float, float], Path] = {}
    for source in sources:
        moments = _moments(source)
        for moment in moments & seen.keys():
            raise UserError(
                f"{seen[moment]} and {source.folder} contain the same samples, so one is a copy "
                "of the other; give each recording once."
            )
        seen |= dict.fromkeys(moments, source.folder)


def _why_apart(one: MergeSource, other: MergeSource) -> str:
    """Return why two recordings do not belong together, as a sentence; empty if they do."""
    if one.machine.slug != other.machine.slug:
        return (
            f"{one.folder} is of {one.machine.slug} and {other.folder} of {other.machine.slug}; "
            "merge only recordings of one machine."
        )
    for name, its, others in _other_facts(one, other):
        return (
            f"{one.folder} and {other.folder} are of machines that differ in {name} "
            f"({_shown(its)} and {_shown(others)}), so they cannot be merged."
        )
    if why := other_software(one.record["software"], other.record["software"]):
        return (
            f"{other.folder} and {one.folder} were measured with different software: {why}. "
            "Measure one of them again with the other's versions."
        )
    for gpu in other.gpus:
        if apart := limits_apart(gpu, one.gpus):
            return (
                f"a GPU of {other.folder} has {apart[0]} and one of {one.folder} has {apart[1]}, "
                "so they cannot be merged."
            )
    return ""


def _other_facts(one: MergeSource, other: MergeSource) -> Iterator[tuple[str, Any, Any]]:
    """Yield the facts of the machine in which two recordings differ, with both values."""
    free = (*_OWN, *(_MEASURED if one.machine.kind == "cpu" else ()))
    facts, others = asdict(one.machine), asdict(other.machine)
    for name, value in facts.items():
        if name not in free and others[name] != value:
            yield name, value, others[name]


def _shown(fact: Any) -> str:
    return f"{fact:.6g}" if isinstance(fact, float) else str(fact)


def _moments(source: MergeSource) -> set[tuple[str, float, float]]:
    """Return what identifies each sample: its case, its moment and its time."""
    return {(e["case"], e["at"], e["s"]) for e in source.events if e["event"] == "sample"}
