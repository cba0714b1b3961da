"""A bench, a clock and a card that are made up, so that every rule of measuring can be tested.

The fake clock does not wait: it adds up what the launches say they take. A launch's result is its
duration in seconds. Behaviours that need a real process (crashing, hanging) do happen.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from kernels.common.errors import WrongResultError
from kernels.problem import Gemm
from sweeps.cases.case import Case
from sweeps.folding.history import CANARY, History
from sweeps.measuring.bench import OnStart, PoisonedError, Ready, Refusal
from sweeps.planning.plan import PlanEntry
from sweeps.timing.clock import LaunchCall, Timing, do_nothing
from sweeps.timing.sampler import Sampler, Subject


def case(m: int, sweep: str = "fake") -> Case:
    return Case(sweep, Gemm(m, 64, 64, "fp32"), "fake")


def planned(count: int, expected: float = 0.01) -> list[PlanEntry]:
    return [PlanEntry(case(m), expected) for m in range(1, count + 1)]


class FakeClock:
    """Time passes only by launches, and by ``pause``."""

    batch_seconds = 1e-3
    max_launches = 1000

    def __init__(self) -> None:
        self.seconds = 0.0
        self.batches: list[tuple[tuple[int, ...], float]] = []
        self.waking: list[float] = []
        self.exposed = False  # whether gaps show in the batch at hand
        self.launched = 0.0  # seconds of launches that the clock did not make itself

    def time(
        self,
        launch: LaunchCall,
        indices: Sequence[int],
        before: Callable[[], object] = do_nothing,
        settle: float = 0.0,
        paced: bool = False,
    ) -> Timing:
        self.launched = 0.0
        before()
        self.seconds += self.launched
        self.exposed = False
        self.batches.append((tuple(indices), settle))
        took = 0.0
        for index in indices:
            duration = launch(index)
            assert isinstance(duration, float)
            took += duration
        self.seconds += took + settle
        exposed, self.exposed = self.exposed, False
        return Timing(took, not exposed)

    def wake(self) -> None:
        self.waking.append(self.seconds)

    def now(self) -> float:
        return self.seconds

    def pause(self, seconds: float) -> None:
        self.seconds += seconds


def noisy(seconds: float, spread: float, seed: int = 0) -> LaunchCall:
    """A launch that takes ``seconds`` with log-normal noise."""
    rng = random.Random(seed)
    return lambda index: seconds * rng.lognormvariate(0.0, spread)


class FakeChecker:
    """Finds what its case's behaviour says."""

    def __init__(self, behaviour: str) -> None:
        self.behaviour = behaviour

    def poison(self, changed: int | None) -> None:
        self.changed = changed

    def check_batch(self, indices: Sequence[int], last: object) -> None:
        if self.changed is not None:
            self.check_after_timing()
        if self.behaviour == "wrong-in-batch":
            raise WrongResultError("a check of a timed batch failed: it was wrong.")

    def release(self) -> None:
        pass

    def check_after_timing(self) -> None:
        if self.behaviour == "wrong-after":
            raise WrongResultError("a check after a sample failed: it was wrong.")


