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
    for first, second in combinations(folders, 2):
        if os.path.realpath(first) == os.path.realpath(second):
            raise UserError(f"{second} is given twice; give each recording once.")


def refuse_strangers(sources: Sequence[MergeSource]) -> None:
    """Refuse recordings that cannot be merged with one another.

    Raises:
        UserError: if recordings are of different machines, of one machine in different settings, or
            of different PyTorch or driver versions, or if they contain the same samples.
    """
    for first, second in combinations(sources, 2):
        if why := _why_apart(first, second):
            raise UserError(why)
    folder_of_sample: dict[tuple[str, float, float], Path] = {}
    for source in sources:
        samples = _sample_keys(source)
        for sample in samples & folder_of_sample.keys():
            raise UserError(
                f"{folder_of_sample[sample]} and {source.folder} contain the same samples, so one "
                "is a copy of the other; give each recording once."
            )
        folder_of_sample |= dict.fromkeys(samples, source.folder)


def _why_apart(first: MergeSource, second: MergeSource) -> str:
    """Return why two recordings do not belong together, as a sentence; empty if they do."""
    if first.machine.slug != second.machine.slug:
        return (
            f"{first.folder} is of {first.machine.slug} and {second.folder} of "
            f"{second.machine.slug}; merge only recordings of one machine."
        )
    for name, value, other_value in _differing_facts(first, second):
        return (
            f"{first.folder} and {second.folder} are of machines that differ in {name} "
            f"({_shown(value)} and {_shown(other_value)}), so they cannot be merged."
        )
    if why := other_software(first.record["software"], second.record["software"]):
        return (
            f"{second.folder} and {first.folder} were measured with different software: {why}. "
            "Measure one of them again with the other's versions."
        )
    for gpu in second.gpus:
        different_limits = limits_apart(gpu, first.gpus)
        if different_limits is not None:
            second_limit, first_limit = different_limits
            return (
                f"a GPU of {second.folder} has {second_limit} and one of {first.folder} has "
                f"{first_limit}, so they cannot be merged."
            )
    return ""


def _differing_facts(first: MergeSource, second: MergeSource) -> Iterator[tuple[str, Any, Any]]:
    """Yield the facts of the machine in which two recordings differ, with both values."""
    ignored = (*_OWN, *_MEASURED) if first.machine.kind == "cpu" else _OWN
    other_facts = asdict(second.machine)
    for name, value in asdict(first.machine).items():
        if name not in ignored and other_facts[name] != value:
            yield name, value, other_facts[name]


def _shown(fact: Any) -> str:
    """Return a fact of a machine as messages show it."""
    return f"{fact:.6g}" if isinstance(fact, float) else str(fact)


def _sample_keys(source: MergeSource) -> set[tuple[str, float, float]]:
    """Return what identifies each sample: its case, its moment and its time."""
    return {
        (event["case"], event["at"], event["s"])
        for event in source.events
        if event["event"] == "sample"
    }
