"""pytest plugin: a fixture that times a project's own kernels inside pytest-benchmark.

    def test_my_matmul(kernel_benchmark):
        a, b = torch.randn(512, 512), torch.randn(512, 512)
        kernel_benchmark(my_matmul, a, b, reference=torch.matmul)

The samples become a benchmark of pytest-benchmark, with its table, ``--benchmark-json`` and
``--benchmark-compare``. An installation registers the plugin. Nothing heavy is imported before a
test uses the fixture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest


@pytest.fixture
def kernel_replay(request: pytest.FixtureRequest) -> KernelReplay:
    """Return the timer of this test's benchmark, which reads samples that were taken before."""
    replay = KernelReplay()
    request.node.add_marker(pytest.mark.benchmark(timer=replay.read))
    return replay


# The replay comes first, because pytest-benchmark reads the marker when it makes its fixture.
@pytest.fixture
def kernel_benchmark(kernel_replay: KernelReplay, benchmark: Any) -> KernelBenchmark:
    """Return the benchmark of one kernel: call it with the kernel and its arguments."""
    return KernelBenchmark(benchmark, kernel_replay)


class KernelBenchmark:
    """Benchmark of one kernel in one test."""

    def __init__(self, benchmark: Any, replay: KernelReplay) -> None:
        """Take pytest-benchmark's fixture, whose timer reads ``replay``."""
        self._benchmark, self._replay = benchmark, replay

    def __call__(
        self,
        kernel: Callable[..., Any],
        *arguments: Any,
        cache: str = "cold",
        reference: Callable[..., Any] | None = None,
        tolerance: float | None = None,
        prepares: bool = False,
    ) -> Any:
        """Time a kernel, and return its result.

        The device is that of the arguments. The test fails if the result differs from the
        reference's. With ``--benchmark-disable`` the kernel is only checked.

        Args:
            kernel: launches once, without synchronising.
            *arguments: what it is called with; each launch gets copies of the tensors.
            cache: where a launch finds its arguments: ``cold`` in memory, ``warm`` in the cache.
            reference: the same computation, called with floating-point tensors in float64.
            tolerance: largest error relative to the reference's largest value [default: by dtype].
            prepares: true if the kernel only prepares a launch on its arguments, and returns it as
                a callable without arguments.
        """
        from kernels.common.errors import WrongResultError
        from sweeps.measuring.kernel_timing import TimedKernel, timer_for

        timed = TimedKernel(kernel, arguments, reference, tolerance, prepares)
        try:
            if self._benchmark.disabled:
                result = self._benchmark.pedantic(timed.launch_on_copies())
                timed.error(result, timed.expected())
                return result
            samples = timer_for(timed.gpu).time(timed, cache)
        except WrongResultError as error:
            raise pytest.fail.Exception(str(error), pytrace=False) from None
        self._benchmark.extra_info.update(
            {"cache": cache, "launches": samples.launches, "sets": samples.sets}
        )
        if samples.rel_error is not None:
            self._benchmark.extra_info["rel_error"] = samples.rel_error
        self._replay.load(samples.seconds)
        self._benchmark.pedantic(self._replay.take, rounds=len(samples.seconds))
        if self._benchmark.stats["min"] != min(samples.seconds):
            pytest.fail("a test with kernel_benchmark must not use benchmark, too.", pytrace=False)
        return samples.result


class KernelReplay:
    """Timer that reads durations which were sampled before.

    pytest-benchmark reads a timer before and after each round. It reads 0 before, and after a round
    the sample that the round took.
    """

    def __init__(self) -> None:
        self._samples: list[float] = []
        self._taken = 0.0

    def load(self, samples: Sequence[float]) -> None:
        """Set the samples of the coming rounds, in seconds."""
        self._samples = list(reversed(samples))

    def take(self) -> None:
        """Be a round: take the next sample."""
        self._taken = self._samples.pop()

    def read(self) -> float:
        """Return the sample that was taken since the last reading, otherwise 0."""
        seconds, self._taken = self._taken, 0.0
        return seconds
