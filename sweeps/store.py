"""Files of a run: the plan, the samples, and the tables that are computed from the samples.

    run.json             machine, versions, budget and outcome of the run
    plan.jsonl           the planned cases, one per line
    samples/I-of-N.jsonl samples and other events of shard I, one per line; lines are only appended
    measurements.csv     one row per case, with the median of its samples
    rounds.csv           the samples behind each median, with the numbers of their rounds
    confirmed.csv        pairs of cases that were re-timed together, one row per pair and process
    anchors.csv          times of the anchors, which are the same few cases on every GPU
    steady.csv           every batch of the sustained anchors, which run without a pause

All files except the sample files are replaced atomically. Each sample file has one writer at a
time, which appends each line with a single write. If a crash cuts a line short, readers skip the
line and report it, and the next writer ends the line before it appends another.
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

_SAME_SOFTWARE = ("torch", "driver")  # components with one version in all calls of a run

START_OVER = (
    f"Run {target('sweep FRESH=1', 'run --fresh')} to set the run aside and start a new one."
)


def make_folder(folder: Path) -> None:
    """Create a folder of results and its parent folders, unless they exist.

    Raises:
        UserError: if the folder cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        paths = (folder, *folder.parents)
        # A link to nothing exists for this purpose, but not for Path.exists.
        blocker = next(
            (path for path in paths if os.path.lexists(path) and not path.is_dir()), folder
        )
        raise UserError(
            f"{blocker} exists and is not a folder; move it away, or choose another folder."
        ) from None
    except OSError as error:
        raise _write_error(folder, error) from None


def read_run(folder: Path, remedy: str = START_OVER) -> dict[str, Any]:
    """Return the content of a folder's run.json, with the cases of the plan.

    ``remedy`` tells the user what to do if a file is damaged or cannot be read.

    Raises:
        UserError: if run.json or plan.jsonl is damaged or cannot be read.
    """
    path = folder / "run.json"
    run: Any = _parse_json(_read_text(path, remedy), path, remedy)
    plan = run.get("plan") if isinstance(run, dict) else None
    # Older recordings have the cases in run.json itself. An imported table has an empty list there.
    if isinstance(plan, dict) and "cases" not in plan:
        run = {**run, "plan": {**plan, "cases": _read_cases(folder / PLAN, remedy)}}
    if fault := misfit(run, RUN, "the document"):
        raise UserError(f"{path} is damaged: {fault}. {remedy}")
    return dict(run)


def _read_cases(path: Path, remedy: str) -> list[Any]:
    cases = []
    for number, line in enumerate(_read_text(path, remedy).split("\n"), 1):
        if line:
            cases.append(_parse_json(line, f"{path} line {number}", remedy))
    return cases


def _read_text(path: Path, remedy: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path} cannot be read ({reason}). {remedy}") from None


