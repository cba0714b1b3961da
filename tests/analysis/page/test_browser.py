"""In a real browser, the page draws, filters, finds and reports what was recorded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

from analysis.advice.answers import answers_to
from analysis.advice.table import QUESTIONS
from analysis.advice.times import times_of
from analysis.model.basis import find_basis
from kernels.problem import Gemm
from tests.support.browsing import Opened, need_browser, opened
from tests.support.published import RECORDED, SLUG

SECTIONS = ("roofline", "neighbourhood", "advice", "rules", "accuracy")
GROUP = pytest.mark.xdist_group("browser")
pytestmark = [pytest.mark.slow, GROUP]


@pytest.fixture(scope="module")
def measured() -> pd.DataFrame:
    return pd.read_csv(RECORDED / "measurements.csv", keep_default_na=False)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need_browser()
    from analysis.commands.page import write_page
    from analysis.model.fitted import analyse
    from analysis.recordings.runs import load_runs

    path = tmp_path_factory.mktemp("page") / "report.html"
    return write_page([analyse(load_runs(RECORDED))], [None], path)


@pytest.fixture
def here(page: Path) -> Iterator[Opened]:
    with opened(page) as it:
        yield it


def number(text: str) -> int:
    return int(re.sub(r"\D", "", text))


def count(here: Opened) -> int:
    return number(here.text("#count").partition(" of ")[0])


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_opens_without_a_network_or_a_complaint(
    page: Path, scheme: str, measured: pd.DataFrame, tmp_path: Path
) -> None:
    with opened(page, scheme) as here:
        assert count(here) == len(measured)
        paper = here.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (paper == "rgb(255, 255, 255)") == (scheme == "light")
        # This recording has no profiled models and no waves, so the page does not mention them.
        assert here.page.locator("#tensor-cores").count() == 0
        assert "edges of waves" not in here.text("main")
        for section in SECTIONS:
            part = here.page.locator(f"#{section}")
            assert part.locator(".finding").first.inner_text().strip().endswith(".")
            part.screenshot(path=tmp_path / f"{section}-{scheme}.png")  # looked at by people


CONTRASTS = """() => {
  const channels = (color) => color.match(/[\\d.]+/g).map(Number);
  const over = ([r, g, b, a = 1], under) => [r, g, b].map((c, i) => a * c + (1 - a) * under[i]);
  const paper = channels(getComputedStyle(document.body).backgroundColor);
  const behind = (node) => {
    const parents = [];
    for (let each = node; each; each = each.parentElement) parents.unshift(each);
    return parents.reduce(
      (color, each) => over(channels(getComputedStyle(each).backgroundColor), color), paper);
  };
  const light = (color) => color
    .map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ratio = (one, other) => {
    const [dark, bright] = [light(one), light(other)].sort((a, b) => a - b);
    return (bright + 0.05) / (dark + 0.05);
  };
  const isText = (child) => child.nodeType === 3 && child.data.trim();
  const texts = [...document.body.querySelectorAll("*")].filter(
    (node) => node.checkVisibility() && [...node.childNodes].some(isText));
  const seen = texts.map((node) => {
    const ground = behind(node);
    const ink = over(channels(getComputedStyle(node).color), ground);
    const name = `${node.tagName} ${node.className} ${node.textContent.slice(0, 30)}`;
    return [ratio(ink, ground), name];
  });
  const probe = document.body.appendChild(document.createElement("i"));
  for (const document_ of Bokeh.documents) {
    for (const part of document_.all_models ?? document_._all_models.values()) {
      for (const name of ["text_color", "axis_label_text_color", "major_label_text_color"]) {
        if (typeof part[name] !== "string") continue;
        probe.style.color = part[name];
        seen.push([ratio(channels(getComputedStyle(probe).color), paper), `${part.type} ${name}`]);
      }
    }
  }
  return seen;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_stands_out_from_what_is_behind_it(page: Path, scheme: str) -> None:
    with opened(page, scheme) as here:
        here.page.locator("#shape").fill("1000,1030,999,fp32")
        here.page.locator("#shape").press("Enter")
        seen = here.page.evaluate(CONTRASTS)
        here.page.locator("#shape").fill("nonsense")
        here.page.locator("#shape").press("Enter")
        seen += here.page.evaluate(CONTRASTS)
    assert len(seen) > 500
    assert {name.partition(" ")[0] for _, name in seen} >= {"TD", "BUTTON", "LABEL", "Label", "P"}
    weak = sorted((round(ratio, 2), text) for ratio, text in seen if ratio < 4.5)
    assert not weak, weak[:10]


def test_filters_change_the_counts_that_they_say(here: Opened, measured: pd.DataFrame) -> None:
    box = here.page.locator("#filters")
    box.locator("details.facet summary").click()  # there are many sweeps, so they are folded
    for name, value in (("dtype", "fp32"), ("op", "conv"), ("sweep", "steps")):
        said = box.locator(f"input[name={name}][value={value}] + span").inner_text()
        assert number(said) == (measured[name] == value).sum()
    box.locator("input[name=dtype][value=fp32]").uncheck()
    left = measured[measured["dtype"] != "fp32"]
    assert count(here) == len(left)
    said = box.locator("input[name=op][value=conv] + span").inner_text()
    assert number(said) == (left["op"] == "conv").sum()
    box.locator("input[name=op][value=gemm]").uncheck()
    assert count(here) == (left["op"] == "conv").sum()
    # A count is about the rows that the other filters leave, so a row that two filters hide is not
    # in any count.
    said = box.locator("input[name=op][value=gemm] + span").inner_text()
    assert number(said) == (left["op"] == "gemm").sum()
    said = box.locator("input[name=dtype][value=fp32] + span").inner_text()
    assert number(said) == ((measured["dtype"] == "fp32") & (measured["op"] == "conv")).sum()
    drawn = here.page.evaluate(
        "Bokeh.documents.map(d => d.get_model_by_name('shown')).find(Boolean).data.x.length"
    )
    assert drawn == count(here)
    assert number(here.text("#points-table output").partition(" of ")[2]) == count(here)
    box.locator("fieldset", has_text="pass").get_by_role("button").click()  # unticks all passes
    assert count(here) == 0


def rounded(value: float) -> str:
    """Return a time in µs as the page shows it, with four significant digits, without the unit.

    The page writes the unit of an interval only once.
    """
    scaled = value if value < 1e4 else value * 1e-3
    return f"{float(f'{scaled:.4g}'):,.15g}"


def with_unit(value: float) -> str:
    return f"{rounded(value)} {'µs' if value < 1e4 else 'ms'}"


def test_hovering_says_what_the_table_of_measurements_says(
    here: Opened, measured: pd.DataFrame
) -> None:
    script = "Bokeh.documents.map(d => d.get_model_by_name('shown')).find(Boolean).data.index"
    index = here.page.evaluate(script)
    alone = measured["tflops"].idxmax()  # no other point covers that of the fastest case
    row = measured.loc[alone]
    # A CPU's speeds are drawn in GFLOP/s.
    (place,) = [
        i
        for i, point in enumerate(index)
        if speed(here, point) == pytest.approx(1e3 * row["tflops"], rel=1e-6)
    ]
    here.page.mouse.move(*here.place_of(place))
    text = here.hovered()
    assert with_unit(row["time_us"]) in text
    assert f"({rounded(row['time_lo_us'])}–{with_unit(row['time_hi_us'])})" in text
    assert row["kernel"] in text
    assert f"{row['m']}×{row['n']}×{row['k']}" in text


def speed(here: Opened, point: int) -> float:
    script = """point => {
      const { data } = Bokeh.documents.map((d) => d.get_model_by_name("shown")).find(Boolean);
      return data.y[data.index.indexOf(point)];
    }"""
    return float(here.page.evaluate(script, point))


def test_a_click_shows_a_points_neighbours(here: Opened, measured: pd.DataFrame) -> None:
    row = measured.loc[measured["tflops"].idxmax()]
    index = here.page.evaluate(
        "Bokeh.documents.map(d => d.get_model_by_name('shown')).find(Boolean).data.y"
    )
    place = max(range(len(index)), key=index.__getitem__)
    here.page.mouse.click(*here.place_of(place))
    here.page.wait_for_function("document.getElementById('shape').value !== ''")
    assert (
        here.page.locator("#shape").input_value().startswith(f"{row['m']},{row['n']},{row['k']},")
    )


def line_through(
    measured: pd.DataFrame, sizes: dict[str, int], dtype: str, along: str
) -> list[int]:
    """Return the measured sizes along a dimension of cold GEMMs without a configuration."""
    plain = {"op": "gemm", "dtype": dtype, "cache": "cold", "layout": "nt", "mode": "burst",
             "config": "", "batch": "1"}  # fmt: skip
    rows = measured.astype(str)
    for name, value in {**plain, **{k: str(v) for k, v in sizes.items() if k != along}}.items():
        rows = rows[rows[name] == value]
    return sorted({int(size) for size in rows[along]})


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((512, 512, 464), "fp32"), ((512, 512, 512), "fp32"), ((512, 512, 512), "bf16")],
)
def test_typing_a_shape_finds_its_neighbours(
    here: Opened, measured: pd.DataFrame, shape: tuple[int, int, int], dtype: str
) -> None:
    here.page.locator("#shape").fill(",".join(map(str, shape)) + f",{dtype}")
    here.page.locator("#shape").press("Enter")
    text = "×".join(map(str, shape)) + f" {dtype}"
    assert here.text("#chosen").startswith(f"Measured times next to {text}")
    assert here.text("#answer").startswith(f"{text} nt: measured ")
    sizes = dict(zip("mnk", shape, strict=True))
    for place, along in enumerate("mnk"):
        expected = line_through(measured, sizes, dtype, along)
        box = here.page.locator(f"#line-{place}")
        title = box.locator("h3").inner_text()
        assert f"Along {along.upper()}: " in title
        assert (f"{len(expected)} sizes" in title) == (len(expected) > 1)
        assert box.locator(".chart").is_visible() == (len(expected) > 1)
        if len(expected) > 1:
            box.locator("summary").click()
        rows = here.cells(f"#line-{place}")
        assert [int(row[0]) for row in rows] == expected
        times = {int(row[0]): row[1] for row in rows}
        own = measured[
            (measured["dtype"] == dtype) & (measured["op"] == "gemm")
            & (measured["cache"] == "cold")
            & (measured[["m", "n", "k"]].astype(str) == [*map(str, shape)]).all(axis=1)
        ]  # fmt: skip
        assert any(times[sizes[along]].startswith(with_unit(time)) for time in own["time_us"])
    advice = here.page.locator("#answer p").all_inner_texts()
    assert [text.partition("(")[2].partition(")")[0] for text in advice[2:4]] == ["pad", "choose"]