class FakeBench:
    """Cases whose M says what happens to them; see ``behaviours``.

    Behaviours: ok, wrong, oom, unsupported, raise, abort, abort-once, hang, poison,
    raise-in-sample, abort-in-sample, abort-together, abort-in-naming, lose-name, lose-name-always,
    profiler-fails, real-time-signal, half-a-character, wrong-in-batch, wrong-after.
    ``exposed`` says of which M launch gaps show, and in how many samples.
    """

    gpu: int | None = None
    careful: Collection[str] = frozenset()

    def __init__(
        self,
        cases: Sequence[Case],
        behaviours: Mapping[int, str] | None = None,
        seconds: float = 1e-4,
        spread: float = 0.002,
        real_seconds: float = 0.0,
        folder: str = "",
        gpu: int | None = None,
        canary: str = "ok",
        exposed: Mapping[int, int] | None = None,
        sustained: Collection[int] = (),
        stalls_after: int = 0,
        checking: float = 0.0,
    ) -> None:
        """``stalls_after``: launches after which the process only waits to be killed."""
        self.clock = FakeClock()
        self._exposed = dict(exposed or {})
        self._sustained = sustained
        self._stalls_after = stalls_after
        self._launched = 0
        self._checking = checking
        self.sampler = Sampler(self.clock)
        self.gpu = gpu
        self.prepared: list[Case] = []
        self._behaviours = behaviours or {}
        self._seconds = seconds
        self._spread = spread
        self._real_seconds = real_seconds
        self._folder = folder
        self._canary = canary

    def prepare(
        self, cases: Sequence[Case], known: Mapping[str, History], on_start: OnStart
    ) -> Iterator[Ready | Refusal]:
        together = [one for one in cases if one.id not in self.careful]
        if any(self._behaviour(one) == "abort-together" for one in together):
            on_start([one.id for one in together], 1e5)
            os.abort()
        for one in cases:
            behaviour = self._behaviour(one)
            # Only what is meant to hang is given up early, however slow the machine is.
            on_start([one.id], 0.01 if behaviour == "hang" else 1e5)
            self.prepared.append(one)
            if behaviour in ("wrong", "oom", "unsupported"):
                facts = {"rel_error": 0.5} if behaviour == "wrong" else {}
                yield Refusal(one, behaviour, f"it is {behaviour}.", facts)
                continue
            if behaviour == "raise":
                yield Refusal(one, *self.recover_from(RuntimeError("no such\nkernel")))
                continue
            if behaviour == "half-a-character":
                yield Refusal(one, *self.recover_from(RuntimeError("no file \udcff.cubin")))
                continue
            if behaviour == "poison":
                raise PoisonedError("illegal memory access")
            self._misbehave(behaviour)
            taken = known[one.id].samples.get(self.gpu, []) if one.id in known else []
            subject = Subject(
                one.id, self._launch(one, behaviour), cache="warm",
                samples=[sample["s"] for sample in taken], checker=FakeChecker(behaviour),
                checking=self._checking,
            )  # fmt: skip
            subject.launches = 1
            subject.cost = self._seconds * one.problem.m  # type: ignore[union-attr]
            if one.problem.m in self._sustained:  # type: ignore[union-attr]
                subject.mode = "sustained"
            subject.exposed = len(known[one.id].exposed) if one.id in known else 0
            yield Ready(one, subject, {"rel_error": 1e-7})

    def kernel_columns(
        self, cases: Sequence[Case], on_start: OnStart
    ) -> Iterator[tuple[Case, Mapping[str, Any]]]:
        for one in cases:
            on_start([one.id], 1e5)
            behaviour = self._behaviour(one)
            if behaviour == "profiler-fails":
                raise RuntimeError("CUPTI is not permitted")
            if behaviour == "abort-in-naming":
                os.abort()
            if behaviour == "lose-name" and not self._marked("lost"):
                continue
            if behaviour != "lose-name-always":
                yield one, {"kernel": f"fake_kernel_{os.getpid()}"}

    def _behaviour(self, one: Case) -> str:
        return self._behaviours.get(one.problem.m, "ok")  # type: ignore[union-attr]

    def _marked(self, what: str) -> bool:
        """Whether this was asked before, in any process of the run."""
        mark = os.path.join(self._folder, what)
        there = os.path.exists(mark)
        open(mark, "w").close()
        return there

    def recover_from(self, error: Exception) -> tuple[str, str]:
        if isinstance(error, PoisonedError):
            raise error
        if isinstance(error, WrongResultError):
            return "wrong", str(error)
        return "error", f"{type(error).__name__}: {error}"

    def ceilings(self) -> None:
        return None  # as where a datasheet has them

    def canary(self) -> Subject | None:
        if self._canary == "abort":
            os.abort()
        if self._canary == "raise":
            raise RuntimeError("no room for it")
        subject = Subject(CANARY, noisy(self._seconds, self._spread), cache="warm")
        subject.launches = 1
        return subject

    def _launch(self, one: Case, behaviour: str) -> LaunchCall:
        law = noisy(self._seconds * one.problem.m, self._spread)  # type: ignore[union-attr]

        def launch(index: int) -> object:
            left = self._exposed.get(one.problem.m, 0)  # type: ignore[union-attr]
            self.clock.exposed = left > 0
            if left:
                self._exposed[one.problem.m] = left - 1  # type: ignore[union-attr]
            self._launched += 1
            if 0 < self._stalls_after < self._launched:
                time.sleep(3600)
            if self._real_seconds:
                time.sleep(self._real_seconds)
            if behaviour == "raise-in-sample":
                raise RuntimeError("launch failed")
            if behaviour == "abort-in-sample":
                os.abort()
            seconds = law(index)
            assert isinstance(seconds, float)
            self.clock.launched += seconds
            return seconds

        return launch

    def _misbehave(self, behaviour: str) -> None:
        if behaviour == "abort":
            os.abort()
        if behaviour == "abort-once" and not self._marked("aborted"):
            os.abort()
        if behaviour == "real-time-signal":
            os.kill(os.getpid(), signal.SIGRTMIN + 1)
        if behaviour == "hang":
            time.sleep(3600)


class Silent:
    """A reporter that keeps the last thing it was told."""

    def __init__(self) -> None:
        self.last: tuple[Any, ...] = ()
        self.phases: list[str] = []

    def begin(self, phase: str, seconds: float | None, after: float = 0.0) -> None:
        self.phases.append(phase)

    def update(self, done: int, total: int, left: float | None = None) -> None:
        self.last = (done, total, left)


class FakeNvml:
    """One card; what it does not answer raises NVMLError, as the real module does."""

    class NVMLError(Exception):
        pass

    NVML_SUCCESS = 0
    NVML_COMPUTEMODE_DEFAULT = 0
    NVML_FI_DEV_POWER_INSTANT = 186
    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0

    def __init__(
        self, refuse: tuple[str, ...] = (), instant: int | None = None, **answers: Any
    ) -> None:
        self.refuse = refuse
        # A field has a status of its own: 3 is NVML_ERROR_NOT_SUPPORTED.
        value = SimpleNamespace(uiVal=instant)
        self.field = SimpleNamespace(nvmlReturn=0 if instant else 3, value=value)
        self.reasons = 0
        self.answers: dict[str, Any] = {
            "ClockInfo": 1980, "MaxClockInfo": 1980, "PowerUsage": 612_000, "Temperature": 55,
            "EnforcedPowerLimit": 700_000, "PowerManagementDefaultLimit": 700_000,
            "PowerManagementLimit": 700_000, "ApplicationsClock": 1980,
            "ComputeMode": 0, "FieldValues": [self.field], "EccMode": (1, 1),
            "ComputeRunningProcesses": [], "TotalEnergyConsumption": 0, **answers,
        }  # fmt: skip

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name.startswith("nvmlDeviceGet"):
            raise AttributeError(name)
        what = name.removeprefix("nvmlDeviceGet")

        def ask(*arguments: Any) -> Any:
            if what in self.refuse:
                raise self.NVMLError(name)
            if what == "CurrentClocksThrottleReasons":
                return self.reasons
            answer = self.answers[what]
            return answer(*arguments) if callable(answer) else answer

        return ask
