"""``calibrate``, ``table`` and ``report``: write results that are computed from a recording."""

from __future__ import annotations

from analysis.commands.app import MachineOption, ResultsOption, analyse_machine, app
from kernels.cli import JsonOption, note, print_json
from kernels.common.counts import counted
from kernels.common.program import RESULTS

_STEPS = 4  # steps of a report's progress: model, plots, table, page


@app.command("calibrate")
def calibrate_command(
    machine: MachineOption = None, results: ResultsOption = RESULTS, json: JsonOption = False
) -> None:
    """Fit the model to a recording. The command writes calibration.json and predicted.csv."""
    from analysis.model.fitted import write_predictions

    analysis = analyse_machine(machine, results)
    write_predictions(analysis)
    if analysis.sampled:
        note(analysis.sampled)
    if json:
        print_json(analysis.calibration.to_json())
        return
    print(f"{'group':29} {'cases':>6} {'median':>7} {'mean':>7} {'p95':>7}  (held-out error)")
    for group, fit in analysis.model.fits.items():
        print(f"{group:29} {fit.rows:6,} {fit.median:7.1%} {fit.mean:7.1%} {fit.p95:7.1%}")


@app.command("table")
def table_command(machine: MachineOption = None, results: ResultsOption = RESULTS) -> None:
    """Write the recommendation table as CSV, Markdown and JSON."""
    from analysis.advice.table import build_table, write_table

    analysis = analyse_machine(machine, results)
    write_table(analysis, build_table(analysis))
    print(analysis.recording.folder / "recommendations.md")


@app.command("report")
def report_command(machine: MachineOption = None, results: ResultsOption = RESULTS) -> None:
    """Write predictions, plots, recommendations and an HTML page.

    Print the findings.
    """
    from analysis.advice.headlines import UNUSABLE_LINE, headlines, health_of
    from analysis.advice.table import build_table, write_table
    from analysis.commands.page import add_page
    from analysis.model.fitted import write_predictions
    from analysis.plots import write_plots
    from analysis.recordings.write import write_records
    from sweeps.progress import LiveReporter

    # 1. Write all files, and show the progress.
    note("Calibrating the model, drawing plots and searching for better shapes …")
    with LiveReporter("steps") as live:
        live.begin("Reporting", None)
        analysis = analyse_machine(machine, results)
        write_predictions(analysis)
        live.update(1, _STEPS)
        plots = write_plots(analysis)
        live.update(2, _STEPS)
        advice = build_table(analysis)
        write_table(analysis, advice)
        findings = headlines(analysis, advice)
        records = [finding.to_json() for finding in findings]
        write_records(analysis.recording.folder, "findings", records)
        live.update(3, _STEPS)
        page = add_page(analysis, advice)
        live.update(_STEPS, _STEPS)
    # 2. Print the health of the run, the findings, and the paths of the files.
    folder = analysis.recording.folder
    print()
    for line in health_of(analysis):
        print(f"{line}\n")
    sentences = [finding.text for finding in findings]
    if analysis.recording.unusable:  # an unusable run has no findings
        sentences = [UNUSABLE_LINE]
    for sentence in sentences:
        print(f"  • {sentence}")
    print(f"\n{counted(len(plots), 'plot')}: {folder / 'plots'}")
    print(f"What to change: {folder / 'recommendations.md'}")
    if page is not None:
        print(f"Everything on one page: {page}")
