"""Test public tables as priors, on simulated machines whose true times are known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.imports.tables import read_table
from analysis.imports.writing import write_collections
from analysis.model.calibrate import calibrate_query
from analysis.model.corrected import corrected_estimate
from analysis.model.features import Inputs
from analysis.model.fitted import analyse, write_predictions
from analysis.model.fitting import fit_collection, fit_group, unmeasured
from analysis.model.nearby import Collection, priors_for, sizes_of
from analysis.model.offsets import _KINDS, CollectionEstimates, CollectionTrees, Offsets
from analysis.model.predict import Model, model_from_json
from analysis.model.prior import Prior, prior_from_tables
from analysis.model.query import Query
from analysis.model.residual import fit_residual
from analysis.recordings.load import load
from kernels.machine import Machine, known_machine
from kernels.problem import Gemm
from kernels.timemodel.constants import default_constants, scaled_constants
from kernels.timemodel.estimate import LIMITS
from sweeps.cases.case import Case
from tests.support.synthetic import H100, model_law, random_sizes, record

START = default_constants("hopper", "bf16")


def shapes(count: int, seed: int) -> list[Gemm]:
    return [Gemm(m, n, k, "bf16") for m, n, k in random_sizes(count, seed)]


def jumps(gemms: list[Gemm]) -> np.ndarray:
    """Log factors of the times by the library's choice of kernels, which no constant explains."""
    sizes = np.log2(sizes_of(gemms))
    return 0.15 * np.sign(np.sin(1.7 * sizes[:, 0])) + 0.1 * np.sign(np.cos(2.3 * sizes[:, 1]))


def truth(gemms: list[Gemm], scale: float = 1.0, seed: int = 0) -> np.ndarray:
    noise = 0.01 * np.random.default_rng(seed).standard_normal(len(gemms))
    return model_law()(gemms) * scale * np.exp(jumps(gemms) + noise)


@pytest.fixture(scope="module")
def prior() -> CollectionTrees:
    theirs = shapes(1500, 1)
    return fit_collection(H100, "SGLang 1", theirs, truth(theirs))


@pytest.fixture(scope="module")
def nonsense() -> CollectionTrees:
    theirs = shapes(600, 2)
    wild = model_law()(theirs) * np.exp(0.5 * np.random.default_rng(3).standard_normal(600))
    return fit_collection(H100, "wild", theirs, wild)


GROUP = "cublas gemm bf16"


def prior_on(*collections: CollectionTrees, machine: Machine = H100) -> Prior:
    """Build a prior from some collections, with random shapes as the query."""
    asked = Query.plain(shapes(100, 99), "cublas", warm=True)
    return prior_from_tables(machine, "bf16", collections, asked)


def mean_error(model_time: np.ndarray, seconds: np.ndarray) -> float:
    return float(np.mean(np.abs(model_time / seconds - 1)))


@pytest.mark.slow
def test_a_few_rows_on_top_of_a_collection_are_worth_many(prior: CollectionTrees) -> None:
    own, asked = shapes(96, 5), shapes(800, 6)
    query, wanted = (Query.plain(gemms, "cublas", warm=True) for gemms in (own, asked))
    seconds, true = truth(own, 1.2, 7), truth(asked, 1.2, 8)
    alone = calibrate_query(H100, query, seconds, priors={GROUP: Prior.bare(START)})
    helped = calibrate_query(H100, query, seconds, priors={GROUP: prior_on(prior)})
    (fit,) = helped.model.fits.values()
    assert fit.offsets is not None
    assert fit.offsets.weights[0] == pytest.approx((1, 1, 1), abs=0.2)
    errors = [mean_error(c.model.predict(wanted).estimate.time, true) for c in (alone, helped)]
    assert errors[1] < 0.6 * errors[0]
    found = helped.model.predict(wanted)
    assert 0.8 < np.mean((found.lo <= true) & (true <= found.hi)) <= 1


