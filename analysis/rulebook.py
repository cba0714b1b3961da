"""``rules.{csv,md,json}`` of a machine, and the one page to take home."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis.evidence import Effect
from analysis.load import Recording, find_recording, load
from analysis.markdown import plain, table_row
from analysis.plots.style import NEUTRAL, panels, save
from analysis.records import write_records
from analysis.rules import NOT_MEASURED, Evidence, Judged, all_rules, judge_all
from analysis.source import Source
from analysis.tensorcores import Step, model_rules, read_models, text
from kernels.errors import UserError
from kernels.machine import Machine
from sweeps.store import RESULTS, folder_for, make_folder, write_whole

_WORTH_MOST = 8


@dataclass(frozen=True)
class Evident:
    """What a machine's rules are judged by: recordings of one software, and profiled models.

    ``folder`` is where the verdicts go: beside the machine's sweeps, but never from a user's own
    run into a published folder.
    """

    recordings: Sequence[Recording]
    steps: Sequence[Step]
    folder: Path


def evidence_of(machine: str | None, results: Path = RESULTS) -> Evident:
    """A machine's own sweeps, and what `make rules` measured besides under ``rules/``.

    Without a name: the machine that was measured last. Of two kinds of software, the later one.

    Raises:
        UserError: there is neither.
    """
    folders = [f for f in (_found(machine, p) for p in (results / "rules", results)) if f]
    if not folders:
        known = f" of machine {machine!r}" if machine else ""
        raise UserError(f"there are no results{known} to judge rules by; run `make rules` first.")
    found = [load(folder) for folder in folders]
    newest = max(found, key=lambda r: (r.folder / "run.json").stat().st_mtime)
    same = [
        r for r in found
        if r.machine.slug == newest.machine.slug and _versions(r) == _versions(newest)
    ]  # fmt: skip
    steps = [step for r in same for step in read_models(r.folder)]
    alike = len({bool(r.run["published"]) for r in same}) == 1
    main = next((r.folder for r in same if r.folder.parent == results), None)
    folder = main if main and alike else folder_for(results, newest.machine.slug)
    return Evident(same, steps, folder)


def _found(machine: str | None, place: Path) -> Path | None:
    try:
        return find_recording(machine, place)
    except UserError:
        return None


def _versions(recording: Recording) -> tuple[Any, ...]:
    """Of what a time depends on most."""
    return tuple(recording.run["software"].get(name) for name in ("torch", "driver"))


def judge_evidence(evident: Evident) -> list[Judged]:
    """A row for every rule; pairs of two recordings are never mixed."""
    found = [Evidence.of_recording(recording) for recording in evident.recordings]
    return judge_all(found, model_rules(evident.steps))


def write_rules(evident: Evident, rows: Sequence[Judged]) -> list[Path]:
    """rules.csv, .json and .md, tensor-cores.md where models were profiled, and the cheat sheet."""
    recordings, steps, folder = evident.recordings, evident.steps, evident.folder
    make_folder(folder)
    machine = recordings[0].machine
    dates = sorted({recording.run["run"][:10] for recording in recordings})
    caption = f"{recordings[0].caption().rpartition(' ')[0]} {' and '.join(dates)}"
    write_records(folder, "rules", [row.to_json() for row in rows])
    write_whole(folder / "rules.md", markdown(rows, machine, caption))
    written = [folder / "rules.md"]
    if steps:
        title = f"# Who uses Tensor Cores on {plain(machine.name)}\n\n"
        write_whole(folder / "tensor-cores.md", title + "\n".join(map(text, steps)))
        written.append(folder / "tensor-cores.md")
    figure = draw_sheet(rows, machine)
    if figure is not None:
        written.append(save(figure, caption, folder, "cheat-sheet"))
    return written


def markdown(rows: Sequence[Judged], machine: Machine, caption: str) -> str:
    """The table, those with a verdict first."""
    measured = [row for row in rows if row.verdict != NOT_MEASURED]
    lines = [
        f"# The field's rules on {plain(machine.name)}",
        "",
        plain(caption).replace("  ·  ", ", ") + ".",
        "",
        f"{len(measured)} of {len(rows)} rules were measured here. An effect is a ratio of times "
        "or of speeds, above 1 where following the rule pays; in brackets its 95 % interval, to "
        "which the verdict is bound.",
        "",
    ]
    if machine.kind == "cpu":
        lines += ["**This is a CPU: the verdicts are about it, and say nothing of a GPU.**", ""]
    lines += [
        "| rule | statement | verdict | effect | the model says | pairs | of what |",
        "|---|---|---|---|---|---|---|",
        *(_line(row) for row in measured),
        "",
        "## Not measured here",
        "",
        "| rule | statement | |",
        "|---|---|---|",
        *(table_row([r.id, f"{r.statement} ({r.source})", r.reason]) for r in rows
          if r.verdict == NOT_MEASURED),
        "",
    ]  # fmt: skip
    return "\n".join(lines)


def lines(rows: Sequence[Judged]) -> str:
    """One aligned line a rule, for a terminal."""
    return "\n".join(f"{row.id:18}{figures(row):24}{row.cases:6}  {row.verdict}" for row in rows)


def _line(row: Judged) -> str:
    predicted = "–" if row.predicted is None else f"{row.predicted:.2f}×"
    cells = [
        row.id, f"{row.statement} ({row.source})", row.verdict, figures(row), predicted,
        str(row.cases), row.reason,
    ]  # fmt: skip
    return table_row(cells)


def figures(row: Judged) -> str:
    """``1.12× [1.10, 1.14]``; a dash where nothing was measured."""
    if row.effect is None or row.lo is None or row.hi is None:
        return "–"
    return str(Effect(row.effect, row.lo, row.hi, row.cases))


def sheet_data(rows: Sequence[Judged], facts: bool = False) -> pd.DataFrame:
    """The rules worth most: advice whose effect is beyond doubt, the largest first.

    With ``facts`` also those that say how a machine is and not what to do.
    """
    known = all_rules()
    certain = [
        row.to_json()
        for row in rows
        if (facts or known[row.id].worth)
        and row.lo is not None
        and (row.lo > 1 or (row.hi or 0) < 1)
    ]
    frame = pd.DataFrame(certain, columns=list(Judged.__dataclass_fields__))
    order = np.argsort(-np.abs(np.log(frame["effect"].to_numpy(dtype=float))), kind="stable")
    return frame.iloc[order].head(_WORTH_MOST).reset_index(drop=True)


def write_sheet(
    rows: Sequence[Judged], machine: Machine, source: Source, folder: Path
) -> list[Path]:
    """The cheat sheet of others' table, its name in the caption; nothing if no rule is certain."""
    figure = draw_sheet(rows, machine, facts=True)  # such a table can answer few rules
    caption = f"{machine.name}  ·  {source.dtype}  ·  {source.name}, {len(source)} rows"
    return [] if figure is None else [save(figure, caption, folder, "cheat-sheet")]


