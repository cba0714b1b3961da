"""Check that recordings can be merged with one another.

The recordings must be of one machine, must have been made with the same versions of PyTorch and the
driver and the same GPU limits, and must have no samples in common.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

from kernels.common.errors import UserError
from sweeps.merging.source import MergeSource
from sweeps.running.devices import find_different_limit
from sweeps.store import differing_software

_REPORTED = ("name", "memory_bytes", "sources")
"""Machine facts that may differ between the recordings to merge."""
_MEASURED = ("peaks", "bandwidth")
"""CPU facts that may also differ, because every run on a CPU measures them again."""


def check_folders(folders: Sequence[Path]) -> None:
    """Check the folders of the recordings to merge.

    Raises:
        UserError: if there are fewer than two folders, or if a folder is given twice.
    """
    if len(folders) < 2:
        raise UserError("merging needs at least two recordings; give two or more folders.")
    for first, second in combinations(folders, 2):
        if os.path.realpath(first) == os.path.realpath(second):
            raise UserError(f"{second} is given twice; give each recording once.")


def check_compatible(sources: Sequence[MergeSource]) -> None:
    """Check that recordings can be merged with one another.

    Raises:
        UserError: if two recordings differ in the machine, in the GPUs' limits, or in the version
            of PyTorch or the driver, or if they have samples in common.
    """
    for first, second in combinations(sources, 2):
        if why := _why_incompatible(first, second):
            raise UserError(why)
    folder_of_sample: dict[tuple[str, float, float], Path] = {}
    for source in sources:
        samples = _sample_keys(source)
        copied_samples = samples & folder_of_sample.keys()
        if copied_samples:
            any_copied = next(iter(copied_samples))  # one is enough to name the other folder
            raise UserError(
                f"{folder_of_sample[any_copied]} and {source.folder} have samples in common, which "
                "a merged recording would contain twice; leave one of these recordings out."
            )
        folder_of_sample |= dict.fromkeys(samples, source.folder)


def _why_incompatible(first: MergeSource, second: MergeSource) -> str:
    """Compare two recordings' machines, versions and limits.

    Return the error message if the recordings differ in one of these, or "" if they do not.
    """
    if first.machine.slug != second.machine.slug:
        return (
            f"{first.folder} is a recording of {first.machine.slug}, but {second.folder} is a "
            f"recording of {second.machine.slug}; merge only recordings of one machine."
        )
    first_difference = next(_differing_facts(first, second), None)
    if first_difference is not None:
        name, value, other_value = first_difference
        return (
            f"{first.folder} and {second.folder} are recordings of machines that differ in {name} "
            f"({_formatted(value)} and {_formatted(other_value)}); leave one of these recordings "
            "out."
        )
    versions, other_versions = first.record["software"], second.record["software"]
    unknown = "(version unknown)"
    if component := differing_software(versions, other_versions):
        return (
            f"{first.folder} was measured with {component} {versions.get(component, unknown)}, but "
            f"{second.folder} with {component} {other_versions.get(component, unknown)}. Measure "
            f"one of them again with the {component} version of the other."
        )
    for gpu in second.gpus:
        different_limits = find_different_limit(gpu, first.gpus)
        if different_limits is not None:
            second_limit, first_limit = different_limits
            return (
                f"a GPU of {second.folder} has {second_limit}, but a GPU of {first.folder} has "
                f"{first_limit}; leave one of these recordings out."
            )
    return ""


def _differing_facts(first: MergeSource, second: MergeSource) -> Iterator[tuple[str, Any, Any]]:
    """Yield each machine fact that must be equal but differs: its name and both values."""
    ignored = (*_REPORTED, *_MEASURED) if first.machine.kind == "cpu" else _REPORTED
    other_facts = asdict(second.machine)
    for name, value in asdict(first.machine).items():
        if name not in ignored and other_facts[name] != value:
            yield name, value, other_facts[name]


def _formatted(fact: Any) -> str:
    if isinstance(fact, float):
        return f"{fact:.6g}"
    return f"{fact:,}" if isinstance(fact, int) else str(fact)


def _sample_keys(source: MergeSource) -> set[tuple[str, float, float]]:
    """Return a key for each sample: its case, when it was taken, and its seconds per launch."""
    return {
        (event["case"], event["at"], event["s"])
        for event in source.events
        if event["event"] == "sample"
    }