@pytest.mark.long
def test_a_collection_that_says_nothing_is_left_out(
    prior: CollectionTrees, nonsense: CollectionTrees
) -> None:
    own = shapes(200, 9)
    query, seconds = Query.plain(own, "cublas", warm=True), truth(own, 1.0, 10)
    both = prior_on(prior, nonsense)
    together = calibrate_query(H100, query, seconds, priors={GROUP: both})
    (fit,) = together.model.fits.values()
    assert fit.offsets is not None
    assert fit.offsets.source == "SGLang 1 of nvidia-h100-sxm and wild of nvidia-h100-sxm"
    assert np.abs(fit.offsets.weights[1]).max() < 0.3
    # The collection of random times comes first here, so it would answer before any measurement.
    wild = prior_on(nonsense, prior)
    (fit,) = calibrate_query(H100, query, seconds, priors={GROUP: wild}).model.fits.values()
    assert fit.offsets is not None
    assert np.abs(fit.offsets.weights[0]).max() < 0.3
    # A group without an entry in ``priors`` uses no collection.
    halves = [replace(gemm, dtype="fp32") for gemm in own]
    other = calibrate_query(H100, Query.plain(halves, "cublas"), seconds, priors={GROUP: both})
    assert all(fit.offsets is None for fit in other.model.fits.values())


@pytest.mark.slow
def test_a_collection_may_tell_of_one_kind_of_limit_alone(prior: CollectionTrees) -> None:
    theirs, own = shapes(1500, 21), shapes(400, 22)

    def fixed(gemms: list[Gemm]) -> np.ndarray:
        """Return the weight of the launch among the kinds of limits of each GEMM."""
        query = Query.plain(gemms, "cublas", warm=True)
        return CollectionEstimates.from_trees((prior,), Inputs.from_query(H100, query)).shares[:, 0]

    # The collection has the jumps where launches limit the time, and the opposite elsewhere.
    times = truth(theirs) * np.exp((2 * fixed(theirs) - 2) * jumps(theirs))
    half = fit_collection(H100, "half", theirs, times)
    fitted = fit_group(
        H100, Query.plain(own, "cublas", warm=True), truth(own, 1.0, 23), np.full(len(own), ""),
        prior_on(half),
    )  # fmt: skip
    assert fitted.offsets is not None
    ((launch, sm, _),) = fitted.offsets.weights
    assert launch > 0.5
    assert sm < 0


def test_without_a_row_the_first_collection_answers(
    prior: CollectionTrees, nonsense: CollectionTrees
) -> None:
    asked = shapes(300, 11)
    fitted = unmeasured(prior_on(prior, nonsense))
    assert fitted.offsets is not None
    assert fitted.offsets.weights == ((1, 1, 1), (0, 0, 0))
    assert fitted.constants == scaled_constants(prior.constants, H100, H100, "bf16")
    nothing = Query.plain([], "cublas"), np.empty(0), np.empty(0)
    assert fit_group(H100, *nothing, prior_on(prior)) == unmeasured(prior_on(prior))
    said, deviation = prior.log_ratios(asked)
    assert np.corrcoef(said, jumps(asked))[0, 1] > 0.5
    # Where the trees disagree, their errors and the spread are larger.
    off = np.abs(said - jumps(asked))
    inputs = Inputs.from_query(H100, Query.plain(asked, "cublas", warm=True))
    wide = fitted.offsets.spread(fitted.offsets.estimates(inputs))
    np.testing.assert_allclose(wide, np.hypot(1, deviation / 0.02))
    assert wide.min() >= 1
    assert off[wide > np.median(wide)].mean() > off[wide <= np.median(wide)].mean()


def test_without_a_row_or_a_table_of_the_machine_siblings_answer_together(
    prior: CollectionTrees, nonsense: CollectionTrees
) -> None:
    h200, other = (
        known_machine("nvidia-h200"),
        replace(nonsense, machine=known_machine("nvidia-h20")),
    )
    asked = Inputs.from_query(h200, Query.plain(shapes(50, 24), "cublas", warm=True))
    fitted = unmeasured(prior_on(prior, replace(prior, source="x"), other, machine=h200))
    assert fitted.offsets is not None
    assert [w[0] for w in fitted.offsets.weights] == [0.5, 0, 0.5]
    assert fitted.offsets.source == "public tables: 2 of nvidia-h100-sxm, 1 of nvidia-h20"
    # The time is the geometric mean of those of the first collection of each sibling.
    each = [unmeasured(prior_on(one, machine=h200)) for one in (prior, other)]
    times = [corrected_estimate(asked, *one)[0].time for one in each]
    np.testing.assert_allclose(
        corrected_estimate(asked, *fitted)[0].time, np.sqrt(times[0] * times[1])
    )