def draw_sheet(rows: Sequence[Judged], machine: Machine, facts: bool = False) -> Figure | None:
    """One page: the eight rules worth most on a machine, with their figures."""
    data = sheet_data(rows, facts)
    if data.empty:
        return None
    size = (14.0, 2.0 + 0.8 * len(data))
    figure, (axes,) = panels(1, f"What shapes are worth on {machine.name}", size)
    places = np.arange(len(data))[::-1]
    effects = data["effect"].to_numpy(dtype=float)
    ends = [np.abs(data[end].to_numpy(dtype=float) - effects) for end in ("lo", "hi")]
    colors = ["#0072B2" if effect > 1 else "#D55E00" for effect in effects]
    axes.barh(places, effects - 1, left=1, height=0.32, color=colors)
    axes.errorbar(effects, places, xerr=ends, fmt="none", ecolor="#000000", capsize=4)
    axes.set_xscale("log")
    low, high = min(data["lo"].min(), 0.9), max(data["hi"].max(), 1.25)
    axes.set_xlim(low / 1.1, high * 1.3)
    axes.axvline(1, color=NEUTRAL, linewidth=1, zorder=0)
    axes.set_yticks([])
    axes.set_ylim(-0.6, len(data) - 0.3)
    ticks = [t for t in (0.1, 0.2, 0.5, 0.8, 1, 1.25, 1.5, 2, 3, 5, 10, 20, 50) if low <= t <= high]
    axes.set_xticks(ticks, [f"{tick:g}×" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("gain from following the rule; the line is the 95 % interval")
    for place, row in zip(places, data.to_dict("records"), strict=True):
        note = f"{row['statement']}: {row['verdict'].split(':')[0]}, {row['effect']:.2f}×"
        axes.text(0.005, place + 0.24, note, transform=axes.get_yaxis_transform(), fontsize=12,
                  fontweight="bold", va="bottom")  # fmt: skip
    if machine.kind == "cpu":
        axes.set_title("a CPU: nothing here is about a GPU", loc="left", color=NEUTRAL)
    return figure
