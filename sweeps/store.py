"""Files of a run: samples as they come, the plan, and the tables that they fold into.

    run.json             the circumstances and the budget; written whole, renamed into place
    plan.jsonl           the planned cases, one per line; written whole, renamed into place
    samples/I-of-N.jsonl one line per event of shard I; only ever appended to
    measurements.csv     one row per case, folded from the samples; renamed into place
    rounds.csv           the samples behind each time, by the round in which they were taken
    confirmed.csv        pairs of cases that separate processes re-timed together
    anchors.csv          the same few cases on every GPU
    steady.csv           the anchors without a pause, batch by batch

Each sample file has one writer at a time. An append is one write of one line. A line that a crash
cut in half is skipped and named when the file is read, and ended before the next line is appended.
"""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from kernels.common.documents import misfit
from kernels.common.errors import UserError
from kernels.common.program import target
from sweeps.cases.case import Case
from sweeps.claim import SUFFIX, Claim, claimed
from sweeps.schema import COLUMNS, IDENTITY, RUN, fault_of_event

ROUND_COLUMNS = ("case", "worker", "gpu", "rounds", "times_us")

CONFIRMED_COLUMNS = ("case", "against", "process", "worker", "gpu", "log_ratios")

ANCHOR_COLUMNS = (
    "run", "worker", "gpu", "gpu_id", "node", "phase", "time_utc", *IDENTITY, "samples", "time_us",
    "time_lo_us", "time_hi_us", "sm_mhz", "power_w", "temp_c", "energy_j", "throttled",
)  # fmt: skip

STEADY_COLUMNS = (
    "run", "worker", "gpu", *IDENTITY, "elapsed_s", "time_us", "tflops", "sm_mhz", "power_w",
    "temp_c", "joules", "throttled",
)  # fmt: skip

Event = dict[str, Any]

PLAN = "plan.jsonl"

_PLANNING = ".plan"

_SAME_SOFTWARE = ("torch", "driver")
"""Components that must have the same version for a run to be resumed."""

START_OVER = (
    f"Run {target('sweep FRESH=1', 'run --fresh')} to set the run aside and start a new one."
)
"""Sentence that says what to do about a run that cannot be resumed."""


def make_folder(folder: Path) -> None:
    """Create a folder of results.

    Raises:
        UserError: if something else is in its place.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UserError(
            f"{folder} should be a folder, but something else is there; move it away, or choose "
            "another --results."
        ) from None


def read_run(folder: Path) -> dict[str, Any]:
    """Return the run.json of a folder, with the cases of its plan.

    Raises:
        UserError: if it cannot be read, or lacks what every version of it has.
    """
    path = folder / "run.json"
    run: Any = _parse_json(_read_text(path), path)
    plan = run.get("plan") if isinstance(run, dict) else None
    # Older recordings have the cases in run.json itself.
    if isinstance(plan, dict) and "cases" not in plan:
        run = {**run, "plan": {**plan, "cases": _read_cases(folder / PLAN)}}
    if fault := misfit(run, RUN, "the document"):
        raise UserError(f"{path} is damaged: {fault}. {START_OVER}")
    return dict(run)


def _read_cases(path: Path) -> list[Any]:
    """Return the planned cases of a plan.jsonl."""
    lines = enumerate(_read_text(path).split("\n"), 1)
    return [_parse_json(line, f"{path} line {number}") for number, line in lines if line]


def _read_text(path: Path) -> str:
    """Return the text of one of a run's files.

    Raises:
        UserError: if it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path} cannot be read ({reason}). {START_OVER}") from None