def test_a_shape_that_was_not_measured_has_a_nearest_one(here: Opened) -> None:
    here.page.locator("#shape").fill("1000,1024,1024,fp32")
    here.page.get_by_role("button", name="Answer").click()
    assert here.text("#chosen").startswith("The nearest measured shape is 1024×1024×1024 fp32")
    assert here.text("#answer").startswith("1000×1024×1024 fp32 nt: predicted ")
    for nonsense in (
        "hello",
        "",
        "1,2",
        "0,1,1,fp32",
        "1e9,1,1,bf16",
        "<img src=x onerror=alert(1)>",
    ):
        here.page.locator("#shape").fill(nonsense)
        here.page.locator("#shape").press("Enter")
        assert "Type M,N,K,dtype" in here.text("#fault")
        assert not here.page.locator("#answer, #measured").first.is_visible()
        assert not here.page.locator("#measured").is_visible()


def test_a_shape_that_was_not_measured_is_answered_as_by_the_commands(here: Opened) -> None:
    problem = Gemm(1000, 1030, 999, "fp32")
    basis = find_basis(SLUG, RECORDED.parent.parent)
    (predicted,) = times_of([problem], basis)
    verdicts = [
        answer.advice.verdict
        for question in QUESTIONS
        for answer in answers_to([problem], basis, question)
    ]
    here.page.locator("#shape").fill("1000,1030,999,fp32")
    here.page.locator("#shape").press("Enter")
    paragraphs = here.page.locator("#answer p:visible").all_inner_texts()
    finding, limit, to_pad, to_choose, source = paragraphs
    time, lo, hi = (rounded(predicted[f"{name}_us"]) for name in ("time", "lo", "hi"))
    assert finding.startswith(f"1000×1030×999 fp32 nt: predicted {time} ms ({lo}–{hi} ms), ")
    assert f"{predicted['tiles']:,} tiles of {predicted['tile']}" in limit
    for text, kind, verdict in zip((to_pad, to_choose), ("pad", "choose"), verdicts, strict=True):
        assert f"({kind}): {verdict}" in text
    assert 3 <= len(here.cells("#answer")) <= 6
    assert source == f"Source of predictions: {predicted['source']} (recorded)."


