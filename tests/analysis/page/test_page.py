"""The page's file has the right data and size, and does not run hostile text from a recording."""

from __future__ import annotations

import base64
import gzip
import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.commands.page import _read_rules
from analysis.model.basis import Basis
from analysis.model.features import Inputs
from analysis.model.fit import Fit
from analysis.model.fitted import Analysis, analyse
from analysis.model.forest import Forest
from analysis.model.predict import Model
from analysis.model.query import Query
from analysis.model.residual import Residual
from analysis.page import page_model
from analysis.page.page_findings import rules_with_ratios
from analysis.page.page_report import PageReport
from analysis.page.points import points_of
from analysis.recordings.load import load
from analysis.rules.judge import NOT_MEASURED, RuleResult
from kernels.common.errors import UserError
from kernels.machine import known_machine
from kernels.problem import Conv
from kernels.timemodel.constants import default_constants
from sweeps.cases.case import Case
from tests.support.browsing import need_browser, opened
from tests.support.synthetic import H100, gemm_cases, random_sizes, record, recorded
from tests.support.tiers import quick_and_long

pytestmark = pytest.mark.xdist_group("browser")


def rows_of(folder: Path) -> pd.DataFrame:
    """Return a table's cells as text, so that unchanged cells can be written back exactly."""
    return pd.read_csv(folder / "measurements.csv", dtype=str, keep_default_na=False)


def write(folder: Path, *more: Path) -> Path:
    return write_analysed([analyse(load(each)) for each in (folder, *more)])


def write_analysed(analyses: list[Analysis]) -> Path:
    pytest.importorskip("bokeh", reason="needs the extra `page`")
    from analysis.commands.page import write_page

    return write_page(analyses, [None] * len(analyses))


def data_of(page: Path) -> Any:
    """Return the data that the page's script reads."""
    text = page.read_text(encoding="utf-8")
    (packed,) = re.findall(r'<script[^>]*id="data">([^<]*)</script>', text)
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def test_every_case_is_in_it_with_its_very_numbers(tmp_path: Path) -> None:
    recording = recorded(tmp_path / "nvidia-h100-sxm", count=60)
    (run,) = data_of(write(recording.folder))
    points = run["points"]
    rows = recording.rows
    assert points["time_us"] == pytest.approx(rows["time_us"].tolist(), rel=1e-8)
    assert points["m"] == rows["m"].tolist()
    words = points["kernel"]["words"]
    assert [words[code] for code in points["kernel"]["codes"]] == [""] * len(rows)
    assert run["sms"] == recording.machine.sms


def test_a_case_without_a_measured_tile_shows_the_predicted_one(tmp_path: Path) -> None:
    recording = recorded(tmp_path / "nvidia-h100-sxm", count=60)
    table = rows_of(recording.folder)
    table.loc[0, "tile"] = "7x9"
    table.to_csv(recording.folder / "measurements.csv", index=False)
    points = points_of(analyse(load(recording.folder)))
    assert points["tile"].tolist() == ["7x9", *points["predicted_tile"][1:]]


def test_a_case_without_a_time_is_a_point_with_a_status(tmp_path: Path) -> None:
    recording = recorded(tmp_path / "nvidia-h100-sxm", count=60)
    table = rows_of(recording.folder)
    times = ["time_us", "time_lo_us", "time_hi_us", "samples", "converged", "tflops", "gbps"]
    table.loc[5, times] = ""
    table.loc[5, ["status", "message"]] = ["oom", "no room"]
    table.to_csv(recording.folder / "measurements.csv", index=False)
    (run,) = data_of(write(recording.folder))
    points = run["points"]
    said = [points["message"]["words"][code] for code in points["message"]["codes"]]
    assert said.count("no room") == 1
    assert points["time_us"][said.index("no room")] is None
    assert len(points["m"]) == len(table)


@pytest.mark.long
def test_a_page_of_a_usual_sweep_is_under_two_megabytes(tmp_path: Path) -> None:
    recording = recorded(tmp_path / "nvidia-h100-sxm", count=800)
    assert write(recording.folder).stat().st_size < 2e6