def _parse_json(text: str, where: Path | str) -> Any:
    """Return the document of a JSON text; ``where`` names its file, and its line if it has many.

    Raises:
        UserError: if it is not JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} cannot be read ({error}). {START_OVER}") from None


def write_run(folder: Path, run: Mapping[str, Any]) -> None:
    """Write the cases of a run's plan to plan.jsonl, and then the rest to run.json.

    In this order, an interruption does no harm, because a plan only ever gains cases.

    Raises:
        UserError: if the disk is full.
    """
    plan = dict(run["plan"])
    if plan["cases"]:  # an imported table has no plan
        lines = [json.dumps(case, ensure_ascii=False) + "\n" for case in plan.pop("cases")]
        _write_changed(folder / PLAN, "".join(lines))
    write_json(folder / "run.json", {**run, "plan": plan})


def _write_changed(path: Path, content: str) -> None:
    """Write a file whole, unless it has that content already."""
    with suppress(OSError):
        if path.read_bytes() == content.encode(errors="replace"):
            return
    write_whole(path, content)


def other_software(then: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return why a recording cannot be continued with the present versions; empty if it can."""
    for name in _SAME_SOFTWARE:
        if then.get(name) != now.get(name):
            return f"{name} is {now.get(name)} and was {then.get(name)}"
    return ""


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader finds the old one or the new one, never half of one.

    Raises:
        UserError: if the disk is full. The old file is then untouched.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    # A name may contain half a surrogate pair, which UTF-8 cannot encode.
    data = content.encode(errors="replace") if isinstance(content, str) else content
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise _write_error(path, error) from None