def test_tables_are_sorted_searched_and_copied(here: Opened) -> None:
    table = here.page.locator("#advice-table")
    verdicts = [row[1] for row in here.cells("#advice-table")]
    assert verdicts == sorted(verdicts, key=lambda verdict: verdict != "do it")
    gains = [float(row[4].partition("%")[0]) for row in here.cells("#advice-table")]
    table.get_by_role("button", name="gain").click()
    falling = [float(row[4].partition("%")[0]) for row in here.cells("#advice-table")]
    assert falling == sorted(falling, reverse=True)
    assert falling[0] >= max(gains)
    table.get_by_role("button", name="gain").click()
    rising = [float(row[4].partition("%")[0]) for row in here.cells("#advice-table")]
    assert rising == sorted(rising)
    assert table.locator("th[aria-sort=ascending]").inner_text().startswith("gain")
    table.get_by_role("searchbox").fill("511")
    rows = here.cells("#advice-table")
    assert rows
    assert all("511" in " ".join(row) for row in rows)
    table.locator("button.copy").first.click()
    table.get_by_text("Copied").wait_for()
    copied = here.page.evaluate("navigator.clipboard.readText()").splitlines()
    assert copied[0].startswith("| shape | verdict |")
    assert set(copied[1]) == set("| -")
    assert [cell.strip() for cell in copied[2].strip("|").split(" | ")] == rows[0][:-1]


