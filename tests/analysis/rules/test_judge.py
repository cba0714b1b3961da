"""Every rule has a row, and effects that are planted in a recording are found."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from analysis.imports.public import read_source
from analysis.model.predict import Model
from analysis.plots.cheat_sheet import (
    sheet_data,
    what_to_do,
    write_cheat_sheet,
    write_table_sheet,
)
from analysis.recordings.load import load
from analysis.rules.catalogue import all_rules, rule_sweeps
from analysis.rules.inputs import imported_rules, judge_inputs, rule_inputs
from analysis.rules.judge import (
    NOT_MEASURED,
    Evidence,
    RuleResult,
    _cut_short,
    _group_effect,
    judge_all,
)
from analysis.rules.pairing import TimedCase
from analysis.rules.rule_finding import Effect
from analysis.rules.rules_report import counts_sentence, terminal_table, write_rules
from kernels.common.errors import UserError
from kernels.config import ceil_div, large_tile
from kernels.machine import Machine, known_machine
from kernels.operation import Layer, Lstm, Workload
from kernels.problem import Gemm
from sweeps.cases.case import Case
from sweeps.cases.expand import expand
from sweeps.cases.spec import all_sweeps
from tests.support.published import ACCURACY
from tests.support.synthetic import H100, gemm_cases, measured_in_turn, model_law, problems, record
from tests.support.tiers import quick_and_long

IDS = """
    align-gemm align-worth align-linear align-conv pad-first-conv pad-vocab pad-sequence
    channels-256 wave tile bigger batch-intensity intensity-table small-dim dtype-speed
    half-traffic nhwc autotune fuse-inputs fuse-time dense-conv wider reduced-reduction
    aligned-memory rnn rnn-minibatch rnn-hidden rnn-persistent memory-bound launch-bound balance
    amdahl tc-used