def _parse_json(text: str, source: Path | str, remedy: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{source} cannot be read ({error}). {remedy}") from None


def write_run(folder: Path, run: Mapping[str, Any]) -> None:
    """Write the cases of a run's plan, if any, to plan.jsonl, and everything else to run.json.

    Raises:
        UserError: if a file cannot be written.
    """
    # If an interruption leaves a new plan.jsonl with an old run.json, the two still fit, because a
    # plan only ever gains cases.
    plan = dict(run["plan"])
    # An imported table has no plan. Its empty list of cases stays in run.json, so that nobody looks
    # for a plan.jsonl.
    if plan["cases"]:
        cases = plan.pop("cases")
        lines = [json.dumps(case, ensure_ascii=False) + "\n" for case in cases]
        _write_changed(folder / PLAN, "".join(lines))
    write_json(folder / "run.json", {**run, "plan": plan})


def _write_changed(path: Path, content: str) -> None:
    """Write a file atomically, unless it already has this content."""
    with suppress(OSError):
        if path.read_bytes() == content.encode(errors="replace"):
            return
    write_whole(path, content)


def why_software_differs(recorded: Mapping[str, str], current: Mapping[str, str]) -> str:
    """Return a clause about a changed version of PyTorch or the driver; "" if neither changed."""
    name = differing_software(recorded, current)
    if not name:
        return ""
    current_version = current.get(name, "(version unknown)")
    recorded_version = recorded.get(name, "(version unknown)")
    return (
        f"{name} {current_version} is installed, but the recorded run used {name} "
        f"{recorded_version}"
    )


def differing_software(first: Mapping[str, str], second: Mapping[str, str]) -> str:
    """Return the name of a component whose version differs between two runs, or "" if none does.

    Only PyTorch and the driver are compared.
    """
    return next((name for name in _SAME_SOFTWARE if first.get(name) != second.get(name)), "")


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace a file atomically: a reader sees either the old content or the new content.

    Raises:
        UserError: if the file cannot be written.
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
        with suppress(OSError):
            temporary.unlink()
        raise _write_error(path, error) from None


def write_json(path: Path, document: Mapping[str, Any] | Sequence[Any]) -> Path:
    """Write a JSON document atomically, and return ``path``.

    Raises:
        UserError: if the file cannot be written.
        ValueError: if the document contains a number that is not finite.
    """
    write_whole(path, json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    return path


def _write_error(path: Path, error: OSError) -> UserError:
    return UserError(
        f"{path} could not be written ({error.strerror}). Earlier measurements are saved. Remove "
        "the cause, for example by freeing some space, and run the same command to resume.",
        exit_code=1,
    )


def samples_path(folder: Path, shard: tuple[int, int]) -> Path:
    """Return the path of a shard's sample file."""
    return folder / "samples" / f"{shard[0]}-of-{shard[1]}.jsonl"


class SampleLog:
    """Append-only sample file of one shard. Only one process at a time can write to it."""

    def __init__(self, folder: Path, shard: tuple[int, int]) -> None:
        """Claim and open the file of a shard.

        Raises:
            UserError: if another process is writing the file, or if the file cannot be written.
        """
        # 1. Claim the file.
        make_folder(folder / "samples")
        self.path = samples_path(folder, shard)
        # A run with one shard has no other shard to choose.
        remedy = "wait for it or stop it"
        if shard[1] > 1:
            remedy = "wait for it, stop it, or choose another --shard"
        self._claim = Claim(self.path, f"another process is writing {self.path}; {remedy}.")
        # 2. Open it, and release the claim if that fails.
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
        try:
            self._descriptor = os.open(self.path, flags, 0o644)
        except IsADirectoryError:
            self._claim.release()
            raise UserError(
                f"{self.path} is a folder and should be a file; move it away."
            ) from None
        except OSError as error:
            self._claim.release()
            raise _write_error(self.path, error) from None
        # 3. End the last line, and release everything if that fails.
        try:
            self._end_last_line()
        except BaseException:
            self.close()
            raise

    def _end_last_line(self) -> None:
        """Append a newline if a crash cut the last line short."""
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            self._write(b"\n")

    def append(self, event: Event) -> None:
        """Append an event as one line.

        Raises:
            UserError: if this process lost its claim on the file, the file was removed, or the line
                cannot be written.
            ValueError: if the event contains a number that is not finite.
        """
        if self._claim.lost:
            raise UserError(
                f"this process lost its claim on {self.path}: the process was suspended for so "
                "long that another one took the file over, or the claim file was removed or could "
                "not be renewed. Run the same command when no other process is writing the file.",
                exit_code=1,
            )
        if not self._is_there():
            raise UserError(
                f"{self.path} was removed while it was being written, so its measurements are "
                "lost; run the same command to start over.",
                exit_code=1,
            )
        line = json.dumps(event, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        # A library's message may contain half a surrogate pair, which UTF-8 cannot encode.
        self._write(line.encode(errors="replace") + b"\n")

    def _is_there(self) -> bool:
        """Return True if the path still names the open file."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._descriptor))
        except OSError:
            return False

    def _write(self, line: bytes) -> None:
        """Append bytes with a single write."""
        try:
            # If the disk becomes full during the write, only a part is written, without an error.
            if os.write(self._descriptor, line) != len(line):
                raise OSError(errno.ENOSPC, "No space left on device")
        except OSError as error:
            raise _write_error(self.path, error) from None

    def close(self) -> None:
        """Close the file and release the claim on it."""
        os.close(self._descriptor)
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
    """Return the events of a shard or of all shards, and a sentence about each damaged line.

    Raises:
        OSError: if a sample file exists but cannot be read.
    """
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
    """Return the event in a line of a sample file, and an empty string.

    If the line is damaged, return None and a clause that says why.
    """
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None, "it is not JSON"
    fault = fault_of_event(event)
    return (None, fault) if fault else (event, "")


def write_table(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write measurements.csv."""
    write_csv(folder / "measurements.csv", COLUMNS, rows)


def write_rounds(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rounds.csv."""
    write_csv(folder / "rounds.csv", ROUND_COLUMNS, rows)


def write_confirmed(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write confirmed.csv.

    A row has the log ratios that one process measured for a pair of cases, one for each block of
    samples. A ratio is the geometric mean time of the pair's first case in the block, divided by
    that of the second case.
    """
    write_csv(folder / "confirmed.csv", CONFIRMED_COLUMNS, rows)


def write_anchors(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write anchors.csv."""
    write_csv(folder / "anchors.csv", ANCHOR_COLUMNS, rows)


def write_steady(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write steady.csv."""
    write_csv(folder / "steady.csv", STEADY_COLUMNS, rows)


def write_csv(path: Path, columns: Collection[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a CSV file atomically.

    Floats are written with ``repr``, and booleans as true and false. A value that is None or
    missing becomes an empty cell.

    Raises:
        UserError: if the file cannot be written.
    """
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_cell(row.get(name)) for name in columns] for row in rows)
    write_whole(path, buffer.getvalue())


def read_timed(folder: Path) -> set[str]:
    """Return the ids of the cases with a time in measurements.csv.

    The set is empty if the file cannot be read or any row with a time is damaged.
    """
    try:
        text = (folder / "measurements.csv").read_text(encoding="utf-8", errors="replace")
        rows = csv.DictReader(io.StringIO(text, newline=""))
        return {Case.from_columns(row).id for row in rows if row.get("status") == "ok"}
    except (OSError, csv.Error, KeyError, TypeError, ValueError):
        return set()


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    # NumPy's floats are converted first, because their repr names their type.
    return repr(float(value)) if isinstance(value, float) else str(value)


@contextmanager
def planning(folder: Path) -> Iterator[None]:
    """Let one process at a time plan a folder's run or change its run.json.

    Shards may start or end at the same time.

    Raises:
        UserError: if another process does not finish within 15 minutes, or the claim on the folder
            cannot be written.
    """
    with claimed(folder / _PLANNING):
        yield


@contextmanager
def folding(folder: Path) -> Iterator[None]:
    """Let one process at a time compute a folder's tables, because shards may end together.

    Raises:
        UserError: if another process does not finish within 15 minutes, or the claim on the tables
            cannot be written.
    """
    with claimed(folder / "samples" / "fold"):
        yield


def refuse_if_running(folder: Path) -> None:
    """Raise a UserError if a process is writing samples in this folder."""
    for path in (folder / "samples").glob(f"*.jsonl{SUFFIX}"):
        samples = path.with_name(path.name.removesuffix(SUFFIX))
        # If the writer has ended without releasing its claim, the claim is taken over and released.
        Claim(samples, f"another process is writing {samples}; wait for it or stop it.").release()


def set_aside(folder: Path) -> Path:
    """Move an old run's files to a new subfolder of ``runs``, and return that folder.

    Raises:
        UserError: if the new folder cannot be created.
        OSError: if a file cannot be moved.
    """
    stamp = time.strftime("%Y-%m-%dT%H-%M-%SZ", time.gmtime())
    with suppress(UserError, KeyError, TypeError):
        began = str(read_run(folder)["run"])
        if re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", began):
            stamp = began.replace(":", "-")
    # A run of the same time may have been set aside before.
    old_run = folder / "runs" / stamp
    number = 1
    while old_run.exists():
        number += 1
        old_run = folder / "runs" / f"{stamp}-{number}"
    make_folder(old_run)

    # The samples are moved first, and run.json and the plan last. If the move is interrupted, no
    # samples stay behind that a new plan would count as its own.
    def moving_order(entry: Path) -> tuple[int, str]:
        ranks = {"samples": -1, "run.json": 1, PLAN: 2}
        return ranks.get(entry.name, 0), entry.name

    for entry in sorted(folder.iterdir(), key=moving_order):
        # This process holds the claim on planning, whose file therefore stays.
        if entry.name not in ("runs", _PLANNING + SUFFIX):
            entry.rename(old_run / entry.name)
    return old_run
