"""Read the results of other benchmark programs: cases by name, with raw samples where they exist.

Four JSON formats are recognised by their keys:

- pytest-benchmark (``--benchmark-json``): samples if the file has them (``data``), otherwise the
  mean and the standard deviation.
- NVBench (``--json``, ``--jsonbin``): cold GPU times, or CPU times if the benchmark is CPU-only.
  Raw samples are read if the files that ``--jsonbin`` wrote exist.
- Google Benchmark (``--benchmark_out_format=json``): one sample per repetition, or the mean and the
  standard deviation if the file was written with ``--benchmark_report_aggregates_only``.
- ``torch.utils.benchmark``: a JSON document that the user writes. Its list ``measurements`` has the
  attributes of each ``Measurement``, such as ``times`` and ``label``. Pickled measurements are
  never read, because unpickling a file can run arbitrary code.

If the user gives a pattern such as ``m{m}_n{n}_k{k}_{dtype}``, the problem of a case is read from
the case's name. A case whose name matches the pattern is renamed after its problem.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from analysis.imports.cells import our_dtype
from analysis.imports.problems import problem_from_cells
from analysis.markdown import printable
from analysis.recordings.case_times import CaseTimes, TimedProcess
from kernels.common.counts import counted
from kernels.common.errors import UserError, nearest
from kernels.problem import Problem

_PAIRS = ("stride", "padding", "dilation")
_WORDS = ("dtype", "layout", "pass")
_FIELDS = (
    "m", "n", "k", "batch", "c", "h", "w", "kout", "r", "s", *_PAIRS, "groups", *_WORDS,
)  # fmt: skip
_FIELD = re.compile(r"\{([^{}]*)\}")


@dataclass(frozen=True)
class NamePattern:
    """Pattern that finds the problem in the name of a case."""

    text: str
    expression: re.Pattern[str]

    @classmethod
    def parse(cls, text: str) -> NamePattern:
        """Parse a pattern such as ``m{m}_n{n}_k{k}_{dtype}``, which may match any part of a name.

        Raises:
            UserError: if a field is unknown or given twice, or if there is no field.
        """
        expression = ""
        fields: list[str] = []
        end = 0  # position in the text up to which the expression is complete
        for match in _FIELD.finditer(text):
            name = match.group(1)
            if name not in _FIELDS:
                raise UserError(
                    f"--pattern has the unknown field {name!r}; {nearest(name, _FIELDS)}"
                )
            if name in fields:
                raise UserError(f"--pattern has the field {name!r} twice; remove one.")
            fields.append(name)
            field_expression = r"\d+"
            if name in _WORDS:
                field_expression = r"[A-Za-z0-9.]+"
            elif name in _PAIRS:  # one number for both directions, or a pair such as 2x1
                field_expression = r"\d+(?:x\d+)?"
            text_before = re.escape(text[end : match.start()])
            expression += f"{text_before}(?P<{name}>{field_expression})"
            end = match.end()
        if not fields:
            raise UserError(
                f"--pattern {text!r} has no field; write a pattern such as "
                "'m{m}_n{n}_k{k}_{dtype}'."
            )
        return cls(text, re.compile(expression + re.escape(text[end:])))

    def problem(self, name: str) -> Problem | None:
        """Return the problem that a name contains, or None if the pattern does not match the name.

        The problem is a convolution if the pattern has the field ``kout``, otherwise a GEMM.

        Raises:
            UserError: if the fields do not describe a GEMM or a convolution.
        """
        match = self.expression.search(name)
        if match is None:
            return None
        cells = match.groupdict()
        if "kout" in cells:
            cells["op"] = "conv"
        if "dtype" in cells:
            cells["dtype"] = our_dtype(cells["dtype"])
        for word in ("layout", "pass"):
            if word in cells:
                cells[word] = cells[word].lower()
        return problem_from_cells(f"the problem that --pattern finds in {name!r}", cells)


@dataclass
class _Cases:
    """Cases that are collected while a file is read; samples of a repeated name are pooled.

    ``lost`` has the reason why a case, or one of its repetitions, has no time.
    """

    path: Path
    times: dict[str, CaseTimes] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)

    def add_samples(self, name: str, samples: Sequence[float]) -> None:
        """Add samples in seconds to a case."""
        if not len(samples) or not all(0 < value < math.inf for value in samples):
            self.lost[name] = "it has no times, or a time that is not a positive number"
            return
        earlier = self.times[name].samples if name in self.times else ()
        if name in self.times and not earlier:
            raise self.repeated(name)
        self.times[name] = CaseTimes.from_samples([*earlier, *map(float, samples)])

    def add_summary(self, name: str, seconds: float, deviation: float, count: int) -> None:
        """Add the mean of a case, and the standard deviation of its samples, in seconds."""
        if not 0 < seconds < math.inf:
            self.lost[name] = "its time is not a positive number"
        elif name in self.times:
            raise self.repeated(name)
        else:
            known_deviation = deviation if math.isfinite(deviation) else 0.0
            self.times[name] = CaseTimes.from_summary(seconds, known_deviation, max(1, count))

    def repeated(self, name: str) -> UserError:
        return UserError(
            f"{self.path} has the case {name!r} twice, and cases without samples cannot be "
            "pooled. Give the cases different names."
        )


def read_benchmarks(path: Path, pattern: NamePattern | None = None) -> TimedProcess:
    """Read the results of one run of a benchmark program.

    Args:
        path: a JSON file in one of the four formats.
        pattern: pattern that finds the problem in a case's name; None to keep all names.

    Raises:
        UserError: if the file cannot be read, has no usable times, or contains a case without
            samples more than once; or if the pattern matches no name, does not describe a problem,
            or finds the same problem in two names.
    """
    # 1. Recognise the format, and read the cases.
    document = _load(path)
    readers = [reader for needed_keys, reader in _FORMATS if needed_keys <= document.keys()]
    if not readers:
        raise UserError(
            f"{path} has no known format. Give a JSON file with the results of pytest-benchmark, "
            "NVBench, Google Benchmark or torch.utils.benchmark."
        )
    cases = _Cases(path)
    try:
        facts = readers[0](document, cases)
    except UserError:  # a ValueError, but with a message of its own
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as error:
        raise UserError(
            f"{path} is damaged or incomplete ({type(error).__name__}: "
            f"{str(error)[:60] or 'no message'}). Run the benchmark again."
        ) from None
    if not cases.times:
        example = ""
        if cases.lost:
            # The reason of one case helps, because usually all cases have the same reason.
            name, reason = next(iter(cases.lost.items()))
            example = f" ({name}: {reason})"
        raise UserError(f"{path} has no case with a time{example}. Run the benchmark again.")
    # 2. Find the problems in the names, and name the cases after them.
    if pattern is not None:
        cases = _with_problems(cases, pattern)
    # A repetition may have failed although other repetitions of the same case have times.
    lost = {name: reason for name, reason in cases.lost.items() if name not in cases.times}
    known_facts = {name: fact for name, fact in facts.items() if fact}
    return TimedProcess(str(path), cases.times, lost, known_facts)


def _with_problems(cases: _Cases, pattern: NamePattern) -> _Cases:
    """Return the cases, renamed after the problems that the pattern finds in their names."""
    times = {
        name: replace(case, problem=pattern.problem(name)) for name, case in cases.times.items()
    }
    if all(case.problem is None for case in times.values()):
        first_name = next(iter(times))
        raise UserError(
            f"--pattern {pattern.text!r} matches no case name in {cases.path}. The first name is "
            f"{first_name!r}. Write a pattern that matches such names."
        )
    renamed = named_by_problem(
        str(cases.path),
        times,
        "Leave --pattern out, or extend the pattern to the part in which these names differ.",
    )
    lost = {}
    for name, reason in cases.lost.items():
        problem = pattern.problem(name)
        lost[name if problem is None else str(problem)] = reason
    return _Cases(cases.path, renamed, lost)


def named_by_problem(
    source: str, cases: Mapping[str, CaseTimes], remedy: str
) -> dict[str, CaseTimes]:
    """Name cases after their problems; cases without a known problem keep their names.

    Raises:
        UserError: if two cases have the same problem. The message begins with ``source``, and ends
            with the sentence ``remedy``.
    """
    renamed: dict[str, CaseTimes] = {}
    old_names: dict[str, str] = {}  # by new name
    for name, case in cases.items():
        new_name = name if case.problem is None else str(case.problem)
        if new_name in renamed:
            raise UserError(
                f"{source}: {old_names[new_name]!r} and {name!r} have the same problem, "
                f"{new_name}. {remedy}"
            )
        old_names[new_name] = name
        renamed[new_name] = case
    return renamed


def _load(path: Path) -> dict[str, Any]:
    """Read a JSON object, and replace unprintable characters in its text."""
    try:
        document = printable(json.loads(path.read_bytes()))
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}); check its path and permissions."
        ) from None
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path} is not a JSON file ({str(error)[:80]}); give the JSON file that the benchmark "
            "program wrote."
        ) from None
    if not isinstance(document, dict):
        raise UserError(
            f"{path} is not the result of a benchmark program; give the JSON file that such a "
            "program wrote."
        )
    return document


# --- pytest-benchmark -----------------------------------------------------------------------------


def _read_pytest_benchmark(document: Mapping[str, Any], cases: _Cases) -> dict[str, str]:
    for entry in document["benchmarks"]:
        name = str(entry["fullname"])
        stats = entry["stats"]
        samples = stats.get("data")
        if samples:
            cases.add_samples(name, samples)
        else:
            mean, deviation = float(stats["mean"]), float(stats["stddev"])
            cases.add_summary(name, mean, deviation, int(stats["rounds"]))
    machine = document["machine_info"]
    cpu = machine.get("cpu") or {}
    return {
        "machine": str(cpu.get("brand_raw") or machine.get("processor") or ""),
        "date": str(document.get("datetime", "")),
        "program": f"pytest-benchmark {document.get('version', '')}".strip(),
    }


# --- NVBench --------------------------------------------------------------------------------------


def _read_nvbench(document: Mapping[str, Any], cases: _Cases) -> dict[str, str]:
    """Add cold GPU times, or the CPU times of CPU-only benchmarks, to ``cases``."""
    device_names = {device["id"]: str(device["name"]) for device in document["devices"] or []}
    timed_devices: list[str] = []
    for benchmark in document["benchmarks"]:
        for state in benchmark["states"] or []:
            name = f"{benchmark['name']} {state['name']}".strip()
            if state.get("is_skipped"):
                cases.lost[name] = str(state.get("skip_reason") or "skipped")
                continue
            summaries = {  # by tag; each has values by name
                summary["tag"]: {item["name"]: item["value"] for item in summary["data"]}
                for summary in state["summaries"] or []
            }
            # 1. Choose the measurement. A benchmark that is declared CPU-only has other tags than a
            #    benchmark of GPU work.
            if "nv/cold/time/gpu/mean" in summaries:
                measurement = "nv/cold"
                time_tag = "nv/cold/time/gpu"
            elif "nv/cpu_only/time/cpu/mean" in summaries:
                measurement = "nv/cpu_only"
                time_tag = "nv/cpu_only/time/cpu"
            else:
                cases.lost[name] = "it has neither a cold GPU time nor a CPU-only time"
                continue
            # 2. Take the samples if their file exists, otherwise mean and standard deviation.
            sample_tag = f"nv/json/bin:{measurement}/sample_times"
            sample_file = None
            if sample_tag in summaries:
                sample_file = _sample_file(summaries[sample_tag], cases.path)
            if sample_file is not None:
                cases.add_samples(name, np.fromfile(sample_file, "<f4").astype(float).tolist())
            else:
                mean = float(summaries[f"{time_tag}/mean"]["value"])
                deviation_summary = summaries.get(f"{time_tag}/stdev/relative", {})
                relative_deviation = float(deviation_summary.get("value", "nan"))
                count_summary = summaries.get(f"{measurement}/sample_size", {})
                count = int(count_summary.get("value", 1))
                cases.add_summary(name, mean, mean * relative_deviation, count)
            # A time that is not a positive number was not added.
            if name in cases.times:
                timed_devices.append(device_names.get(state.get("device"), ""))
    # The version may be missing, and each object that contains it may be null.
    version = ((document.get("meta") or {}).get("version") or {}).get("nvbench") or {}
    return {
        "machine": ", ".join(dict.fromkeys(filter(None, timed_devices))),
        "program": f"NVBench {version.get('string', '')}".strip(),
    }


def _sample_file(values: Mapping[str, Any], path: Path) -> Path | None:
    """Return the file with a state's samples, or None if no file of the recorded size is found.

    The recorded path may be from another machine, so only the names of the file and of its folder
    are used. First, the file is looked for in a folder with the recorded name next to the JSON
    file. Then it is looked for next to the JSON file itself.
    """
    recorded = Path(str(values["filename"]))
    byte_count = 4 * int(values["size"])  # samples are 32-bit floats
    folder = path.parent
    for candidate in (folder / recorded.parent.name / recorded.name, folder / recorded.name):
        if candidate.is_file() and candidate.stat().st_size == byte_count:
            return candidate
    return None


# --- Google Benchmark -----------------------------------------------------------------------------

_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


def _read_google(document: Mapping[str, Any], cases: _Cases) -> dict[str, str]:
    """Add wall-clock times to ``cases``."""
    # 1. Add the samples, and collect the aggregates (mean, stddev and others) of each name.
    aggregates: dict[str, dict[str, Any]] = {}
    for entry in document["benchmarks"]:
        name = str(entry.get("run_name", entry["name"]))
        if entry.get("error_occurred") or entry.get("skipped"):
            message = entry.get("error_message") or entry.get("skip_message") or "skipped"
            cases.lost[name] = str(message)
        elif entry.get("run_type") == "aggregate":
            aggregates_of_name = aggregates.setdefault(name, {})
            kind = str(entry["aggregate_name"])
            # Repeated aggregates of a case with samples do no harm, because they are not used.
            if kind in aggregates_of_name and name not in cases.times:
                raise cases.repeated(name)
            aggregates_of_name[kind] = entry
        else:
            cases.add_samples(name, [_google_seconds(entry)])
    # 2. Add the mean and the standard deviation of cases without samples. A name without a mean is
    #    not a case: its aggregates, BigO and RMS, describe how times grow with a size.
    for name, entries in aggregates.items():
        if name not in cases.times and "mean" in entries:
            mean_entry = entries["mean"]
            deviation = math.nan
            if "stddev" in entries:
                deviation = _google_seconds(entries["stddev"])
            # The iterations of an aggregate are the number of repetitions that it summarises.
            iterations = mean_entry.get("iterations", 1)
            repetitions = int(mean_entry.get("repetitions", iterations))
            cases.add_summary(name, _google_seconds(mean_entry), deviation, repetitions)
    # 3. Describe the machine by its CPUs. The name of the host says nothing about it.
    context = document["context"]
    cpus, mhz = context.get("num_cpus"), context.get("mhz_per_cpu")
    return {
        "machine": f"{counted(int(cpus), 'CPU')} at {int(mhz):,} MHz" if cpus and mhz else "",
        "date": str(context.get("date", "")),
        "program": f"Google Benchmark {context.get('library_version', '')}".strip(),
    }


def _google_seconds(entry: Mapping[str, Any]) -> float:
    return float(entry["real_time"]) * _SECONDS[entry.get("time_unit", "ns")]


# --- torch.utils.benchmark ------------------------------------------------------------------------

_TORCH_NAMES = ("label", "sub_label", "description", "env")


def _read_torch(document: Mapping[str, Any], cases: _Cases) -> dict[str, str]:
    """Add the samples of each measurement to ``cases``.

    In the document, ``times`` are in seconds per run, and ``raw_times`` are in seconds per
    ``number_per_run`` runs.
    """
    for entry in document["measurements"]:
        labels = [str(entry[key]) for key in _TORCH_NAMES if entry.get(key)]
        if not labels:
            labels = [str(entry.get("stmt") or "unnamed")]
        threads = int(entry.get("num_threads") or 1)
        if threads > 1:
            labels.append(f"{threads} threads")
        name = ", ".join(labels)
        samples = entry.get("times")
        if samples is None:
            runs = int(entry["number_per_run"])
            samples = [float(seconds) / runs for seconds in entry["raw_times"]]
        cases.add_samples(name, [float(seconds) for seconds in samples])
    return {
        "machine": str(document.get("machine", "")),
        "date": str(document.get("date", "")),
        "program": f"torch {document.get('torch', '')}".strip(),
    }


_FORMATS: tuple[tuple[set[str], Callable[[Mapping[str, Any], _Cases], dict[str, str]]], ...] = (
    ({"benchmarks", "machine_info"}, _read_pytest_benchmark),
    ({"benchmarks", "devices"}, _read_nvbench),
    ({"benchmarks", "context"}, _read_google),
    ({"measurements"}, _read_torch),
)
"""Keys that identify each format, and the function that reads files in the format.

The function adds the file's cases to the second argument, and returns facts that the file states,
such as ``machine`` and ``program``.
"""


def benchmark_files(folder: Path) -> Iterator[Path]:
    """Yield the JSON files directly in a folder, in the order of their names."""
    yield from sorted(path for path in folder.glob("*.json") if path.is_file())