""".split()  # noqa: SIM905  as the list of the field's advice has them
VERDICT = re.compile(r"holds|holds, weaker|no longer|no effect|not measured here|depends: .+")
A100 = known_machine("nvidia-a100-sxm-80gb")
NOISE = 0.03
Law = Callable[[Workload], float]


def test_every_rule_of_the_field_is_there_and_its_sweeps_exist() -> None:
    assert sorted(all_rules()) == sorted(IDS)
    assert {name for group in rule_sweeps() for name in group.split(",")} <= set(all_sweeps())
    assert "sources,layers" in rule_sweeps()  # the sweeps of one rule form a group
    sizes = {f.name for workload in get_args(Workload) for f in fields(workload)}
    for rule in all_rules().values():
        assert set(rule.also) <= set(all_sweeps())
        assert {size for dim in rule.options.get("dims", ()) for size in dim.split("+")} <= sizes
        assert rule.statement
        assert rule.source
        assert rule.effect
        assert rule.models or (rule.pairing and rule.sweeps)


def plant(
    folder: Path, cases: Sequence[Case], law: Law, seed: int, machine: Machine = H100
) -> list[RuleResult]:
    """Judge a recording whose times follow a law with noise, with nine samples per case."""
    rng = np.random.default_rng(seed)
    truth = np.array([law(case.problem) for case in cases])
    samples = np.sort(truth * np.exp(NOISE * rng.standard_normal((9, len(cases)))), axis=0)
    recording = load(record(folder, cases, samples[4], machine=machine))
    ends = {"time_lo_us": samples[1] * 1e6, "time_hi_us": samples[7] * 1e6}  # of the median
    recording = replace(recording, rows=recording.rows.assign(**ends))
    return judge_all([Evidence.from_recording(recording)])


def alignment_cases() -> list[Case]:
    sizes = [
        (base + dm, base + dn, base + dk)
        for base in (1024, 4096) for offset in range(17)
        for dm, dn, dk in ((offset, 0, 0), (0, offset, 0), (0, 0, offset))
    ]  # fmt: skip
    return gemm_cases(dict.fromkeys(sizes), "alignment")


def aligned_law(penalty: float) -> Law:
    def seconds(workload: Workload) -> float:
        assert isinstance(workload, Gemm)
        odd = workload.m % 8 or workload.n % 8 or workload.k % 8
        return workload.flops / 5e14 * (penalty if odd else 1.0)

    return seconds


@pytest.mark.slow
@pytest.mark.parametrize(
    ("penalty", "verdict"), quick_and_long([(1.8, "holds"), (1.0, "no effect")])
)
def test_a_planted_penalty_of_misalignment_is_found(
    tmp_path: Path, penalty: float, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("analysis.rules.judge.calibrate", Uncalibrated)
    right = covered = 0
    for seed in range(100):
        rows = plant(tmp_path / str(seed), alignment_cases(), aligned_law(penalty), seed)
        row = next(row for row in rows if row.id == "align-gemm")
        right += row.verdict == verdict
        assert row.lo is not None
        assert row.hi is not None
        covered += row.lo <= penalty <= row.hi
    assert right >= 90
    assert covered >= 90


@pytest.mark.long
def test_a_planted_step_of_a_wave_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("analysis.rules.judge.calibrate", Uncalibrated)
    bm, bn = large_tile("hopper", "bf16")
    edges = [m for m in range(bm, 8193, bm) if _waves(m + 1, bm, bn) > _waves(m, bm, bn)]
    cases = [
        Case("steps", Gemm(m + offset, 4096, 4096, "bf16"), "cublas")
        for m in edges for offset in (0, 1)
    ]  # fmt: skip

    def law(workload: Workload) -> float:
        assert isinstance(workload, Gemm)
        return 1e-4 * (1.3 if workload.m % bm else 1.0)

    found = []
    for seed in range(100):
        rows = plant(tmp_path / str(seed), cases, law, seed)
        found.append(next(row for row in rows if row.id == "wave"))
    assert sum(row.verdict.startswith("holds") for row in found) >= 90
    assert sum((row.lo or 0) <= 1.3 <= (row.hi or 0) for row in found) >= 90
    assert {row.cases for row in found} == {len(edges)}


def test_planted_laws_of_recurrent_layers_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The effect of each rule is found in the sweep that also has the other two effects."""
    monkeypatch.setattr("analysis.rules.judge.calibrate", Uncalibrated)
    sweep = all_sweeps()["lstm"]
    cases = expand(sweep, H100, lambda *_: "cudnn", lambda *_: [""])

    def law(workload: Workload) -> float:
        assert isinstance(workload, Lstm)
        slow = 1.5 if workload.hidden % 32 else 1.0
        slow *= 1.3 if workload.minibatch <= 128 else 1.0
        return workload.flops / 1e14 * slow * (2.0 if workload.hidden <= 256 else 1.0)

    by_id = {row.id: row for row in plant(tmp_path, cases, law, 0)}
    found = [by_id[f"rnn-{name}"] for name in ("persistent", "minibatch", "hidden")]
    assert [row.effect for row in found] == pytest.approx([1.5, 1.3, 2.0], rel=0.05)
    assert [row.verdict for row in found] == ["holds"] * 3


def _waves(m: int, bm: int, bn: int) -> int:
    return int(ceil_div(ceil_div(m, bm) * ceil_div(4096, bn), H100.sms))


class Uncalibrated:
    """Stand-in for the calibration, which takes seconds and does not influence verdicts."""

    def __init__(self, machine: Machine, rows: object) -> None:
        self.model = Model(machine)
        self.held_out = self
        self.estimate = self
        self.time = np.nan


def test_a_rule_about_gpus_is_not_judged_on_a_cpu_and_the_others_say_where_they_are_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("analysis.rules.judge.calibrate", Uncalibrated)
    facts = {"kind": "cpu", "generation": "cpu", "capability": None, "slug": "cpu-simulated-2t"}
    cpu = Machine.from_json({**H100.to_json(), **facts})
    cases = alignment_cases()
    rows = plant(tmp_path, cases, aligned_law(1.5), 0, cpu)
    by_id = {row.id: row for row in rows}
    assert by_id["align-gemm"].reason.startswith("on a CPU, ")
    assert by_id["wave"].verdict == by_id["small-dim"].verdict == NOT_MEASURED
    assert "GPU" in by_id["wave"].reason


