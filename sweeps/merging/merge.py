"""Merge recordings into a new folder, which is written completely or not at all."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels.common.errors import UserError
from sweeps.folding.fold import fold
from sweeps.merging.belonging import refuse_strangers, refuse_twice
from sweeps.merging.combining import write_merged
from sweeps.merging.source import MergeSource, read_source
from sweeps.process import terminated_as_interrupt
from sweeps.store import make_folder

MERGED = "merged"
"""Folder of merged recordings within the results. Each has a folder named after its machine."""


@dataclass(frozen=True)
class Merged:
    """A merged recording: its folder, its run.json, and the ids of cases in several recordings."""

    folder: Path
    record: dict[str, Any]
    repeated: frozenset[str]


def merge(folders: Sequence[Path], into: Path | None, results: Path) -> Merged:
    """Merge recordings that were made without shards. Their folders do not change.

    Use ``analysis compare`` to see whether their times agree.

    Args:
        folders: the recordings.
        into: the folder to make; None: a folder named after the machine among the merged results.
        results: the folder of all results.

    Raises:
        UserError: if the recordings cannot be merged, or the folder cannot be made.
    """
    refuse_twice(folders)
    sources = [read_source(folder) for folder in folders]
    refuse_strangers(sources)
    target = into or results / MERGED / sources[0].machine.slug
    _refuse_place(target, folders)

    def write(folder: Path) -> dict[str, Any]:
        write_merged(folder, sources)
        return fold(folder)

    return Merged(target, _make_atomically(target, write), _repeated(sources))


def _repeated(sources: Sequence[MergeSource]) -> frozenset[str]:
    """Return the planned cases that more than one recording has samples of."""
    recordings_of: Counter[str] = Counter()
    for source in sources:
        planned = {entry.case.id for entry in source.planned}
        sampled = {event["case"] for event in source.events if event["event"] == "sample"}
        recordings_of.update(planned & sampled)
    return frozenset(case for case, count in recordings_of.items() if count > 1)


def _refuse_place(target: Path, folders: Sequence[Path]) -> None:
    """Refuse a target that exists or lies in one of the recordings."""
    if os.path.lexists(target):
        raise UserError(f"{target} already exists; move it away, or choose another --into.")
    for folder in folders:
        if Path(os.path.realpath(folder)) in Path(os.path.realpath(target)).parents:
            raise UserError(
                f"{target} lies inside {folder}, which is to be merged; choose another --into."
            )


def _make_atomically(target: Path, write: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Make a folder by writing it elsewhere and renaming it.

    A failure therefore leaves nothing behind. The folder is written two levels deep, where no
    command that looks for recordings finds it.
    """
    # A folder can only be renamed within its file system, so it is written next to the target, or
    # in the nearest folder above that exists.
    nearest = next(parent for parent in target.absolute().parents if os.path.exists(parent))
    try:
        with (
            terminated_as_interrupt(),
            tempfile.TemporaryDirectory(prefix=".merge-", dir=nearest) as temporary,
        ):
            unfinished = Path(temporary) / target.name
            record = write(unfinished)
            make_folder(target.parent)
            unfinished.rename(target)
            return record
    except OSError as error:
        raise UserError(
            f"{target} could not be created ({error.strerror}); choose another --into.", exit_code=1
        ) from None
