"""Build the page as one file: Bokeh, the charts, the data, and the script that fills the charts.

A content security policy in the page's head blocks all fetching and every script that lacks the
page's random nonce. This policy is needed because names in results are untrusted input. The data
are compressed JSON, which the browser unpacks.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from bokeh.embed import components
from bokeh.plotting import figure
from bokeh.resources import Resources
from jinja2 import Environment, FileSystemLoader, select_autoescape

from analysis.advice.recommend import Advice
from analysis.advice.verdict import verdict_text
from analysis.model.basis import basis_at
from analysis.page import charts, page_findings
from analysis.page.page_model import page_model
from analysis.page.page_report import PageReport
from analysis.page.points import columns_of, points_of
from analysis.recordings.load import problems_of
from analysis.rules.rules_report import SHARES
from kernels.common.program import command

_HERE = Path(__file__).parent
# These files are joined into one JavaScript module, in this order.
_SCRIPT = (
    "data.js",
    "tables.js",
    "charts.js",
    "formula.js",
    "ask.js",
    "neighbours.js",
    "page.js",
)


def page_html(reports: Sequence[PageReport]) -> str:
    """Return the page as HTML.

    Args:
        reports: one or more reports, each with what the page shows about one recording.

    Raises:
        UserError: if the model of a recording cannot be read or exported.
    """
    # 1. Make the charts. The roofline and the accuracy chart share one source of points. The three
    # charts of neighbours are for three sizes of a case: M, N and K, or images and channels.
    source = charts.shown_points()
    points_by_report = [points_of(report.analysis) for report in reports]
    points = pd.concat(points_by_report, ignore_index=True)
    machines = [report.analysis.recording.machine for report in reports]
    figures: dict[str, figure] = {
        "roofline": charts.roofline(source, machines, points),
        "accuracy": charts.accuracy(source, points),
        **{f"line{number}": charts.neighbours(number) for number in range(3)},
        **{
            f"rules{i}": charts.rules(page_findings.rules_with_ratios(report), i)
            for i, report in enumerate(reports)
            if page_findings.rules_with_ratios(report)
        },
    }
    if len(reports) > 1:
        figures["pairs"] = charts.pairs()
    chart_script, divs = components(figures)
    # 2. Pack the data. The time stamp of gzip is fixed, so that the same data give the same bytes.
    scale, _ = charts.speed_unit(machines)
    documents = [
        _data(report, report_points, scale)
        for report, report_points in zip(reports, points_by_report, strict=True)
    ]
    data = json.dumps(documents, allow_nan=False).encode()
    packed = base64.b64encode(gzip.compress(data, mtime=0)).decode()
    # 3. Fill the template. Bokeh's code is part of the page, so that nothing is fetched.
    bokeh_code = Resources(mode="inline", minified=True, components=["bokeh"]).js_raw
    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=select_autoescape(["html"])
    )
    return environment.get_template("page.html").render(
        reports=reports,
        charts=divs,
        packed=packed,
        scripts=[*bokeh_code, _code(chart_script)],
        style=(_HERE / "page.css").read_text(encoding="utf-8"),
        code="\n".join((_HERE / "script" / name).read_text(encoding="utf-8") for name in _SCRIPT),
        nonce=secrets.token_hex(16),
        say=page_findings,
        with_rules=any(page_findings.judged(report) for report in reports),
        with_waves=any(machine.kind == "gpu" for machine in machines),
        with_steps=any(page_findings.has_tensor_cores(report) for report in reports),
        made_by=command("analysis page").strip("`"),
    )


def _code(script: str) -> str:
    """Return the code of Bokeh's ``<script>`` element; Bokeh has already escaped the data in it."""
    inner = re.fullmatch(r"\s*<script[^>]*>(.*)</script>\s*", script, re.DOTALL)
    assert inner is not None
    return inner.group(1)


def _data(report: PageReport, points: pd.DataFrame, scale: float) -> dict[str, Any]:
    """Return a recording's data for the script, as a JSON document.

    ``scale`` is the factor from TFLOP/s to the roofline's unit.
    """
    recording = report.analysis.recording
    machine = recording.machine
    return {
        "name": report.name,
        "machine": machine.name,
        "kind": machine.kind,
        "cache": recording.cache,
        "sms": machine.sms,
        "scale": scale,
        "peaks": {dtype: machine.peak(dtype) / 1e12 for dtype in machine.peaks},
        "points": columns_of(points),
        "model": _model(report),
        "advice": [_advice(answer) for answer in report.advice],
        "rules": [{**rule.to_json(), "is_share": rule.id in SHARES} for rule in report.rules],
    }


def _model(report: PageReport) -> dict[str, Any] | None:
    analysis = report.analysis
    if analysis.recording.unusable:
        return None
    basis = basis_at(analysis.recording.folder, analysis.model)
    return page_model(basis, problems_of(analysis.table))


def _advice(answer: Advice) -> dict[str, Any]:
    """Return the answer to a pad or choose query as JSON for the script; gains are fractions."""
    gain = answer.gain
    return {
        "spec": answer.problem.spec(),
        "shape": str(answer.problem),
        "verdict": answer.verdict,
        "verdict_text": verdict_text(answer.verdict, answer.probability),
        "question": answer.question,
        "change": answer.change or "unchanged size",
        "gain": gain.value,
        "lo": gain.lo,
        "hi": gain.hi,
        "evidence": answer.evidence,
        "flops": answer.extra_flops,
        "by": answer.implementation,
        "reason": answer.reason,
    }