def a_recording(results: Path) -> Path:
    cases = alignment_cases()
    cases += [
        Case("layers", Layer("relu", 4096 << i, 4096, 1, 1, dtype), "aten")
        for i in range(4) for dtype in ("fp32", "bf16")
    ]  # fmt: skip
    gemms = [case for case in cases if isinstance(case.problem, Gemm)]
    times = [*model_law()(problems(gemms)), *(c.problem.bytes / 3e12 for c in cases[len(gemms) :])]
    return record(results / H100.slug, cases, times)


@pytest.mark.parametrize(
    ("effect", "text"),
    [
        (Effect(2.95, 0.02, 382.0, 9), "2.95× (uncertain)"),
        (Effect(1.20, 0.90, 1.60, 9), "1.20× [0.90, 1.60]"),
        (Effect(7.64, 1.23, 47.3, 9), "7.64× [1.23, 47.30]"),
    ],
)
def test_an_interval_that_says_nothing_is_not_printed(effect: Effect, text: str) -> None:
    assert _group_effect(effect) == text


def test_the_files_hold_a_row_for_every_rule(tmp_path: Path) -> None:
    folder = a_recording(tmp_path)
    inputs = rule_inputs(None, tmp_path)
    assert inputs.folder == folder
    rows = judge_inputs(inputs)
    written = [*write_rules(inputs, rows), *write_cheat_sheet(inputs, rows)]
    table = json.loads((folder / "rules.json").read_text())
    assert [row["id"] for row in table] == list(all_rules())
    assert set(table[0]) == {
        "id", "statement", "source", "verdict", "effect", "lo", "hi", "predicted", "cases",
        "reason",
    }  # fmt: skip
    for row in table:
        assert VERDICT.fullmatch(row["verdict"]), row
        measured = row["verdict"] != NOT_MEASURED
        assert (row["effect"] is not None) == measured
        assert measured or row["reason"].startswith("needs ")
    by_id = {row["id"]: row for row in table}
    assert by_id["half-traffic"]["effect"] == pytest.approx(2.0, rel=0.05)
    assert by_id["memory-bound"]["verdict"] == "holds"
    assert by_id["half-traffic"]["predicted"] == pytest.approx(2.0, rel=0.2)
    text = (folder / "rules.md").read_text()
    assert all(f"| {name} |" in text for name in IDS)
    assert {path.name for path in written} == {"rules.md", "cheat-sheet.png"}
    assert (folder / "cheat-sheet.svg").stat().st_size > 1000
    assert len((folder / "rules.csv").read_text().splitlines()) == len(IDS) + 1
    assert len(terminal_table(rows).splitlines()) == len(IDS)


def test_the_sheet_of_a_table_has_what_the_table_can_answer(
    tmp_path: Path, public_data: Path
) -> None:
    path = next((public_data / "aiconfigurator").glob("a100*.parquet"))
    machine = known_machine("nvidia-a100-sxm-80gb")
    rows = [
        RuleResult(**row)
        for row in json.loads((ACCURACY / "rules-a100.json").read_text(encoding="utf-8"))
    ]
    assert len(sheet_data(rows, with_other_effects=True)) == 5
    (written,) = write_table_sheet(rows, machine, read_source(path, machine), tmp_path)
    drawn = written.with_suffix(".svg").read_text(encoding="utf-8")
    assert path.name in drawn
    # The effects of some of these rules are not gains from following their advice.
    assert "gain from following" not in drawn


def test_pairs_of_two_runs_are_never_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("analysis.rules.judge.calibrate", Uncalibrated)
    cases = alignment_cases()
    even = [c for c in cases if aligned_law(2.0)(c.problem) == aligned_law(1.0)(c.problem)]
    odd = [c for c in cases if c not in even]
    for place, some, slow in ((tmp_path, even, 1.0), (tmp_path / "rules", odd, 3.0)):
        record(place / H100.slug, some, [1e-4 * slow] * len(some))
    inputs = rule_inputs(H100.slug, tmp_path)
    assert len(inputs.recordings) == 2
    rows = {row.id: row for row in judge_inputs(inputs)}
    assert rows["align-gemm"].verdict == NOT_MEASURED