def write_json(path: Path, document: Mapping[str, Any] | Sequence[Any]) -> Path:
    """Write a JSON document whole and return its path.

    Raises:
        UserError: if the disk is full.
    """
    write_whole(path, json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    return path


def _write_error(path: Path, error: OSError) -> UserError:
    """Return the error for a file that could not be written."""
    return UserError(
        f"{path} could not be written ({error.strerror}). Measurements are saved. Free some "
        "space and run the same command to resume.",
        exit_code=1,
    )


def samples_path(folder: Path, shard: tuple[int, int]) -> Path:
    """Return the path of a shard's sample file."""
    return folder / "samples" / f"{shard[0]}-of-{shard[1]}.jsonl"


class SampleLog:
    """Append-only sample file of one shard, claimed against a second writer."""

    def __init__(self, folder: Path, shard: tuple[int, int]) -> None:
        """Claim and open the file of a shard.

        Raises:
            UserError: if another process is writing this shard.
        """
        make_folder(folder / "samples")
        self.path = samples_path(folder, shard)
        self._claim = Claim(
            self.path,
            f"another run is writing {self.path}; wait for it, or measure another --shard.",
        )
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
        try:
            self._file = os.open(self.path, flags, 0o644)
        except IsADirectoryError:
            self._claim.release()
            raise UserError(
                f"{self.path} is a folder and should be a file; move it away."
            ) from None
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            # A crash cut the last line. It is ended here, so that the next one does not extend it.
            self._write(b"\n")

    def append(self, event: Event) -> None:
        """Write one line.

        Raises:
            UserError: if the disk is full, the file was removed, or another run took it over.
        """
        if self._claim.lost:
            raise UserError(
                f"this process was suspended for too long, and another one now writes {self.path}. "
                "Run the same command when that process has ended.",
                exit_code=1,
            )
        if not self._is_there():
            raise UserError(
                f"{self.path} was removed while it was being written, so its measurements are "
                "lost; run again to start over.",
                exit_code=1,
            )
        line = json.dumps(event, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        # A library's message may contain half a surrogate pair, which UTF-8 cannot encode.
        self._write(line.encode(errors="replace") + b"\n")

    def _is_there(self) -> bool:
        """Return True if the path still names this file; else what is written would be lost."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._file))
        except OSError:
            return False

    def _write(self, line: bytes) -> None:
        """Append bytes by one write.

        Raises:
            UserError: if the disk is full.
        """
        try:
            # A disk that becomes full during the write takes only a part, without an error.
            if os.write(self._file, line) != len(line):
                raise OSError(errno.ENOSPC, "No space left on device")
        except OSError as error:
            raise _write_error(self.path, error) from None

    def close(self) -> None:
        """Release the file and the claim on it."""
        os.close(self._file)
        self._claim.release()

    def __enter__(self) -> SampleLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def read_events(
    folder: Path, shard: tuple[int, int] | None = None
) -> tuple[list[Event], list[str]]:
    """Return the events of all shards of a run or of one, and a sentence per damaged line."""
    events: list[Event] = []
    damaged: list[str] = []
    if shard is None:
        paths = sorted((folder / "samples").glob("*.jsonl"))
    else:
        paths = [samples_path(folder, shard)]
    for path in paths:
        if not path.exists():  # the shard has not begun
            continue
        for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
            if not line:
                continue
            event, fault = parse_event(line)
            if event is None:
                damaged.append(f"{path.name} line {number} is damaged and was left out: {fault}.")
            else:
                events.append(event)
    return events, damaged


def parse_event(line: bytes) -> tuple[Event | None, str]:
    """Return the event of a line of a sample file; None, and the reason, if the line is damaged."""
    try:
        event = json.loads(line)
    except ValueError:
        return None, "it is not JSON"
    fault = fault_of_event(event)
    return (None, fault) if fault else (event, "")


def write_table(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write measurements.csv, one row per case."""
    write_csv(folder / "measurements.csv", COLUMNS, rows)


def write_rounds(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rounds.csv: for each case, the samples behind its time and the rounds they are from."""
    write_csv(folder / "rounds.csv", ROUND_COLUMNS, rows)


def write_confirmed(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write confirmed.csv: one row for each pair of cases and each process that re-timed it.

    A row has the log time ratio of the first case over the second, for each block of samples.
    """
    write_csv(folder / "confirmed.csv", CONFIRMED_COLUMNS, rows)


def write_anchors(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write anchors.csv: how long each GPU took for the same few cases."""
    write_csv(folder / "anchors.csv", ANCHOR_COLUMNS, rows)


def write_steady(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write steady.csv: the anchors that are timed without a pause, one row per batch."""
    write_csv(folder / "steady.csv", STEADY_COLUMNS, rows)


def write_csv(path: Path, columns: Collection[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a CSV file whole.

    None becomes an empty cell, floats are written by ``repr``, and booleans as true and false.

    Raises:
        UserError: if the disk is full.
    """
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_cell(row.get(name)) for name in columns] for row in rows)
    write_whole(path, buffer.getvalue())


def read_timed(folder: Path) -> set[str]:
    """Return the ids of the cases with a time in measurements.csv; empty if that is missing."""
    try:
        text = (folder / "measurements.csv").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    rows = csv.DictReader(io.StringIO(text, newline=""))
    return {Case.from_columns(row).id for row in rows if row.get("status") == "ok"}


def _cell(value: Any) -> str:
    """Return a value as :func:`write_csv` writes it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(float(value)) if isinstance(value, float) else str(value)  # also NumPy's floats


@contextmanager
def planning(folder: Path) -> Iterator[None]:
    """Let one process at a time plan in a folder, because shards may start together."""
    with claimed(folder / _PLANNING):
        yield


@contextmanager
def folding(folder: Path) -> Iterator[None]:
    """Let one process at a time fold the samples of a folder, because shards may end together."""
    with claimed(folder / "samples" / "fold"):
        yield


def refuse_if_running(folder: Path) -> None:
    """Refuse to continue while a run writes in this folder.

    Raises:
        UserError: if another run is writing a shard's samples.
    """
    for path in (folder / "samples").glob(f"*.jsonl{SUFFIX}"):
        samples = path.with_name(path.name.removesuffix(SUFFIX))
        # A claim that nobody holds any more is given back at once.
        Claim(samples, f"another run is writing {samples}; wait for it or stop it.").release()


def set_aside(folder: Path) -> Path:
    """Move an old run's files to ``runs/<time>/`` and return that folder.

    The time is when the run began, or now if its run.json does not tell.
    """
    stamp = time.strftime("%Y-%m-%dT%H-%M-%SZ", time.gmtime())
    with suppress(UserError, KeyError, TypeError):
        began = str(read_run(folder)["run"])
        if re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", began):
            stamp = began.replace(":", "-")
    # A run that began at the same time may have been set aside before.
    target = folder / "runs" / stamp
    number = 1
    while target.exists():
        number += 1
        target = folder / "runs" / f"{stamp}-{number}"
    make_folder(target)
    # The samples go first, run.json and the plan last: if this is interrupted, no samples are left
    # behind that a new plan would count as its own.
    ranks = {"samples": -1, "run.json": 1, PLAN: 2}
    for entry in sorted(folder.iterdir(), key=lambda entry: (ranks.get(entry.name, 0), entry.name)):
        # The process that sets a run aside has claimed its planning.
        if entry.name not in ("runs", _PLANNING + SUFFIX):
            entry.rename(target / entry.name)
    return target