@pytest.mark.long
def test_two_recordings_stand_side_by_side(tmp_path: Path) -> None:
    need_browser()
    cases = gemm_cases(dict.fromkeys(random_sizes(60)))
    rng = np.random.default_rng(0)
    seconds = np.exp(rng.normal(-9, 1, len(cases)))
    first = record(tmp_path / "nvidia-h100-sxm", cases, seconds)
    second = record(tmp_path / "nvidia-h200", cases, seconds / 2, machine=known_machine("h200"))
    with opened(write(first, second)) as here:
        assert "nvidia-h200 is 2.00× as fast as nvidia-h100-sxm" in here.text(
            "#side-by-side .finding"
        )
        here.page.locator("#side-by-side summary").click()
        rows = here.cells("#pairs-table")
        assert len(rows) == len(cases)
        assert {row[-2] for row in rows} == {"2.00×"}
        here.page.locator("input[name=run][value=nvidia-h200]").uncheck()
        assert here.text("#count").startswith(f"{len(cases)} of {2 * len(cases)} cases")


def rising(cases: list[Case]) -> list[float]:
    return [1e-4 * (1 + place) for place in range(len(cases))]


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>${alert(3)}"


@pytest.mark.slow
def test_no_text_of_a_recording_is_run_as_a_script(tmp_path: Path) -> None:
    need_browser()
    cases = gemm_cases(dict.fromkeys(random_sizes(60)), sweep=HOSTILE)
    folder = record(
        tmp_path / "nvidia-h100-sxm", cases, [1e-4 * (1 + i) for i in range(len(cases))]
    )
    run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    run["machine"]["name"] = run["software"]["torch"] = HOSTILE
    run["health"] = {"verdict": "noisy", "reasons": [HOSTILE]}
    (folder / "run.json").write_text(json.dumps(run), encoding="utf-8")
    table = rows_of(folder)
    table["kernel"] = table["message"] = HOSTILE
    table.to_csv(folder / "measurements.csv", index=False)
    rule = {
        "id": HOSTILE,
        "statement": HOSTILE,
        "source": HOSTILE,
        "verdict": HOSTILE,
        "effect": 2.0,
        "lo": 1.5,
        "hi": 3.0,
        "predicted": None,
        "cases": 3,
        "reason": HOSTILE,
    }
    (folder / "rules.json").write_text(json.dumps([rule]), encoding="utf-8")
    page = write(folder)
    assert HOSTILE not in page.read_text(encoding="utf-8")
    with opened(page) as here:  # fails if the page logs an error, alerts or fetches anything
        assert here.text("h1") == HOSTILE
        assert HOSTILE in " ".join(here.cells("#points-table")[0])
        assert here.cells("#rules-table")[0][0] == f"{rule['id']}: {HOSTILE}"
        here.page.mouse.move(*here.place_of(0))
        assert HOSTILE in here.hovered()
        assert here.page.locator("img[src=x]").count() == 0


def nan_time(table: pd.DataFrame) -> pd.DataFrame:
    return table.assign(time_us=["nan", *table["time_us"][1:]])


def infinite_time(table: pd.DataFrame) -> pd.DataFrame:
    return table.assign(time_us=["inf", *table["time_us"][1:]])


def negative_size(table: pd.DataFrame) -> pd.DataFrame:
    return table.assign(m=["-5", *table["m"][1:]])


def endless_word(table: pd.DataFrame) -> pd.DataFrame:
    return table.assign(kernel="x" * 20_000)


def odd_letters(table: pd.DataFrame) -> pd.DataFrame:
    return table.assign(kernel="\u202e\ufeff\u0007𝕏|`")


def no_time_at_all(table: pd.DataFrame) -> pd.DataFrame:
    return table.assign(status="error", time_us="", time_lo_us="", time_hi_us="")


def one_shape(table: pd.DataFrame) -> pd.DataFrame:
    return table.head(1)


def unknown_dtype(table: pd.DataFrame) -> pd.DataFrame:
    return table.assign(dtype="fp7")


def foreign_columns(table: pd.DataFrame) -> pd.DataFrame:
    return table.rename(columns={"time_us": "time"})


def huge_times(table: pd.DataFrame) -> pd.DataFrame:
    return table.assign(time_us=table["time_us"] + "e12", time_hi_us=table["time_hi_us"] + "e12")


DAMAGE = [nan_time, infinite_time, negative_size, endless_word, odd_letters, no_time_at_all,
          one_shape, unknown_dtype, foreign_columns, huge_times]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage", quick_and_long(DAMAGE, 2), ids=lambda damage: str(damage.__name__)
)
def test_a_damaged_table_is_a_page_or_a_sentence(
    damage: Callable[[pd.DataFrame], pd.DataFrame], tmp_path: Path
) -> None:
    need_browser()
    folder = recorded(tmp_path / "nvidia-h100-sxm", count=60).folder
    table = damage(rows_of(folder))
    table.to_csv(folder / "measurements.csv", index=False)
    try:
        page = write(folder)
    except UserError:
        return
    with opened(page) as here:
        assert "cases" in here.text("#count")


