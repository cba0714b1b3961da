"""Check which sizes are measured for advice, which are confirmed, and what the table then says."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis.advice.findings import findings, findings_lines
from analysis.advice.measurements import Measurements, read_measurements
from analysis.advice.options import Question
from analysis.advice.recommend import Advice, advise
from analysis.advice.table import build_table, open_trials
from analysis.advice.times import times_of
from analysis.advice.trials import Trial, affordable, pairs_to_confirm, trial_of
from analysis.advice.verdict import CONFIRMED, DO_IT, LEAVE_IT, LIKELY
from analysis.model.basis import find_basis
from analysis.model.fitted import analyse
from analysis.model.predict import Model
from analysis.recordings.confirmed import Pair, confirmed_pairs
from analysis.recordings.load import load
from analysis.recordings.repetition import MeasuredTime
from kernels.common.errors import UserError
from kernels.machine import cpu_machine
from kernels.problem import Conv, Gemm, Problem
from sweeps.cases.case import CONFIRM, Case, Contender
from sweeps.folding.history import BLOCKS, PROCESSES
from sweeps.store import write_confirmed
from tests.support.synthetic import H100, problems, record

ODD = Gemm(1024, 1021, 1024, "bf16")
ROUND = replace(ODD, n=1024)
LARGER = replace(ODD, n=1088)
MODEL = Model(H100)


def pair(
    before: Contender, after: Contender, ratio: float, noise: float = 0.005, seed: int = 0
) -> Pair:
    """Return a pair with a known ratio of times, and with noise on every block."""
    rng = np.random.default_rng(seed)
    blocks = math.log(ratio) + noise * rng.standard_normal((PROCESSES, BLOCKS))
    return Pair(before, after, tuple(map(tuple, blocks.tolist())), 0.001)


def cublas(problem: Problem) -> Contender:
    return problem, "cublas"


def known(times: dict[Contender, float], *pairs: Pair) -> Measurements:
    by_problem: dict[Problem, dict[str, MeasuredTime]] = {}
    for (problem, name), seconds in times.items():
        time = MeasuredTime(seconds, 0.98 * seconds, 1.02 * seconds)
        by_problem.setdefault(problem, {})[name] = time
    return Measurements(by_problem, pairs=pairs)


def test_the_best_candidates_are_tried_and_what_is_known_is_not() -> None:
    trial = trial_of(ODD, MODEL, Measurements({}), "cublas", Question(), 2, ["triton-tiled"])
    assert trial is not None
    assert trial.contenders[0] == cublas(ODD)
    assert len(trial.candidates) == 2
    assert ROUND in trial.candidates
    assert trial.contenders[-1] == (ODD, "triton-tiled")
    assert trial.promise > 0
    confirmed = known({}, pair(cublas(ODD), cublas(ROUND), 1.2))
    near = known({cublas(ROUND): 1e-5}, pair(cublas(ODD), cublas(ROUND), 1.2))
    assert confirmed.confirmed(ODD, ROUND, "pad") is not None
    assert trial_of(ODD, MODEL, near, "cublas", Question(), 2) is None


def test_the_best_measured_neighbours_are_tried_whatever_the_model_thinks() -> None:
    far = replace(ODD, m=1056, k=1088)
    measured = known({cublas(ODD): 1.5e-5, cublas(far): 1.0e-5})
    trial = trial_of(ODD, MODEL, measured, "cublas", Question(), 1)
    assert trial is not None
    assert far in trial.candidates


def test_what_was_best_among_the_samples_is_confirmed_if_it_is_worth_it() -> None:
    trial = Trial(ODD, "cublas", Question(), (ROUND, LARGER), ("triton-tiled",))
    times = {cublas(ODD): 1.2e-5, cublas(ROUND): 1.0e-5, cublas(LARGER): 1.1e-5}
    chosen = list(pairs_to_confirm([trial, trial], known(times)))
    assert chosen == [(cublas(ODD), cublas(ROUND))]  # once
    other = {**times, (ODD, "triton-tiled"): 1.1e-5}
    both = list(pairs_to_confirm([trial], known(other)))
    assert both == [(cublas(ODD), cublas(ROUND)), (cublas(ODD), (ODD, "triton-tiled"))]
    slower = {cublas(ODD): 1.0e-5, cublas(ROUND): 1.0e-5}
    assert not list(pairs_to_confirm([trial], known(slower)))


def test_a_budget_is_spent_on_what_promises_most() -> None:
    trials = [
        Trial(replace(ODD, m=m), "cublas", Question(), (replace(ROUND, m=m),), promise=m / 1e4)
        for m in (100, 300, 200)
    ]
    seconds = {contender: (1.0, 2.0) for trial in trials for contender in trial.contenders}
    assert [t.problem.m for t in affordable(trials, seconds, 12.0)] == [300, 200]  # type: ignore[union-attr]
    assert affordable(trials, seconds, 5.9) == []


def test_a_confirmed_gain_is_done_and_a_refuted_one_is_not() -> None:
    sure = known({}, pair(cublas(ODD), cublas(ROUND), 1.2))
    times = known({cublas(ROUND): 1e-5}, pair(cublas(ODD), cublas(ROUND), 1.2))
    answer = advise(ODD, MODEL, times, "cublas")
    assert (answer.verdict, answer.evidence, answer.instead) == (DO_IT, CONFIRMED, ROUND)
    assert answer.gain.lo < 0.2 < answer.gain.hi
    assert answer.gain.value == pytest.approx(0.2, abs=0.01)
    assert sure.confirmed(ROUND, ODD, "pad") is None
    # Neither the second best of the samples nor an untried size is recommended instead.
    refuted = known({cublas(ODD): 1.2e-5, cublas(LARGER): 1.1e-5, cublas(ROUND): 1e-5},
                    pair(cublas(ODD), cublas(ROUND), 1.0))  # fmt: skip
    answer = advise(ODD, MODEL, refuted, "cublas")
    assert answer.verdict == LEAVE_IT
    assert trial_of(ODD, MODEL, refuted, "cublas", Question(), 2) is None


def test_another_implementation_may_be_the_answer() -> None:
    faster = pair(cublas(ODD), (ODD, "triton-splitk"), 1.3)
    answer = advise(ODD, MODEL, known({}, faster), "cublas", Question("pad", 0.0))
    assert (answer.verdict, answer.instead, answer.change) == (DO_IT, ODD, "")
    assert answer.implementation == "triton-splitk"
    assert "triton-splitk is faster than cublas" in answer.reason
    # A gain of 30% by another implementation is better than one of 10% by padding.
    padded = known({cublas(ROUND): 1e-5}, faster, pair(cublas(ODD), cublas(ROUND), 1.1))
    assert advise(ODD, MODEL, padded, "cublas").implementation == "triton-splitk"
    less = known({cublas(ROUND): 1e-5}, faster, pair(cublas(ODD), cublas(ROUND), 1.6))
    assert advise(ODD, MODEL, less, "cublas").instead == ROUND
    slower = pair(cublas(ODD), (ODD, "triton-splitk"), 0.9)
    left = advise(ODD, MODEL, known({}, slower), "cublas", Question("pad", 0.0))
    assert left.verdict == LEAVE_IT


def test_a_certain_implementation_is_better_than_a_faster_uncertain_one() -> None:
    measured = known({})
    measured._other_implementations[ODD, "cublas"] = [
        ("triton-streamk", (1.3, 0.5, 2.2)),
        ("triton-splitk", (1.1, 1.05, 1.15)),
    ]
    answer = advise(ODD, MODEL, measured, "cublas", Question("pad", 0.0))
    assert (answer.verdict, answer.implementation) == (DO_IT, "triton-splitk")


def recorded(folder: Path, pairs: list[tuple[Gemm, Gemm, float]]) -> Path:
    """Write a recording with confirmed pairs, whose true ratios are given."""
    sizes = [(512, n, 512) for n in (512, 1000, 1001, 1008, 1024)]
    shapes = [Gemm(*size, "bf16") for size in sizes]
    asked = [Case(CONFIRM, shape, "cublas") for shape in dict.fromkeys(
        shape for before, after, _ in pairs for shape in (before, after))]  # fmt: skip
    cases = [*(Case("made-up", shape, "cublas") for shape in shapes), *asked]
    seconds = [3e-5 if problem.n % 8 else 2e-5 for problem in problems(cases)]
    plan: dict[str, Any] = {
        "budget_s": 600.0, "shards": 1, "sweeps": [], "left_out": {},
        "cases": [{"id": case.id, **case.columns(), "expected_s": 1.0} for case in cases],
    }  # fmt: skip
    record(folder, cases, seconds, plan=plan,
           repeats={"cases": 24, "ratio": 1.0, "between": 0.2, "between_cases": 0.002})  # fmt: skip
    rng = np.random.default_rng(0)
    write_confirmed(folder, [
        {"case": Case(CONFIRM, before, "cublas").id, "against": Case(CONFIRM, after, "cublas").id,
         "process": process, "worker": "1/1",
         "log_ratios": " ".join(str(math.log(ratio) + 0.01 * rng.standard_normal())
                                for _ in range(BLOCKS))}
        for before, after, ratio in pairs for process in (1, 2)
    ])  # fmt: skip
    return folder


def test_the_table_rests_on_what_was_confirmed(tmp_path: Path) -> None:
    odd, even = Gemm(512, 1001, 512, "bf16"), Gemm(512, 1008, 512, "bf16")
    analysis = analyse(load(recorded(tmp_path, [(odd, even, 1.5)])))
    (found,) = confirmed_pairs(analysis.recording)
    assert (found.before, found.after) == (cublas(odd), cublas(even))
    assert found.between < 0.01  # an error that all cases of a process share does not count
    advice = build_table(analysis)
    assert len(advice) == 10  # problems that only confirm advice are not answered
    sure = [answer for answer in advice if answer.verdict == DO_IT]
    assert {answer.problem for answer in sure} == {odd}
    assert sure[0].gain.value == pytest.approx(0.5, abs=0.03)
    # The answer for this problem is known, so no trial is proposed for it.
    assert odd not in {t.problem for t in open_trials(analysis, 2) if t.question.kind == "pad"}


def test_a_damaged_file_gets_a_sentence(tmp_path: Path) -> None:
    odd, even = Gemm(512, 1001, 512, "bf16"), Gemm(512, 1008, 512, "bf16")
    recording = load(recorded(tmp_path, [(odd, even, 1.5)]))
    path = tmp_path / "confirmed.csv"
    whole = path.read_text("utf-8")
    for text in ("case,against\n", whole.replace("1/1", "1/1,x"), "\0"):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(UserError, match="confirmed.csv .*Move the file away; then run"):
            read_measurements(recording.products, recording)


def test_what_one_process_alone_found_is_no_claim(tmp_path: Path) -> None:
    """A pair has only one process if the line of the other one is damaged."""
    odd, even = Gemm(512, 1001, 512, "bf16"), Gemm(512, 1008, 512, "bf16")
    recording = load(recorded(tmp_path, [(odd, even, 1.5)]))
    assert confirmed_pairs(recording)
    path = tmp_path / "confirmed.csv"
    lines = path.read_text("utf-8").splitlines()
    path.write_text("\n".join([*lines[:-1], lines[-1].rsplit(" ", 3)[0], ""]), encoding="utf-8")
    assert not confirmed_pairs(recording)


def answer(problem: Gemm, instead: Gemm, gain: float, verdict: str = LIKELY) -> Advice:
    extra = instead.flops / problem.flops - 1
    return Advice(problem, instead, "pad", verdict, "predicted", "mkl", gain, gain - 0.01,
                  gain + 0.01, None, None, None, extra, extra, "because")  # fmt: skip


def test_shapes_that_share_a_reason_are_one_finding() -> None:
    advice = [
        answer(Gemm(m, n - 1, 64, "fp32"), Gemm(m, n, 64, "fp32"), 0.04 + m / 1e4)
        for m in (100, 200, 400) for n in (48, 96)
    ]  # fmt: skip
    one = answer(Gemm(64, 64, 65, "fp32"), Gemm(64, 64, 72, "fp32"), 0.5, DO_IT)
    left = answer(Gemm(9, 9, 9, "fp32"), Gemm(9, 9, 9, "fp32"), 0.0, LEAVE_IT)
    found = findings([*advice, one, left])
    assert [len(finding.advice) for finding in found] == [1, 6]  # *do it* comes first
    text = found[1].text()
    assert text.startswith("**likely** when padding in fp32: make N a multiple of 8 to align")
    assert "The gain is 5–8% for up to " in text
    assert "The gain is 50% for 10.8% more FLOPs (64×" in found[0].text()
    assert "6 shapes, such as 400×" in text
    lines = findings_lines([*advice, one, left])
    assert lines[-2:] == [
        "- **leave it** is the answer to 1 of 8 queries:",
        "  - because (1 query)",
    ]


def test_a_finding_names_a_multiple_that_its_example_has() -> None:
    image = Conv.parse("32,3,224,224,64,7,7,2,3,1,1,bf16")
    advice = replace(answer(ODD, ROUND, 0.3), problem=image, instead=replace(image, c=4))
    (finding,) = findings([advice])
    assert "in bf16: make C a multiple of 4 to align rows" in finding.text()


def test_only_dimensions_of_stored_rows_are_called_misaligned() -> None:
    """In the layout nt, rows of A and B have K elements, and rows of C have N."""
    advice = answer(Gemm(101, 101, 64, "bf16"), Gemm(100, 112, 64, "bf16"), 0.1)
    (finding,) = findings([advice])
    assert "in bf16: make N a multiple of 8 to align rows" in finding.text()


def test_channels_are_aligned_in_each_group() -> None:
    grouped = Conv.parse("32,120,28,28,128,3,3,1,1,1,2,bf16")
    advice = replace(answer(ODD, ROUND, 0.3), problem=grouped, instead=replace(grouped, c=128))
    (finding,) = findings([advice])
    assert "in bf16: make C a multiple of 16 to align rows" in finding.text()


def test_a_finding_says_which_query_it_answers() -> None:
    padded = answer(Gemm(65, 64, 64, "fp32"), Gemm(72, 64, 64, "fp32"), 0.1)
    pad, choose = findings([padded, replace(padded, question="choose")])
    assert pad.text().startswith("**likely** when padding in fp32: change M ")
    assert choose.text().startswith("**likely** when choosing freely in fp32: change M ")


def test_equal_gains_are_written_once() -> None:
    advice = [answer(Gemm(65, n, 64, "fp32"), Gemm(72, n, 64, "fp32"), 0.1) for n in (64, 128)]
    (finding,) = findings(advice)
    assert "The gain is 10% for " in finding.text()


def test_at_most_ten_findings_open_the_page() -> None:
    advice = [
        answer(Gemm(65, 64, 64, dtype), Gemm(72, 64, 64, dtype), 0.1, verdict)
        for dtype in ("fp32", "bf16", "fp16", "tf32") for verdict in (DO_IT, LIKELY)
    ] + [
        answer(Gemm(64, 65, 65, dtype), Gemm(64, 72, 72, dtype), 0.1, verdict)
        for dtype in ("fp32", "bf16", "fp16", "tf32") for verdict in (DO_IT, LIKELY)
    ]  # fmt: skip
    lines = findings_lines(advice)
    assert len(lines) == 12
    assert lines[10] == "- 6 more findings are in the tables below."


def test_a_measured_question_does_not_take_a_better_models_place(tmp_path: Path) -> None:
    """A few measured rows only answer queries about themselves; other queries use constants."""
    cases = [Case(CONFIRM, shape, "cublas") for shape in (ODD, ROUND)]
    plan = {"budget_s": 10.0, "shards": 1, "sweeps": [CONFIRM], "left_out": {}, "cases": []}
    record(tmp_path / H100.slug, cases, [2e-5, 1e-5], plan=plan)
    basis = find_basis(H100.slug, tmp_path)
    assert basis.kind == find_basis(H100.slug, tmp_path / "nothing").kind == "shipped"
    known, other = times_of([ROUND, Gemm(4096, 4096, 4096, "bf16")], basis)
    assert (known["evidence"], known["basis"], known["time_us"]) == ("measured", "recorded", 10.0)
    assert known["source"].startswith("measured ")
    assert (other["evidence"], other["basis"]) == ("predicted", "shipped")


def test_an_unknown_size_of_memory_is_not_too_small(tmp_path: Path) -> None:
    basis = find_basis(H100.slug, tmp_path)
    huge = Gemm(2**20, 2**20, 2**10, "bf16")
    assert "the machine has" in times_of([huge], basis)[0]["explanation"]
    machine = replace(basis.model.machine, memory_bytes=0)
    unknown = replace(basis, model=replace(basis.model, machine=machine))
    assert "the machine has" not in times_of([huge], unknown)[0]["explanation"]


def test_misaligned_rows_are_explained_where_kernels_depend_on_them(tmp_path: Path) -> None:
    def remark(machine: str, *problems: Problem) -> list[bool]:
        rows = times_of(problems, find_basis(machine, tmp_path))
        return ["Rows begin at multiples of" in row["explanation"] for row in rows]

    sizes = (4096, 4097)
    for dtype, expected in (("bf16", [False, True]), ("fp32", [False, False])):
        gemms = [Gemm(4096, n, 4096, dtype) for n in sizes]
        assert remark("nvidia-h100-sxm", *gemms) == expected
    for dtype, words in (
        ("tf32", "multiples of 4 bytes, but"),
        ("fp8", "multiples of 1 byte, but"),
    ):
        problem = Gemm(4096, 4097, 4097, dtype)
        (row,) = times_of([problem], find_basis("nvidia-h100-sxm", tmp_path))
        assert words in row["explanation"]
    # A library pads the channels of a convolution, and a CPU has no kernels for alignments.
    conv = Conv.parse("32,63,28,28,63,3,3,1,1,1,1,bf16")
    assert remark("nvidia-h100-sxm", conv) == [False]
    cpu = cpu_machine({"fp32": 1e11, "bf16": 2e11}, 3e10, 2)
    cases = [Case("gemm", Gemm(512, 512, 512, "bf16"), "onednn")]
    record(tmp_path / cpu.slug, cases, [1e-3], machine=cpu)
    assert remark(cpu.slug, Gemm(512, 513, 512, "bf16")) == [False]