def test_one_row_hardly_moves_a_prior_and_a_slower_machine_is_first_slower_throughout(
    prior: CollectionTrees,
) -> None:
    """All times are 30% longer than in the table; five rows are enough to learn most of that."""
    own, asked = shapes(40, 31), shapes(400, 32)
    wanted = Query.plain(asked, "cublas", warm=True)
    seconds, true = truth(own, 1.3, 33), truth(asked, 1.3, 34)
    start = prior_on(prior)
    errors, widths = [], []
    for count in (0, 1, 5, 40):
        query = Query.plain(own[:count], "cublas", warm=True)
        model = Model(H100, {GROUP: start.fit})
        if count:
            model = calibrate_query(H100, query, seconds[:count], priors={GROUP: start}).model
        found = model.predict(wanted)
        errors.append(mean_error(found.estimate.time, true))
        widths.append(float(np.median(found.hi / found.lo)))
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 0.2
    assert errors[2] < 0.12
    assert widths[3] < 0.7 * widths[1]


def test_a_siblings_collection_is_scaled_by_the_datasheets(prior: CollectionTrees) -> None:
    h200 = known_machine("nvidia-h200")
    start = prior_on(prior, machine=h200).fit.constants
    assert start.launch == prior.constants.launch  # equal in a generation
    assert start.feed == pytest.approx(prior.constants.feed)  # both have the same chip
    a100 = prior_on(prior, machine=known_machine("nvidia-a100-sxm-80gb")).fit.constants
    assert a100.feed < 0.6 * prior.constants.feed


def test_offsets_survive_calibration_json(prior: CollectionTrees) -> None:
    own, asked = shapes(96, 12), shapes(50, 13)
    found = calibrate_query(
        H100, Query.plain(own, "cublas", warm=True), truth(own), priors={GROUP: prior_on(prior)}
    ).model  # fmt: skip
    read = model_from_json(H100, json.loads(json.dumps(
        {"groups": {name: fit.to_json() for name, fit in found.fits.items()}}
    )))  # fmt: skip
    query = Query.plain(asked, "cublas", warm=True)
    np.testing.assert_allclose(read.predict(query).lo, found.predict(query).lo)
    (fit,) = found.fits.values()
    assert fit.offsets is not None
    damaged = fit.offsets.to_json()
    (collection,) = damaged["collections"]
    spoiled: list[dict[str, Any]] = [
        {**damaged, "weights": []}, {**damaged, "weights": [["x"] * 3]}, {"weights": [[1.0] * 3]},
        {**damaged, "weights": [[1.0]]}, {"weights": [], "collections": []},
        {**damaged, "collections": [{**collection, "trees": {}}]},
        {**damaged, "collections": [{**collection, "machine": {}}]},
    ]  # fmt: skip
    for spoil in spoiled:
        with pytest.raises((ValueError, KeyError)):
            Offsets.from_json(spoil)


def test_trees_on_noise_are_shrunk_to_little() -> None:
    rng = np.random.default_rng(0)
    features, noise = rng.standard_normal((200, 6)), 0.05 * rng.standard_normal(200)
    found = fit_residual(features, noise, shrunk=True)
    said = 0.0 if found is None else float(np.std(found.predict(rng.standard_normal((500, 6)))[0]))
    assert said < 0.2 * 0.05
    clear = fit_residual(features, 0.2 * np.sign(features[:, 0]) + noise, shrunk=True)
    assert clear is not None
    assert np.std(clear.predict(rng.standard_normal((500, 6)))[0]) > 0.12


