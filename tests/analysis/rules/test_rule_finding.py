"""Planted effects are found, noise is not taken for an effect, and intervals cover the truth."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from analysis.rules.rule_finding import Effect, Pairs, find_verdict, mean_effect

NOISE = 0.03
DRAWS = 100


def planted(
    truth: float, seed: int, pairs: int = 24, shared: int = 3, groups: int = 3,
    told: bool = True, claim: float = np.nan,
) -> Pairs:  # fmt: skip
    """Return pairs with a known effect, in which ``shared`` cases follow the advice."""
    rng = np.random.default_rng(seed)
    log_time = NOISE * rng.standard_normal(shared + pairs)
    log_time[shared:] += np.log(truth)
    return Pairs(
        log_time=log_time,
        error=np.full(shared + pairs, NOISE if told else np.nan),
        against=np.arange(shared, shared + pairs),
        following=np.arange(pairs) % shared,
        log_work=np.zeros(pairs),
        log_claim=np.full(pairs, np.log(claim)),
        log_predicted=np.zeros(pairs),
        group=[f"group {i % groups}" for i in range(pairs)],
    )


def test_groups_on_both_sides_of_the_tolerance_do_not_cancel() -> None:
    both = planted(1.0, 0, pairs=2, shared=2, groups=2)
    opposite = replace(both, log_time=np.log([1.0, 1.0, 0.5, 2.0]), error=np.full(4, 0.01))
    found = find_verdict(opposite, tolerance=0.15)
    assert found.effect.value == pytest.approx(1.0)
    assert found.verdict.startswith("depends: not as claimed in ")


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize(
    ("truth", "claim", "verdict"),
    [
        (1.8, np.nan, "holds"),
        (1.8, 6.0, "holds, weaker"),
        (1.8, 1.8, "holds"),
        (1.3, np.nan, "holds"),
        (1.0, np.nan, "no effect"),
        (0.7, np.nan, "no longer"),
    ],
)
def test_planted_truths_are_found(truth: float, claim: float, verdict: str, told: bool) -> None:
    found = [find_verdict(planted(truth, seed, told=told, claim=claim)) for seed in range(DRAWS)]
    assert sum(f.verdict == verdict for f in found) >= 90
    assert sum(f.effect.lo <= truth <= f.effect.hi for f in found) >= 90


@pytest.mark.parametrize("shared", [1, 4, 24])
def test_an_interval_holds_the_truth_however_many_pairs_share_a_case(shared: int) -> None:
    found = [mean_effect(planted(1.2, seed, shared=shared, told=False)) for seed in range(400)]
    if shared > 1:  # the error of a single case that all pairs share does not show as scatter
        assert sum(e.lo <= 1.2 <= e.hi for e in found) >= 0.9 * len(found)
    told = [mean_effect(planted(1.2, seed, shared=shared)) for seed in range(400)]
    assert sum(e.lo <= 1.2 <= e.hi for e in told) >= 0.9 * len(told)


def test_an_interval_holds_where_one_pair_ends_as_the_next_begins_and_ratios_differ() -> None:
    """Along a chain of doubled sizes, errors of times cancel, but true differences do not."""
    found = 0
    for seed in range(300):
        rng = np.random.default_rng(seed)
        ratios = 0.2 + 0.2 * rng.standard_normal((4, 6))
        times = np.hstack([np.zeros((4, 1)), -np.cumsum(ratios, axis=1)]).ravel()
        starts = np.array([7 * chain + i for chain in range(4) for i in range(6)])
        zero, nothing = np.zeros(24), np.full(24, np.nan)
        pairs = Pairs(times, np.full(28, np.nan), starts, starts + 1, zero, nothing, zero,
                      ["all"] * 24)  # fmt: skip
        e = mean_effect(pairs)
        found += e.lo <= np.exp(0.2) <= e.hi
    assert found >= 0.9 * 300


@pytest.mark.parametrize(("own", "controls"), [(0.1, 0.1), (0.1, 0.2), (0.02, 0.2), (0.2, 0.02)])
def test_shared_controls_count_once(own: float, controls: float) -> None:
    """There are four lines of two small sizes and a large size, in three dtypes and the control's.

    The last dtype is the control of the other three, and may scatter more than they do.
    """
    sizes = np.arange(4 * 4 * 3).reshape(4, 4, 3)  # [line, dtype, size]
    small, large = sizes[:, :3, :2], np.broadcast_to(sizes[:, :3, 2:], (4, 3, 2))
    control = np.stack([np.broadcast_to(sizes[:, 3:, size], (4, 3, 2))
                        for size in (slice(0, 2), slice(2, 3))], axis=-1)  # fmt: skip
    covered = 0
    for seed in range(3 * DRAWS):
        noise = np.random.default_rng(seed).standard_normal(sizes.shape)
        noise[:, :3] *= own
        noise[:, 3] *= controls
        noise[:, :3, :2] += np.log(3.0)
        zeros = np.zeros(small.size)
        pairs = Pairs(
            noise.ravel(), np.full(noise.size, np.nan), small.ravel(), large.ravel(), zeros,
            zeros + np.nan, zeros, ["all"] * small.size, control.reshape(-1, 2),
        )  # fmt: skip
        found = mean_effect(pairs)
        covered += found.lo <= 3.0 <= found.hi
    assert covered >= 0.93 * 3 * DRAWS  # the stated coverage is 95%


def test_more_pairs_say_more() -> None:
    few, many = (mean_effect(planted(1.5, 0, pairs=n, shared=n)) for n in (8, 200))
    assert many.hi / many.lo < few.hi / few.lo


def mixed(truths: dict[str, float], seed: int) -> Pairs:
    parts = [planted(truth, seed + i, pairs=16, shared=16, groups=1)
             for i, truth in enumerate(truths.values())]  # fmt: skip
    starts = np.cumsum([0, *(len(p.log_time) for p in parts[:-1])])

    def joined(name: str, shift: bool = False) -> np.ndarray:
        return np.concatenate(
            [getattr(p, name) + (s if shift else 0) for p, s in zip(parts, starts, strict=True)]
        )

    return Pairs(
        joined("log_time"), joined("error"), joined("against", True), joined("following", True),
        joined("log_work"), joined("log_claim"), joined("log_predicted"),
        [name for name in truths for _ in range(16)],
    )  # fmt: skip


def test_groups_that_contradict_one_another_are_named() -> None:
    verdicts = Counter(
        find_verdict(mixed({"bf16": 1.5, "fp32": 1.0}, 10 * seed)).verdict.split(" (")[0]
        for seed in range(DRAWS)
    )
    assert verdicts["depends: faster in bf16"] >= 90
    opposite = find_verdict(mixed({"fprop": 1.4, "dgrad": 0.7}, 0)).verdict
    assert "faster in fprop" in opposite
    assert "slower in dgrad" in opposite


def test_a_group_of_few_pairs_contradicts_nothing() -> None:
    pairs = planted(1.3, 0, pairs=25, shared=25, groups=1)
    pairs = Pairs(**{**vars(pairs), "group": ["many"] * 24 + ["one"]})
    assert find_verdict(pairs).verdict == "holds"


def test_what_is_too_uncertain_is_not_called_no_effect() -> None:
    rng = np.random.default_rng(0)
    pairs = planted(1.0, 0)
    wild = Pairs(**{**vars(pairs), "log_time": rng.standard_normal(len(pairs.log_time))})
    assert find_verdict(wild).verdict == "depends: the times are too uncertain to tell"


def test_up_to_is_about_the_best_group() -> None:
    found = find_verdict(mixed({"square": 5.9, "skinny": 1.1}, 0), largest=True)
    assert found.effect == found.groups["square"]
    assert found.effect.value == pytest.approx(5.9, rel=0.05)
    open_ = mixed({"square": 1.2, "skinny": 1.0}, 0)
    wide = np.where(np.arange(len(open_.log_time)) < 32, 0.03, 3.0)
    claimed = Pairs(**{**vars(open_), "error": wide, "log_claim": np.full(32, np.log(6.0))})
    verdict = find_verdict(claimed, largest=True).verdict
    assert verdict.startswith("depends: the times are too uncertain to tell in skinny")


def test_a_proportion_holds_only_within_its_tolerance() -> None:
    for truth, verdict in ((1.0, "holds"), (1.14, "holds, weaker"), (1.6, "no longer")):
        draws = (planted(truth, seed, groups=1) for seed in range(50))
        found = Counter(find_verdict(pairs, tolerance=0.15).verdict for pairs in draws)
        assert found[verdict] >= 40, (truth, found)
    odd = find_verdict(mixed({"relu": 1.0, "softmax": 1.7}, 0), tolerance=0.15).verdict
    assert odd.startswith("depends: not as claimed in softmax")


def test_one_pair_without_an_interval_proves_nothing() -> None:
    found = mean_effect(planted(1.5, 0, pairs=1, shared=1, told=False))
    assert found.hi == float("inf")
    assert found.sign == 0


def test_a_sign_needs_more_than_two_percent() -> None:
    assert Effect(1.01, 1.005, 1.015, 99).sign == 0
    assert Effect(1.03, 1.01, 1.05, 99).sign == 1
    assert Effect(0.9, 0.8, 0.95, 99).sign == -1
