"""pytest plugin with a fixture that times kernels and reports the times to pytest-benchmark.

    def test_my_matmul(kernel_benchmark):
        a, b = torch.randn(512, 512), torch.randn(512, 512)
        kernel_benchmark(my_matmul, a, b, reference=torch.matmul)

pytest-benchmark receives the samples, so its table, ``--benchmark-json`` and
``--benchmark-compare`` work as usual. Installing Rooftile registers the plugin. The plugin imports
PyTorch only when a test uses the fixture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest


@pytest.fixture
def kernel_replay(request: pytest.FixtureRequest) -> KernelReplay:
    """Return a timer that replays samples, and make it the timer of this test's benchmark."""
    replay = KernelReplay()
    request.node.add_marker(pytest.mark.benchmark(timer=replay.read))
    return replay


# kernel_replay comes first, because it sets a marker that pytest-benchmark reads when it creates
# the fixture ``benchmark``.
@pytest.fixture
def kernel_benchmark(kernel_replay: KernelReplay, benchmark: Any) -> KernelBenchmark:
    """Return a callable that times a kernel; call it with the kernel and the kernel's arguments."""
    return KernelBenchmark(benchmark, kernel_replay)


class KernelBenchmark:
    """Benchmark of one kernel in one test."""

    def __init__(self, benchmark: Any, replay: KernelReplay) -> None:
        """Wrap pytest-benchmark's fixture, whose timer is ``replay``."""
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
        """Time a kernel on the device of its arguments, and return its result.

        The test fails if the result differs from the reference's result by more than ``tolerance``.
        If benchmarks are disabled, for example by ``--benchmark-disable``, the result is checked,
        but the kernel is not timed. The test must not also request the fixture ``benchmark``.

        Args:
            kernel: function that launches the kernel once, without synchronising.
            *arguments: arguments of the kernel; launches get copies of the tensors.
            cache: ``cold`` to time launches with the arguments in memory, ``warm`` to time them
                with the arguments in the cache.
            reference: function that computes the same result; None to skip the check. The function
                is called with all floating-point tensors converted to float64.
            tolerance: largest permitted error, relative to the largest absolute value of the
                reference's result; None for the default of the result's dtype.
            prepares: True if ``kernel`` launches nothing itself, but returns a function without
                arguments that launches the kernel.

        Raises:
            UserError: if ``cache`` is invalid, if ``reference`` does not return a tensor, or if the
                launches cannot be timed.
        """
        from kernels.common.errors import WrongResultError
        from sweeps.measuring.kernel_timing import TimedKernel, check_cache, timer_for

        # 1. Check and time the kernel.
        check_cache(cache)
        timed = TimedKernel(kernel, arguments, reference, tolerance, prepares)
        try:
            if self._benchmark.disabled:
                result = self._benchmark.pedantic(timed.launch_on_copies())
                # This raises an error if the result is wrong.
                timed.checked_error(result, timed.expected())
                return result
            samples = timer_for(timed.gpu).time(timed, cache)
        except WrongResultError as error:
            raise pytest.fail.Exception(str(error), pytrace=False) from None
        # 2. Report the samples to pytest-benchmark, each as one round.
        self._benchmark.extra_info.update(
            {"cache": cache, "launches": samples.launches, "sets": samples.sets}
        )
        if samples.rel_error is not None:
            self._benchmark.extra_info["rel_error"] = samples.rel_error
        self._replay.load(samples.seconds)
        self._benchmark.pedantic(self._replay.take, rounds=len(samples.seconds))
        # 3. Check that the report has these samples. If the test requested ``benchmark`` before
        # this fixture, the benchmark was created without the replaying timer.
        if self._benchmark.stats["min"] != min(samples.seconds):
            pytest.fail(
                "a test that uses the kernel_benchmark fixture must not also use the benchmark "
                "fixture; remove benchmark from the test's arguments.",
                pytrace=False,
            )
        return samples.result


class KernelReplay:
    """Timer that replays samples, so that pytest-benchmark reports each of them as a round.

    pytest-benchmark reads its timer before and after each round, and takes the difference. This
    timer reads 0 before a round, and the round's sample after the round.
    """

    def __init__(self) -> None:
        self._samples: list[float] = []
        self._taken = 0.0

    def load(self, samples: Sequence[float]) -> None:
        """Load the samples to replay, in seconds, one per round; drop any from an earlier load."""
        self._samples = list(reversed(samples))

    def take(self) -> None:
        """Take the next sample. pytest-benchmark calls this method once per round."""
        self._taken = self._samples.pop()

    def read(self) -> float:
        """Return the sample taken since the last reading, or 0 if none was taken."""
        seconds, self._taken = self._taken, 0.0
        return seconds
