from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from sweeps.running.run import MEASURE
from sweeps.schema import ALONE, TOGETHER
from sweeps.sharing.node_gates import Gates

PHASES = (ALONE, TOGETHER, MEASURE)


class Node:
    """Workers that come to the gates in a random order. Some of them end too early."""

    def __init__(self, count: int, seed: int, turns: bool, deaths: dict[int, str]) -> None:
        self.random = random.Random(seed)
        self.turns = turns
        self.deaths = deaths
        self.asked = 0
        self.gates = Gates(range(count), self.take_turns)
        self.next = dict.fromkeys(range(count), 0)  # index of the gate that each comes to next
        self.waiting: set[int] = set()
        self.inside: dict[str, set[int]] = {phase: set() for phase in PHASES}
        self.passed: dict[str, set[int]] = {phase: set() for phase in PHASES}

    def take_turns(self) -> bool:
        self.asked += 1
        return self.turns

    def run(self) -> None:
        while self.next:
            free = sorted(self.next.keys() - self.waiting)
            assert free, "everybody waits for somebody"
            worker = self.random.choice(free)
            for inside in self.inside.values():
                inside.discard(worker)
            place = self.next[worker]
            dies = place < len(PHASES) and self.deaths.get(worker) == PHASES[place]
            if place == len(PHASES) or dies:
                del self.next[worker]
                self.let_go(self.gates.leave(worker))
                continue
            self.waiting.add(worker)
            self.let_go(self.gates.arrive(worker, PHASES[place]))

    def let_go(self, workers: list[int]) -> None:
        for worker in workers:
            self.waiting.remove(worker)
            phase = PHASES[self.next[worker]]
            self.inside[phase].add(worker)
            self.passed[phase].add(worker)
            self.next[worker] += 1
        assert len(self.inside[ALONE]) <= 1
        if self.inside[ALONE]:
            assert not self.inside[TOGETHER]
            assert not self.inside[MEASURE]
        if self.inside[TOGETHER]:
            assert not self.inside[MEASURE]
        if self.turns:
            assert len(self.inside[MEASURE]) <= 1


@given(
    count=st.integers(1, 8),
    seed=st.integers(0, 1000),
    turns=st.booleans(),
    deaths=st.dictionaries(st.integers(0, 7), st.sampled_from(PHASES), max_size=4),
)
def test_whoever_lives_passes_all_gates_and_nobody_is_timed_alone_beside_another(
    count: int, seed: int, turns: bool, deaths: dict[int, str]
) -> None:
    node = Node(count, seed, turns, deaths)
    node.run()
    living = set(range(count)) - deaths.keys()
    assert living <= node.passed[MEASURE]
    assert node.asked == bool(node.passed[MEASURE])
    # All workers that live pass the gate of the phase together.
    assert living <= node.passed[TOGETHER]


def test_all_that_work_together_are_let_go_at_once() -> None:
    gates = Gates([0, 3], lambda: False)
    assert gates.arrive(3, ALONE) == []  # the other one may still be compiling
    assert gates.arrive(0, ALONE) == [0]
    assert gates.arrive(0, TOGETHER) == [3]
    assert gates.arrive(3, TOGETHER) == [0, 3]
    assert gates.arrive(3, MEASURE) == []
    assert gates.arrive(0, MEASURE) == [0, 3]


def test_a_worker_that_takes_a_share_over_measures_at_once() -> None:
    gates = Gates([0, 1], lambda: False)
    assert gates.arrive(0, MEASURE) == []
    assert gates.arrive(1, MEASURE) == [0, 1]
    assert gates.leave(0) == []
    assert gates.arrive(0, MEASURE) == [0]


def test_gpus_that_slow_one_another_down_take_turns() -> None:
    gates = Gates([0, 1, 2], lambda: True)
    assert [gates.arrive(gpu, MEASURE) for gpu in (2, 0, 1)] == [[], [], [0]]
    assert gates.leave(0) == [1]
    assert gates.arrive(0, MEASURE) == []  # with the shard of a worker that died
    assert gates.leave(1) == [0]
    assert gates.leave(0) == [2]