def test_a_users_verdicts_never_go_into_a_published_folder(tmp_path: Path) -> None:
    case = gemm_cases([(64, 64, 64)], "alignment")
    published = record(tmp_path / "published" / H100.slug, case, [1e-5])
    for_rules = record(tmp_path / "published" / "rules" / H100.slug, case, [1e-5])
    inputs = rule_inputs(H100.slug, tmp_path)
    assert [r.folder for r in inputs.recordings] == [for_rules, published]
    assert inputs.folder == published
    own_for_rules = record(tmp_path / "rules" / H100.slug, case, [1e-5])
    inputs = rule_inputs(H100.slug, tmp_path)
    assert [r.folder for r in inputs.recordings] == [own_for_rules]
    assert inputs.folder == tmp_path / H100.slug
    own = record(tmp_path / H100.slug, case, [1e-5])
    inputs = rule_inputs(H100.slug, tmp_path)
    assert [r.folder for r in inputs.recordings] == [own_for_rules, own]
    assert inputs.folder == own


def test_without_a_name_both_folders_are_those_of_the_machine_measured_last(tmp_path: Path) -> None:
    case = gemm_cases([(64, 64, 64)], "alignment")
    sweeps = record(tmp_path / H100.slug, case, [1e-5])
    other = record(tmp_path / A100.slug, case, [1e-5], machine=A100)
    for_rules = record(tmp_path / "rules" / H100.slug, case, [1e-5])
    measured_in_turn(sweeps, other, for_rules)
    inputs = rule_inputs(None, tmp_path)
    assert [recording.folder for recording in inputs.recordings] == [for_rules, sweeps]


def test_a_longer_slug_is_another_machine(tmp_path: Path) -> None:
    case = gemm_cases([(64, 64, 64)], "alignment")
    machine, longer = (replace(H100, slug=slug) for slug in ("nvidia-x9", "nvidia-x9-ti"))
    for_rules = record(tmp_path / "rules" / machine.slug, case, [1e-5], machine=machine)
    other = record(tmp_path / longer.slug, case, [1e-5], machine=longer)
    measured_in_turn(for_rules, other)
    inputs = rule_inputs("nvidia-x9", tmp_path)
    assert [recording.folder for recording in inputs.recordings] == [for_rules]


def test_a_later_import_does_not_replace_own_measurements(tmp_path: Path) -> None:
    case = gemm_cases([(64, 64, 64)], "alignment")
    for_rules = record(tmp_path / "rules" / H100.slug, case, [1e-5])
    imported = record(tmp_path / "public" / H100.slug, case, [1e-5])
    (imported / "validation.json").write_text("{}")
    measured_in_turn(for_rules, imported)
    inputs = rule_inputs(H100.slug, tmp_path)
    assert [recording.folder for recording in inputs.recordings] == [for_rules]


def test_the_caption_of_a_merged_recording_has_the_dates_of_its_runs(tmp_path: Path) -> None:
    case = gemm_cases([(64, 64, 64)], "alignment")
    days = ("2026-01-02", "2026-01-03")
    merged = [{"worker": "1/2", "run": f"{day}T03:04:05Z", "health": None} for day in days]
    record(tmp_path / H100.slug, case, [1e-5], merged=merged)
    inputs = rule_inputs(H100.slug, tmp_path)
    assert inputs.caption.endswith("measured 2026-01-02 and 2026-01-03")


def test_an_import_gives_only_bursts_of_libraries_with_their_cache(tmp_path: Path) -> None:
    (case,) = gemm_cases([(512, 512, 512)])
    cases = [
        case,
        replace(case, cache="warm"),
        replace(case, mode="sustained"),
        replace(case, implementation="triton-tiled"),
    ]
    recording = load(record(tmp_path, cases, [1e-5, 2e-5, 3e-5, 4e-5]))
    (tmp_path / "predicted.csv").write_text("time_us\n1\n2\n3\n4\n")
    imported = replace(recording, run={**recording.run, "public": {}})
    evidence = Evidence.from_recording(imported)
    found = [(case.cache, case.seconds) for case in evidence.cases]
    assert found == [("cold", pytest.approx(1e-5)), ("warm", pytest.approx(2e-5))]
    assert evidence.predicted == pytest.approx([1e-6, 2e-6])