def test_a_collection_forgets_shapes_and_sizes() -> None:
    gemms = [Gemm(m, n, 64, "bf16") for m in (8, 16, 24) for n in (32, 40)]
    whole = Collection(H100, "x", gemms, np.arange(1.0, 7.0))
    gone = whole.without(np.array([[8, 32, 64], [99, 99, 99]]))
    assert [(g.m, g.n) for g in gone.gemms] == [(8, 40), (16, 32), (16, 40), (24, 32), (24, 40)]
    assert gone.seconds.tolist() == [2, 3, 4, 5, 6]
    levels = whole.without(np.empty((0, 3), dtype=np.int64), [np.array([16]), np.array([40])])
    assert [(g.m, g.n) for g in levels.gemms] == [(8, 32), (24, 32)]


def collected(results: Path, slug: str, framework: str, count: int = 700) -> None:
    """Write an imported collection of a machine as ``make import`` does."""
    machine, gemms = known_machine(slug), shapes(count, 1)
    frame = pd.DataFrame(sizes_of(gemms), columns=list("mnk")).assign(
        framework=framework, version="1", device=machine.name, gemm_dtype="bfloat16",
        latency=truth(gemms) * 1e3,
    )  # fmt: skip
    path = results / f"{slug}-{framework}.parquet"
    frame.to_parquet(path)
    write_collections([read_table(path)], machine, results)


def own_rows(folder: Path, gemms: list[Gemm]) -> None:
    cases = [Case("square", gemm, "cublas") for gemm in gemms]
    record(folder, cases, truth(gemms, 1.1, 4).tolist())


@pytest.mark.slow
def test_a_recording_finds_what_was_imported_near_it(tmp_path: Path) -> None:
    gemms = shapes(60, 1)[:30] + shapes(90, 20)[:60]
    own_rows(tmp_path / H100.slug, gemms)
    recording = load(tmp_path / H100.slug)
    rows = recording.products.reset_index(drop=True)
    assert priors_for(recording, rows) == {}
    collected(tmp_path, "nvidia-h100-sxm", "SGLANG")
    collected(tmp_path, "nvidia-h200", "VLLM")
    collected(tmp_path, "nvidia-b200", "VLLM")  # a machine of another generation
    own, sibling = priors_for(recording, rows)[GROUP].collections
    assert own.name == "SGLang 1 of nvidia-h100-sxm"
    assert sibling.name == "vLLM 1 of nvidia-h200"
    assert own.rows == sibling.rows == 670  # without the 30 shapes that the recording has
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("analysis.model.nearby.can_grow", lambda: False)
        assert priors_for(recording, rows) == {}  # without scikit-learn there are no trees
    published = replace(recording, run={**recording.run, "published": True})
    assert priors_for(published, rows) == {}

    analysis = analyse(recording)
    write_predictions(analysis)
    (fit,) = analysis.model.fits.values()
    assert fit.offsets is not None
    text = (tmp_path / H100.slug / "calibration.json").read_text(encoding="utf-8")
    assert "of nvidia-h100-sxm" not in text  # sources and machines are stored separately
    assert json.loads(text)["groups"]["cublas gemm bf16"]["offsets"]["weights"]


def test_damaged_collections_are_named_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own_rows(tmp_path / H100.slug, shapes(60, 20))
    recording = load(tmp_path / H100.slug)
    rows = recording.products.reset_index(drop=True)
    collected(tmp_path, "nvidia-h100-sxm", "SGLANG", 60)
    place = tmp_path / "public" / "nvidia-h100-sxm" / "collections.parquet"
    sound = pd.read_parquet(place)
    for spoil in ("time_us", "m"):
        sound.assign(**{spoil: sound[spoil].where(sound.index > 0, -1)}).to_parquet(place)
        assert priors_for(recording, rows) == {}
        assert "row 1 of" in capsys.readouterr().err
    place.write_bytes(b"no table")
    assert priors_for(recording, rows) == {}
    assert "run `python -m analysis import --machine nvidia-h100-sxm`" in capsys.readouterr().err


def test_every_limit_has_its_kind() -> None:
    assert sorted(limit for kind in _KINDS for limit in kind) == sorted(LIMITS)
