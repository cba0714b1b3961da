"""Write a machine's ``rules.csv``, ``.json`` and ``.md``, and its report on Tensor Core use."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from analysis.markdown import plain, table_row
from analysis.recordings.write import write_records
from analysis.rules.inputs import RuleInputs
from analysis.rules.judge import NOT_MEASURED, RuleResult
from analysis.rules.rule_finding import Effect
from analysis.rules.tensor_cores import step_markdown
from kernels.machine import Machine
from sweeps.store import make_folder, write_whole

SHARES = ("amdahl", "tc-used")
"""Rules whose effect is a share instead of a ratio: for ``amdahl``, the share of Amdahl's bound
that is reached, and for ``tc-used``, a share of time."""


_EFFECTS = (
    "An effect is usually a ratio of times or of speeds, above 1 where following the rule pays. "
    "Its 95% interval, in brackets, decides the verdict, unless groups of pairs, such as the pairs "
    "in one dtype, contradict one another. A rule that claims *up to* a gain is judged by its best "
    "group, whose interval has a higher confidence level. A group is *uncertain* if its interval "
    "includes 1 and the ends of the interval differ by more than a factor of 10. The model says "
    "nothing about settings that it does not know, such as the alignment of addresses."
)

_SHARE_EFFECTS = (
    "The effects of `amdahl` and `tc-used` are shares, and their intervals are not 95% intervals. "
    "The interval of `amdahl` is computed from the 95% intervals of two median times. The interval "
    "of `tc-used` extends from the lowest to the highest share among the profiled steps of models."
)


def write_rules(inputs: RuleInputs, rows: Sequence[RuleResult]) -> list[Path]:
    """Write ``rules.csv``, ``.json`` and ``.md``, and ``tensor-cores.md`` if models were profiled.

    Return the paths of the Markdown files.

    Raises:
        UserError: if the folder cannot be made, or a file cannot be written.
    """
    folder = inputs.folder
    machine = inputs.machine
    make_folder(folder)
    write_records(folder, "rules", [row.to_json() for row in rows])
    write_whole(folder / "rules.md", rules_markdown(rows, machine, inputs.caption))
    written = [folder / "rules.md"]
    if inputs.steps:
        title = f"# Which operations use Tensor Cores on {plain(machine.name)}\n\n"
        sections = "\n".join(map(step_markdown, inputs.steps))
        write_whole(folder / "tensor-cores.md", title + sections)
        written.append(folder / "tensor-cores.md")
    return written


def rules_markdown(rows: Sequence[RuleResult], machine: Machine, caption: str) -> str:
    """Return the Markdown report on the rules; rules with a verdict come first."""
    judged = [row for row in rows if row.verdict != NOT_MEASURED]
    not_judged = [row for row in rows if row.verdict == NOT_MEASURED]
    lines = [
        f"# Rules of thumb on {plain(machine.name)}",
        "",
        plain(caption).replace("  ·  ", ", ") + ".",
        "",
        f"{counts_sentence(rows)} {_EFFECTS}",
        "",
    ]
    if any(row.id in SHARES for row in judged):
        lines += [_SHARE_EFFECTS, ""]
    if machine.kind == "cpu":
        lines += ["**This is a CPU: the verdicts hold for it and say nothing about a GPU.**", ""]
    if judged:
        lines += [
            "| rule | statement | verdict | effect | the model says | pairs | what was compared |",
            "|---|---|---|---|---|---|---|",
            *(_table_line(row) for row in judged),
            "",
        ]
    if not_judged:
        lines += [
            "## Without a verdict",
            "",
            "| rule | statement | reason |",
            "|---|---|---|",
            *(
                table_row([row.id, f"{row.statement} ({row.source})", row.reason])
                for row in not_judged
            ),
            "",
        ]
    return "\n".join(lines)


def counts_sentence(rows: Sequence[RuleResult]) -> str:
    """Say how many rules were judged, and how many were measured only by an unusable run."""
    judged = sum(row.verdict != NOT_MEASURED for row in rows)
    unusable = sum(row.unusable for row in rows)
    judged_verb = "was" if judged == 1 else "were"
    sentence = f"{judged} of {len(rows)} rules {judged_verb} judged here."
    if unusable:
        unusable_verb = "was" if unusable == 1 else "were"
        sentence += f" {unusable} more {unusable_verb} measured only by an unusable run."
    return sentence


def terminal_table(rows: Sequence[RuleResult]) -> str:
    """Return one aligned line per rule, for a terminal."""
    lines = []
    for row in rows:
        # The verdict "not measured here" would hide that an unusable run measured the rule.
        conclusion = row.reason if row.unusable else row.verdict
        lines.append(f"{row.id:18}{effect_text(row):24}{row.cases:6,}  {conclusion}")
    return "\n".join(lines)


def _table_line(row: RuleResult) -> str:
    predicted = "–" if row.predicted is None else f"{row.predicted:.2f}×"
    cells = [
        row.id,
        f"{row.statement} ({row.source})",
        row.verdict,
        effect_text(row),
        predicted,
        str(row.cases),
        row.reason,
    ]
    return table_row(cells)


def effect_text(row: RuleResult) -> str:
    """Format an effect as ``1.12× [1.10, 1.14]``, or a share as ``56% [53%, 58%]``.

    If the effect is unknown, return a dash.
    """
    if row.effect is None or row.lo is None or row.hi is None:
        return "–"
    if row.id in SHARES:
        return f"{row.effect:.0%} [{row.lo:.0%}, {row.hi:.0%}]"
    return str(Effect(row.effect, row.lo, row.hi, row.cases))