def test_recordings_of_another_software_do_not_judge_with(tmp_path: Path) -> None:
    case = gemm_cases([(64, 64, 64)], "alignment")
    older = record(tmp_path / H100.slug, case, [1e-5], software={"torch": "2.12.0"})
    newer = record(tmp_path / "rules" / H100.slug, case, [1e-5])
    measured_in_turn(older, newer)
    inputs = rule_inputs(H100.slug, tmp_path)
    assert [recording.folder for recording in inputs.recordings] == [newer]
    assert inputs.folder == tmp_path / H100.slug


def test_speed_ups_come_before_more_pairs_of_speeds() -> None:
    """The run that measured fp32 judges a claim about speed-ups, although it has fewer pairs."""

    def run(dtypes: Sequence[str], widths: Sequence[int]) -> Evidence:
        seconds = {("bf16", 64): 1e-5, ("bf16", 1024): 2e-5, ("fp32", 64): 2e-5}
        cases = [
            TimedCase(Gemm(m, n, 4096, dtype), "cublas", "", "cold", "skinny",
                  seconds.get((dtype, m), 1.6e-4), 0.01)
            for dtype in dtypes for n in widths for m in (64, 1024)
        ]  # fmt: skip
        return Evidence(H100, cases, np.array([case.seconds for case in cases]))

    told, silent = run(["bf16", "fp32"], [4096]), run(["bf16"], [2048, 4096, 8192])
    (row,) = (r for r in judge_all([silent, told]) if r.id == "small-dim")
    assert (row.verdict, row.cases) == ("holds", 1)
    assert row.effect == pytest.approx(8 / 2)  # twice as fast with 64 rows, 8 times with 1024
    (row,) = (r for r in judge_all([silent]) if r.id == "small-dim")
    assert (row.cases, row.effect) == (3, pytest.approx(1024 / 64 / 2))
    assert "advertised 4" not in row.reason  # the source claims nothing about speeds


def test_a_gpu_is_not_told_that_it_needs_a_gpu(tmp_path: Path) -> None:
    row = next(r for r in plant(tmp_path, alignment_cases(), aligned_law(1.0), 0) if r.id == "wave")
    assert row.reason == "needs pairs of cases from the sweeps sources, steps: run `make rules`"


def test_a_run_that_planned_a_sweep_and_had_no_time_for_it_needs_more_budget(
    tmp_path: Path,
) -> None:
    plan = {"sweeps": ["sources", "square"], "cases": []}
    cases = gemm_cases([(512, 512, 512), (640, 640, 640)], "square")
    folder = record(tmp_path, cases, [1e-4, 2e-4], plan=plan)
    rows = {row.id: row for row in judge_all([Evidence.from_recording(load(folder))])}
    needs = "needs pairs of cases from the sweeps sources, steps: "
    assert rows["wave"].reason == f"{needs}run `make rules` with a larger budget"
    assert rows["nhwc"].reason.endswith(": run `make rules`")  # its sweep was not planned


def test_a_sweep_that_was_refused_needs_no_larger_budget() -> None:
    """An error once refused all layers on a GPU."""
    counts = {"open": 0, "measured": 0, "planned": 84}
    run = {
        "plan": {"sweeps": ["layers", "lstm", "square"], "left_out": {"lstm": 5}},
        "sweeps": {"layers": counts, "lstm": counts, "square": {**counts, "open": 3}},
    }
    assert _cut_short(run) == {"lstm", "square"}


def test_a_stranger_s_slug_makes_nothing_be_written_elsewhere(tmp_path: Path) -> None:
    results = tmp_path / "deep" / "results"
    evil = replace(H100, slug="../../escaped")
    record(results / "evil", gemm_cases([(512, 512, 512)]), [1e-4], machine=evil)
    with pytest.raises(UserError, match="is not a valid machine name"):
        rule_inputs(None, results)
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]


def test_without_results_it_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="run `make rules` first"):
        rule_inputs(None, tmp_path)
    with pytest.raises(UserError, match="of machine 'nvidia-b200'"):
        rule_inputs("nvidia-b200", tmp_path)