def test_the_keyboard_reaches_every_control(here: Opened) -> None:
    script = """() => [...document.querySelectorAll("a[href],button,input,summary,[tabindex='0']")]
      .filter((e) => e.checkVisibility() && !e.closest("table") && !e.disabled)
      .map((e, i) => (e.dataset.stop = String(i)))"""
    stops = set(here.page.evaluate(script))
    assert len(stops) > 30
    here.page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    reached = set()
    for _ in range(1500):
        here.page.keyboard.press("Tab")
        reached.add(here.page.evaluate("document.activeElement?.dataset?.stop ?? ''"))
        if stops <= reached:
            break
    assert stops <= reached
    here.page.locator("#filters input").first.focus()
    before = count(here)
    here.page.keyboard.press("Space")
    assert count(here) < before


def test_the_first_screen_says_how_fast_how_sure_and_what_to_change(here: Opened) -> None:
    from analysis.model.fitted import analyse
    from analysis.recordings.runs import load_runs
    from analysis.slices.series import fastest_gemms, roofline_series

    here.page.set_viewport_size({"width": 1400, "height": 900})
    for selector in (".tiles", "#filters", "#roofline .bk-Figure"):
        box = here.page.locator(selector).first.bounding_box()
        assert box is not None
        assert box["y"] + box["height"] <= 900, selector
    tiles = here.page.locator(".tiles li").all_inner_texts()
    assert 4 <= len(tiles) <= 6
    recorded = analyse(load_runs(RECORDED))
    plotted = roofline_series(recorded.table, recorded.recording.cache)
    for gemm in fastest_gemms(plotted, recorded.recording.machine):
        (tile,) = [tile for tile in tiles if f"fastest {gemm.dtype} GEMM" in tile]
        assert f"{gemm.share:.0%} of the peak" in tile
    assert here.text(".verdict") == "noisy run"
    assert not here.page.locator(".health p").first.is_visible()
    here.page.locator(".health summary").click()
    assert "which are widened accordingly" in here.text(".health p >> nth=0")


@pytest.mark.parametrize("width", [1400, 800, 400])
def test_nothing_lies_outside_of_the_window(here: Opened, width: int) -> None:
    here.page.set_viewport_size({"width": width, "height": 900})
    wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert here.page.evaluate(wide) <= 0