def test_without_its_extra_a_page_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from analysis.commands.page import add_page, lacks_page

    recording = recorded(tmp_path / "nvidia-h100-sxm", count=60)
    analysis = analyse(recording)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert lacks_page().startswith("needs the extra `page`; ")
    assert add_page(analysis, []) is None
    assert "report.html is left out" in capsys.readouterr().err
    assert not (recording.folder / "report.html").exists()


@pytest.mark.slow
def test_damaged_verdicts_are_a_sentence(tmp_path: Path) -> None:
    folder = recorded(tmp_path / "nvidia-h100-sxm", count=60).folder
    rule = {
        "id": "a",
        "statement": "s",
        "source": "s",
        "verdict": "holds",
        "effect": 2.0,
        "lo": 1.5,
        "hi": 3.0,
        "predicted": None,
        "cases": 3,
        "reason": "",
    }
    changes: list[dict[str, object]] = [{"id": 5}, {"lo": None}, {"hi": -1.0}, {"effect": "x"},
                                        {"cases": None}]  # fmt: skip
    damaged = [json.dumps([{**rule, **change}]) for change in changes]
    analyses = [analyse(load(folder))]
    for text in ("[{}]", "{", '[{"id": 1}]', json.dumps([rule, rule]), *damaged):
        (folder / "rules.json").write_text(text, encoding="utf-8")
        with pytest.raises(UserError, match=r"rules.json cannot be read"):
            write_analysed(analyses)


@pytest.mark.long
def test_two_recordings_with_verdicts_have_a_page(tmp_path: Path) -> None:
    need_browser()
    rule = {"id": "nhwc", "statement": "s", "source": "s", "verdict": "holds", "effect": 2.0,
            "lo": 1.5, "hi": 3.0, "predicted": None, "cases": 3, "reason": ""}  # fmt: skip
    share = {**rule, "id": "tc-used", "effect": 0.3, "lo": 0.0, "hi": 0.6}
    cases = gemm_cases(dict.fromkeys(random_sizes(60)))
    folders = [tmp_path / name / "nvidia-h100-sxm" for name in ("x", "y")]
    for folder in folders:
        record(folder, cases, rising(cases))
        (folder / "rules.json").write_text(json.dumps([rule, share]), encoding="utf-8")
    with opened(write(*folders)) as here:
        rows = here.cells("#rules-table")
        assert len(rows) == 4
        assert {(row[0], row[2]) for row in rows} == {
            ("nhwc: s", "2.00× (1.50 to 3.00)"),
            ("tc-used: s", "30% (0% to 60%)"),
        }


@pytest.mark.slow
def test_a_typed_shape_is_measured_only_if_all_of_it_was(tmp_path: Path) -> None:
    need_browser()
    cases = gemm_cases([(64, 64, 64), *dict.fromkeys(random_sizes(60))])
    with opened(write(record(tmp_path / "nvidia-h100-sxm", cases, rising(cases)))) as here:
        for shape, known in (("64,64,64,bf16", True), ("64,64,64,BF16,nt,1", True),
                             ("64,64,64,bf16,tn", False), ("64,64,64,bf16,nt,8", False),
                             ("64,64,63,bf16", False)):  # fmt: skip
            here.page.locator("#shape").fill(shape)
            here.page.locator("#shape").press("Enter")
            assert ("bf16 nt: measured " in here.text("#answer")) == known, shape


@pytest.mark.slow
def test_convolutions_have_neighbours_along_their_channels(tmp_path: Path) -> None:
    need_browser()
    from kernels.problem import Conv

    sizes = (16, 32, 48, 64, 96, 128)
    cases = [
        Case("channels", Conv.parse(f"8,{c},28,28,64,3,3,1,1,1,1,bf16,nhwc"), "cudnn")
        for c in sizes
    ]
    cases += gemm_cases(dict.fromkeys(random_sizes(40)))
    folder = record(
        tmp_path / "nvidia-h100-sxm", cases, [1e-4 * (1 + i) for i in range(len(cases))]
    )
    with opened(write(folder)) as here:
        here.page.locator("#shape").fill("8,64,28,28,64,3,3,1,1,1,1,bf16,nhwc,fprop")
        here.page.locator("#shape").press("Enter")
        assert "→ 64, 3×3 fprop bf16 nhwc: measured" in here.text("#answer")
        assert f"Along C: {len(sizes)} sizes" in here.text("#line-1 h3")
        here.page.locator("#shape").fill("8,64,28,28,64,1,1,1,0,1,1,bf16,nhwc,fprop")
        here.page.locator("#shape").press("Enter")
        assert here.text("#chosen").startswith("The nearest measured shape has ")
        assert "→ 64, 1×1 fprop bf16 nhwc: predicted" in here.text("#answer")


