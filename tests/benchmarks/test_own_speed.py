"""``make bench``: how fast our own code is. Prints rates; asserts none of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from analysis.model.predict import Model
from analysis.model.query import Query
from analysis.recordings.load import load
from kernels.machine import known_machine
from kernels.problem import Gemm, Problem
from kernels.registry import library_for
from kernels.timemodel.constants import default_constants
from kernels.timemodel.estimate import Shapes, Tiles, fastest
from sweeps.cases.expand import expand
from sweeps.cases.spec import all_sweeps
from sweeps.measuring.rounds import Rounds
from tests.support.fakes import FakeBench, planned
from tests.support.synthetic import gemm_cases, model_law, problems, random_sizes, record

pytestmark = pytest.mark.slow

H100 = known_machine("nvidia-h100-sxm")
SHAPES = 100_000


def say_rate(benchmark: Any, capsys: Any, count: int, what: str) -> None:
    """Print a rate; nothing where benchmarks are disabled and only run once."""
    if benchmark.stats is not None:
        with capsys.disabled():
            print(f"\n  {count / benchmark.stats['median']:,.0f} {what} a second")


def test_sweeps_expanded(benchmark: Any, capsys: Any) -> None:
    def everything() -> int:
        sweeps = all_sweeps().values()
        return sum(len(expand(s, H100, library_for, lambda *a: [""])) for s in sweeps)

    count = benchmark(everything)
    say_rate(benchmark, capsys, count, "cases expanded")


def test_shapes_predicted(benchmark: Any, capsys: Any) -> None:
    """The physics alone: shapes as arrays, the fastest of the library's tiles for each."""
    sizes = random_sizes(SHAPES)
    shapes = Shapes.from_problems([Gemm(m, n, k, "bf16") for m, n, k in sizes])
    tiles, constants = Tiles.library(H100, "bf16"), default_constants("hopper", "bf16")
    benchmark(fastest, shapes, tiles, H100, H100.peak("bf16"), constants)
    say_rate(benchmark, capsys, SHAPES, "shapes predicted")


def test_problems_predicted_with_intervals(benchmark: Any, capsys: Any) -> None:
    """From problem objects to a table of times, intervals and limits."""
    problems: list[Problem] = [Gemm(m, n, k, "bf16") for m, n, k in random_sizes(20_000)]
    model = Model(H100)
    benchmark(lambda: model.predict(Query.plain(problems, "cublas")).frame())
    say_rate(benchmark, capsys, len(problems), "problems into a table")


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cases = gemm_cases(dict.fromkeys(random_sizes(50_000)))
    times = model_law()(problems(cases))
    return record(tmp_path_factory.mktemp("bench") / "nvidia-h100-sxm", cases, times)


def test_rows_loaded(benchmark: Any, capsys: Any, table: Path) -> None:
    count = len(load(table).rows)
    benchmark(load, table)
    say_rate(benchmark, capsys, count, "rows loaded")


def test_harness_overhead(benchmark: Any, capsys: Any) -> None:
    """The loop with launches that take no time: what it adds to each sample."""
    cases = planned(200)

    def loop() -> int:
        events: list[Any] = []
        bench = FakeBench([entry.case for entry in cases])
        Rounds(cases, {}, bench, "1/1", 1e9, 0.0, events.append, lambda case, seconds: None).run()
        return len(events)

    count = benchmark(loop)
    say_rate(benchmark, capsys, count, "samples through the loop")
