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
from sweeps.merging.belonging import check_compatible, check_folders
from sweeps.merging.combining import write_merged
from sweeps.merging.source import MergeSource, read_source
from sweeps.process import terminated_as_interrupt
from sweeps.store import make_folder

MERGED = "merged"
"""Name of the results folder's subfolder for merged recordings."""


@dataclass(frozen=True)
class Merged:
    """A merged recording."""

    folder: Path
    record: dict[str, Any]
    """Content of the merged recording's run.json."""
    repeated: frozenset[str]
    """Ids of the cases for which more than one recording has samples."""


def merge(folders: Sequence[Path], into: Path | None, results: Path) -> Merged:
    """Merge recordings that were made without shards. Their folders do not change.

    Merging does not check whether the recordings' times agree; ``analysis compare`` does. If
    ``into`` is None, the new folder is ``merged/<machine>`` in ``results``.

    Raises:
        UserError: if the recordings cannot be merged, or the new folder cannot be created.
    """
    check_folders(folders)
    sources = [read_source(folder) for folder in folders]
    check_compatible(sources)
    target = into or results / MERGED / sources[0].machine.slug
    _check_target(target, folders)

    def write(folder: Path) -> dict[str, Any]:
        write_merged(folder, sources)
        return fold(folder)

    return Merged(target, _make_atomically(target, write), _repeated(sources))


def _repeated(sources: Sequence[MergeSource]) -> frozenset[str]:
    recording_counts: Counter[str] = Counter()
    for source in sources:
        planned = {entry.case.id for entry in source.planned}
        sampled = {event["case"] for event in source.events if event["event"] == "sample"}
        recording_counts.update(planned & sampled)
    return frozenset(case for case, count in recording_counts.items() if count > 1)


def _check_target(target: Path, folders: Sequence[Path]) -> None:
    if os.path.lexists(target):
        raise UserError(
            f"{target} already exists; move it away, or choose another folder with --into."
        )
    for folder in folders:
        if Path(os.path.realpath(folder)) in Path(os.path.realpath(target)).parents:
            raise UserError(
                f"{target} lies inside {folder}, which is to be merged; choose another folder "
                "with --into."
            )


def _make_atomically(target: Path, write: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Create a folder by writing it to a temporary path and renaming it to ``target``.

    If an error or an interruption occurs, the unfinished folder is removed. ``write`` is called
    with the temporary path. It must create the folder and return the content of the folder's
    run.json. This function returns that content, too.

    Raises:
        UserError: if the folder cannot be created.
    """
    # A folder can only be renamed within its file system. It is therefore written next to the
    # target, or in the target's nearest parent that exists.
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
            f"{target} could not be created ({error.strerror}); choose another folder with --into.",
            exit_code=1,
        ) from None
