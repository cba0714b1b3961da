"""Write a page's key figures and the sentences that summarise its sections."""

from __future__ import annotations

from collections import Counter
from statistics import geometric_mean
from typing import NamedTuple

from analysis.advice.headlines import (
    UNUSABLE_LINE,
    alignment,
    health_of,
    layout,
    peak,
    sizes_line,
)
from analysis.advice.headlines import accuracy as accuracy_headline
from analysis.advice.verdict import DO_IT, LIKELY
from analysis.page.page_report import PageReport
from analysis.page.points import specs_of
from analysis.recordings.load import bursts, library_rows
from analysis.recordings.runs import health_reasons
from analysis.rules.judge import NOT_MEASURED, RuleResult
from analysis.rules.rules_report import SHARES
from analysis.slices.cliffs import largest_cliff
from analysis.slices.series import DIMENSIONS, LEAST_COMPARED, fastest_gemms, roofline_series
from analysis.units import rate
from kernels.common.counts import counted
from sweeps.schema import problem_of


class KeyFigure(NamedTuple):
    """A key figure at the top of the page."""

    title: str
    value: str
    note: str


def machine(report: PageReport) -> str:
    """Return the machine's name and, for a CPU, the number of threads that were used."""
    measured = report.analysis.recording.machine
    if measured.kind == "gpu":
        return measured.name
    return f"{measured.name}, {counted(measured.sms, 'thread')}"


def verdict(report: PageReport) -> str:
    """Return the verdict on the run in a few words or, for imported times, the kind of import."""
    recording = report.analysis.recording
    if recording.public:
        return "public table" if recording.is_public_table else "imported times"
    verdict_name = recording.health.get("verdict")
    return f"{verdict_name} run" if verdict_name else "run not judged"


def key_figures(report: PageReport) -> list[KeyFigure]:
    """Return up to six key figures, or an empty list if the times of the run are unusable."""
    analysis = report.analysis
    if analysis.recording.unusable:
        return []
    plotted = roofline_series(analysis.table, analysis.recording.cache)
    figures = [
        KeyFigure(f"fastest {gemm.dtype} GEMM", rate(gemm.tflops), f"{gemm.share:.0%} of the peak")
        for gemm in fastest_gemms(plotted, analysis.recording.machine)[:2]
    ]
    # A headline is None if too few cases were measured for it.
    misaligned_speed = alignment(analysis.table)
    if misaligned_speed is not None:
        # Misaligned sizes may seem faster by chance, which is not a loss.
        loss = max(1 - misaligned_speed.value, 0.0)
        figures.append(
            KeyFigure("misaligned sizes lose", f"{loss:.0%}", "of the speed, on average")
        )
    nhwc_speed = layout(analysis.table)
    if nhwc_speed is not None:
        interval = f"{nhwc_speed.lo:.2f}–{nhwc_speed.hi:.2f}"
        figures.append(
            KeyFigure("NHWC against NCHW", f"{nhwc_speed.value:.2f}×", f"the speed ({interval})")
        )
    median_error = accuracy_headline(analysis)
    if median_error is not None:
        percentile_95 = analysis.errors.quantile(0.95)
        figures.append(
            KeyFigure(
                "error of predictions",
                f"{median_error.value:.1%}",
                f"median; 95% of cases below {percentile_95:.0%}",
            )
        )
    if report.advice:
        confirmed = sum(answer.verdict == DO_IT for answer in report.advice)
        likely = sum(answer.verdict == LIKELY for answer in report.advice)
        title = "changes that gain"
        if confirmed:
            figures.append(KeyFigure(title, f"{confirmed:,} confirmed", f"and {likely:,} likely"))
        else:
            figures.append(KeyFigure(title, f"{likely:,} likely", "none confirmed"))
    return figures


def health(report: PageReport) -> list[str]:
    """Say how reliable the times of the recording are, and why."""
    return [*health_of(report.analysis), *health_reasons(report.analysis.recording)]


def speed(report: PageReport) -> str:
    """Report the speed of each dtype's fastest GEMM, also as a share of the peak."""
    if report.analysis.recording.unusable:
        return UNUSABLE_LINE
    headline = peak(report.analysis)
    return headline.text if headline else "Too few GEMMs were timed to name the fastest ones."


def advice(report: PageReport) -> str:
    """Say how many pad and choose queries are answered with a better size or implementation."""
    if report.analysis.recording.unusable:
        return UNUSABLE_LINE
    return sizes_line(report.advice) if report.advice else "No shape was checked for a faster size."