def test_the_sheet_has_eight_certain_pieces_of_advice_the_largest_first() -> None:
    def row(name: str, effect: float, width: float) -> RuleResult:
        return RuleResult(
            name, "s", "s", "holds", effect, effect / width, effect * width, None, 9, ""
        )

    advice = [name for name, rule in all_rules().items() if rule.worth]
    rows = [row(name, 1.1 + 0.1 * i, 1.02) for i, name in enumerate(advice[:10])]
    rows += [row(advice[10], 9.0, 20.0), row("dense-conv", 50.0, 1.1)]
    data = sheet_data(rows)
    assert len(data) == 8
    assert list(data["effect"]) == sorted(data["effect"], reverse=True)
    assert not set(data["id"]) & {advice[10], "dense-conv"}


def test_the_sheet_says_what_to_do_and_where_not_to() -> None:
    assert all(rule.do[0].isupper() and rule.do[-1] != "." for rule in all_rules().values())
    assert what_to_do({"id": "nhwc", "effect": 1.2}) == "Use channels-last (NHWC)"
    assert what_to_do({"id": "nhwc", "effect": 0.8}) == "Not here: use channels-last (NHWC)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("table", "slug"),
    [
        ("h100_sxm-trtllm-1.3.0rc20", "nvidia-h100-sxm"),
        ("a100_sxm-sglang-0.5.10", "nvidia-a100-sxm-80gb"),
    ],
)
def test_public_tables_answer_the_rules_that_they_can(
    public_data: Path, table: str, slug: str
) -> None:
    machine = known_machine(slug)
    source = read_source(public_data / "aiconfigurator" / f"{table}.parquet", machine)
    rows = {r.id: r for r in judge_all([Evidence.from_public(source, Model(machine))])}
    recorded = ACCURACY / f"rules-{slug.split('-')[1]}.json"
    for before in json.loads(recorded.read_text(encoding="utf-8")):
        now = rows[before["id"]]
        assert (now.verdict, now.cases) == (before["verdict"], before["cases"])
        assert now.effect == pytest.approx(before["effect"])
    answered = {name for name, row in rows.items() if row.verdict != NOT_MEASURED}
    assert answered == {"wave", "tile", "bigger", "batch-intensity", "small-dim"}
    assert all(rows[name].cases > 1000 for name in answered)
    assert rows["bigger"].verdict == "holds"
    assert rows["batch-intensity"].verdict == "holds"


@pytest.mark.parametrize("text", [None, "{", '[{"id": "wave"}]', "[1]"])
def test_damaged_verdicts_of_an_import_say_what_to_do(tmp_path: Path, text: str | None) -> None:
    cases = gemm_cases([(64, 64, 64)])
    folder = record(tmp_path / "public" / H100.slug, cases, [1e-6])
    (folder / "validation.json").write_text("{}")
    if text is not None:
        (folder / "rules.json").write_text(text)
    with pytest.raises(
        UserError,
        match=r"rules\.json cannot be read\. Move .* away; then run `python -m analysis imp",
    ):
        imported_rules(tmp_path)


def test_a_run_without_a_list_of_planned_sweeps_is_judged(tmp_path: Path) -> None:
    plan: dict[str, Any] = {"cases": []}  # run.json may lack the list
    cases = gemm_cases([(64, 64, 64)])
    evidence = Evidence.from_recording(load(record(tmp_path, cases, [1e-6], plan=plan)))
    assert not evidence.planned


def test_sweeps_of_an_unusable_run_are_reported_as_measured() -> None:
    """An earlier report said that no rule was measured, although 272 cases were measured."""
    measured = frozenset(next(rule.sweeps for rule in all_rules().values() if rule.sweeps))
    rows = judge_all([replace(Evidence.none(H100), unusable=measured)])
    in_vain = [row for row in rows if row.unusable]
    assert in_vain
    assert {row.verdict for row in rows} == {"not measured here"}
    assert counts_sentence(rows).endswith(
        f"{len(in_vain)} more were measured only by an unusable run."
    )
    assert terminal_table(rows).count("measured, but unusable: run ") == len(in_vain)