def test_smaller_trees_of_a_convolution_may_predict_another_dtype(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fit for bf16 also predicts fp16, in which no convolution was measured."""
    convs = [
        Conv.build((8, c, 28, 28, kout, 3, 3), [(1, 1)] * 3, 1, "bf16")
        for c in range(16, 80, 8)
        for kout in range(16, 80, 8)
    ]
    constants = default_constants("hopper", "bf16")
    inputs = Inputs.from_query(H100, Query.plain(convs, "cudnn"))
    features = inputs.features(constants, inputs.estimate(constants))
    log_ratios = np.random.default_rng(0).normal(0, 0.1, len(convs))
    residual = Residual(Forest.grown(features, log_ratios, 8, 2), 0.05, 0.05)
    bf16 = Fit(constants, residual, rows=len(convs))
    fits = {"cudnn fprop bf16": bf16, "cudnn fprop fp16": bf16.stretched(1.1)}
    monkeypatch.setattr(page_model, "MOST_NODES", 100)
    basis = Basis(Model(H100, fits), "recorded", "a test")
    model = page_model.page_model(basis, convs)
    assert model["groups"]["fprop bf16"]["trees"] == model["groups"]["fprop fp16"]["trees"] == 0
    (trees,) = model["trees"]
    assert trees["differs"] > 0
    # Too few shapes to hold one out are compared all the same.
    (trees,) = page_model.page_model(basis, convs[:1])["trees"]
    assert trees["differs"] >= 0


def rule_result(
    name: str, effect: float | None, lo: float | None, hi: float | None, verdict: str = "no longer"
) -> RuleResult:
    return RuleResult(name, "s", "s", verdict, effect, lo, hi, None, 2, "")


SHARE = rule_result("tc-used", 0.3, 0.0, 0.6)
RATIOS = [rule_result("nhwc", 0.9, 0.8, 0.95), rule_result("tile", 0.8, 0.7, 0.9)]


def test_the_chart_of_rules_has_ratios_from_top_to_bottom(tmp_path: Path) -> None:
    pytest.importorskip("bokeh", reason="needs the extra `page`")
    from analysis.page import charts

    analysis = analyse(recorded(tmp_path / "nvidia-h100-sxm", count=60))
    unmeasured = rule_result("wave", None, None, None, NOT_MEASURED)
    rows = [SHARE, *RATIOS, rule_result("amdahl", 0.5, 0.4, 0.6), unmeasured]
    with_ratios = rules_with_ratios(PageReport(analysis, [], rows))
    assert with_ratios == RATIOS
    # The first name is at the bottom of the axis.
    assert charts.rules(with_ratios, 0).y_range.factors == ["tile", "nhwc"]


def test_a_page_without_ratios_has_no_chart_of_rules(tmp_path: Path) -> None:
    pytest.importorskip("bokeh", reason="needs the extra `page`")
    from analysis.page.document import page_html

    analysis = analyse(recorded(tmp_path / "nvidia-h100-sxm", count=60))
    page = page_html([PageReport(analysis, [], [SHARE])])
    assert "Verdicts on 1 rule: no longer (1)." in page
    assert '"rules-0"' not in page
    assert '"rules-0"' in page_html([PageReport(analysis, [], [SHARE, *RATIOS])])


def test_a_share_of_zero_is_a_valid_effect(tmp_path: Path) -> None:
    rule = {"id": "tc-used", "statement": "s", "source": "s", "verdict": "no longer",
            "effect": 0.3, "lo": 0.0, "hi": 0.6, "predicted": None, "cases": 2,
            "reason": ""}  # fmt: skip
    path = tmp_path / "rules.json"
    path.write_text(json.dumps([rule]), encoding="utf-8")
    assert [row.lo for row in _read_rules(tmp_path)] == [0.0]
    path.write_text(json.dumps([{**rule, "effect": "0.3"}]), encoding="utf-8")
    with pytest.raises(UserError, match=r"rules.json cannot be read"):
        _read_rules(tmp_path)