def accuracy(report: PageReport) -> str:
    """Say how accurate predictions are, and name the limit with the largest median error."""
    if report.analysis.recording.unusable:
        return UNUSABLE_LINE
    headline = accuracy_headline(report.analysis)
    if headline is None:
        return "Too few cases were timed to judge the predictions."
    by_limit = report.analysis.errors.dropna().groupby(report.analysis.table["predicted_limit"])
    medians = by_limit.median()[by_limit.size() >= LEAST_COMPARED]
    if len(medians) < 2:  # a single limit cannot be worse than others
        return headline.text
    worst = medians.idxmax()
    return (
        f"{headline.text} The median error is largest for cases whose predicted limit is {worst}: "
        f"{medians[worst]:.1%}."
    )


def neighbourhood(report: PageReport) -> str:
    """Name the largest cliff between two neighbouring sizes."""
    recording = report.analysis.recording
    if recording.unusable:
        return UNUSABLE_LINE
    # Leave out cases with a configuration, such as an offset of the operands, because it may change
    # the time as well.
    rows = bursts(library_rows(report.analysis.table), recording.cache)
    rows = rows[(rows["op"] == "gemm") & (rows["config"].fillna("") == "")]
    # Cliffs along every dimension are looked for in the same rows.
    along_and_cliff = largest_cliff(dict.fromkeys(DIMENSIONS, rows))
    if along_and_cliff is None:
        return "No measured GEMM takes significantly longer than its next smaller neighbour."
    along, cliff = along_and_cliff
    return (
        f"The largest measured cliff is from {along.upper()} = {cliff[along]} to "
        f"{cliff['after']}: the larger GEMM takes {cliff['ratio']:.2f}× as long as "
        f"{problem_of(cliff.to_dict())}."
    )


def judged(report: PageReport) -> list[RuleResult]:
    """Return the results of the rules that have a verdict."""
    return [rule for rule in report.rules if rule.verdict != NOT_MEASURED]


def rules_with_ratios(report: PageReport) -> list[RuleResult]:
    """Return the results of the rules whose effect is a ratio."""
    return [rule for rule in report.rules if rule.effect is not None and rule.id not in SHARES]


def rules(report: PageReport) -> str:
    """Say how many rules have each verdict."""
    with_verdict = judged(report)
    if not with_verdict:
        return "No rule was judged for this recording."
    counts = Counter(rule.verdict.partition(":")[0] for rule in with_verdict)
    # Commas separate the verdicts, so the comma within "holds, weaker" is removed.
    phrases = [f"{words.replace(',', '')} ({count})" for words, count in counts.most_common()]
    return f"Verdicts on {counted(len(with_verdict), 'rule')}: {', '.join(phrases)}."


def has_tensor_cores(report: PageReport) -> bool:
    """Return True if training steps of models were profiled and the machine is not a CPU."""
    return bool(report.steps) and report.analysis.recording.machine.kind != "cpu"


def tensor_cores(report: PageReport) -> str:
    """Name the training step that makes the least use of Tensor Cores where it could use them."""
    shares = [(step.used_share, step) for step in report.steps if step.used_share is not None]
    if not shares:
        return "The profiled steps do not show whether Tensor Cores were used where possible."
    least, step = min(shares, key=lambda share_and_step: share_and_step[0])
    return (
        f"{step.name} in {step.dtype} uses Tensor Cores for {least:.0%} of the time in which it "
        "could use them."
    )


def side_by_side(reports: list[PageReport]) -> str:
    """Compare the speeds of the first two recordings, averaged over their common cases.

    Args:
        reports: at least two reports; all but the first two are ignored.
    """
    if any(report.analysis.recording.unusable for report in reports[:2]):
        return "The recordings cannot be compared, because at least one of the runs is unusable."
    first_times = _shortest_times(reports[0])
    second_times = _shortest_times(reports[1])
    common = sorted(first_times.keys() & second_times.keys())
    if not common:
        return "The recordings cannot be compared, because they have no case in common."
    ratio = geometric_mean(first_times[case] / second_times[case] for case in common)
    first, second = reports[0].name, reports[1].name
    if first == second:  # two recordings of one machine
        first, second = "the first recording", "The second recording"
    return (
        f"{second} is {ratio:.2f}× as fast as {first} (geometric mean over "
        f"{counted(len(common), 'common case')})."
    )


def _shortest_times(report: PageReport) -> dict[tuple[object, ...], float]:
    """Return the shortest time in µs over all implementations, by problem, mode and cache."""
    # The charts may only show a sample of the cases, but all analysed cases are compared.
    table = report.analysis.table
    keys = [specs_of(table), table["mode"], table["cache"]]
    return table.groupby(keys)["time_us"].min().to_dict()
