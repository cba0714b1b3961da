"""Merge recordings into a new folder, which is there whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels.common.errors import UserError
from sweeps.folding.fold import fold
from sweeps.merging.belonging import refuse_strangers, refuse_twice
from sweeps.merging.combining import write_merged
from sweeps.merging.comparing import Comparison, compare, times_of_anchors, times_of_cases
from sweeps.merging.report import FILE, duplicates_sentence, report_text
from sweeps.merging.source import read_source
from sweeps.process import terminated_as_interrupt
from sweeps.store import make_folder, write_whole

MERGED = "merged"
"""Folder of merged recordings within the results, each by its machine's slug."""


@dataclass(frozen=True)
class Merged:
    """A merged recording: its folder, its run.json, how any two of those that it is of compare, and
    all of that in sentences.
    """

    folder: Path
    record: dict[str, Any]
    comparisons: Sequence[Comparison]
    sentences: Sequence[str]


def merge(folders: Sequence[Path], into: Path | None, results: Path) -> Merged:
    """Merge recordings that were made without shards. Their folders do not change.

    Args:
        folders: the recordings.
        into: the folder to make; None: that of the machine among the merged results.
        results: where those are.

    Raises:
        UserError: they cannot be merged, or the folder cannot be made.
    """
    refuse_twice(folders)
    sources = [read_source(folder) for folder in folders]
    refuse_strangers(sources)
    target = into or results / MERGED / sources[0].machine.slug
    _refuse_place(target, folders)
    cases = [times_of_cases(source) for source in sources]
    comparisons = compare([times_of_anchors(source) for source in sources], cases)

    def write(folder: Path) -> dict[str, Any]:
        write_merged(folder, sources)
        write_whole(folder / FILE, report_text(sources, comparisons, cases))
        return fold(folder)

    record = _made_whole(target, write)
    names = [str(folder) for folder in folders]
    sentences = [comparison.sentence(names) for comparison in comparisons]
    return Merged(target, record, comparisons, [*sentences, duplicates_sentence(cases)])


def _refuse_place(target: Path, folders: Sequence[Path]) -> None:
    if os.path.lexists(target):
        raise UserError(f"{target} is there already; move it away, or give another --into.")
    for folder in folders:
        if Path(os.path.realpath(folder)) in Path(os.path.realpath(target)).parents:
            raise UserError(
                f"{target} lies in {folder}, which is to be merged; give another --into."
            )


def _made_whole(target: Path, write: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Make a folder by writing it beside and renaming it, so that nothing is left of a failure.

    It is written two folders deep, where no command that looks for recordings finds it.
    """
    there = next(parent for parent in target.absolute().parents if os.path.exists(parent))
    try:
        with (
            terminated_as_interrupt(),
            tempfile.TemporaryDirectory(prefix=".merge-", dir=there) as beside,
        ):
            unfinished = Path(beside) / target.name
            record = write(unfinished)
            make_folder(target.parent)
            unfinished.rename(target)
            return record
    except OSError as error:
        raise UserError(
            f"{target} could not be made ({error.strerror}); give another --into.", exit_code=1
        ) from None
