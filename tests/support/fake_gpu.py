"""A machine with a simulated H200, for any command:

    python tests/support/fake_gpu.py -m sweeps run …

The device's time is simulated (:mod:`tests.support.fake_cuda`): kernels take what the estimate
says, waiting takes nothing, and the clock rises from idle to work. NVML, the driver's wait, the
profiler (which loses its first records), CUDA graphs and Triton's compiler are simulated too.
Nothing is computed: results are called right. Sweeps have few cases
(:mod:`tests.support.few_cases`). Everything else is the real program, processes and files included.
``MADE_UP_GPUS`` is how many GPUs the node has, which differ in speed by several percent.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from tests.support import few_cases  # noqa: E402
from tests.support.fake_cuda import FakeCuda, FakeDriver, FakeTorch  # noqa: E402
from tests.support.fakes import FakeNvml  # noqa: E402

PROPERTIES = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=150_754_820_096,
    L2_cache_size=62_914_560, shared_memory_per_multiprocessor=233_472,
    shared_memory_per_block_optin=232_448, memory_bus_width=6144, uuid="8a1b", pci_domain_id=0,
    pci_bus_id=0x3B, pci_device_id=0,
)  # fmt: skip
_LOST_RECORDS = 5
GPUS = int(os.environ.get("MADE_UP_GPUS", "1"))
SPEEDS = (1.0, 0.97, 1.02, 0.985)
"""Of the node's GPUs, over and over."""


class Device(FakeCuda):
    """The made-up GPU on the host's real time, plus what waiting for it would have taken."""

    def __init__(self) -> None:
        self._skipped = 0.0
        self.trace: list[dict[str, Any]] | None = None
        self.captured: list[float] | None = None
        super().__init__(queue_seconds=5e-6, rises=0.1)

    @property
    def host(self) -> float:
        return time.monotonic() + self._skipped

    @host.setter
    def host(self, moment: float) -> None:
        self._skipped += max(0.0, moment - self.host)

    def kernel(self, name: str, seconds: float) -> None:
        """Launch a kernel, or put it into the graph that is being captured."""
        if self.captured is not None:
            self.captured.append(seconds)
            return
        self.host += self.queue_seconds
        self.busy(seconds)
        if self.trace is not None:
            number = len(self.trace)
            moment = time.monotonic() * 1e6
            self.trace += [
                {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernelExC", "ts": moment,
                 "dur": 1.0, "tid": 1, "args": {"correlation": number}},
                {"ph": "X", "cat": "kernel", "name": name, "ts": moment + 10.0,
                 "dur": seconds * 1e6, "args": {"correlation": number, "grid": [132, 1, 1]}},
            ]  # fmt: skip


device = Device()


class Graph:
    """A CUDA graph: its kernels run without the host's gaps."""

    def __init__(self) -> None:
        self.kernels: list[float] = []

    def replay(self) -> None:
        device.host += device.queue_seconds
        for seconds in self.kernels:
            device.busy(seconds)


@contextmanager
def capturing(graph: Graph) -> Iterator[None]:
    device.captured = graph.kernels
    try:
        yield
    finally:
        device.captured = None


@contextmanager
def nothing(*arguments: Any, **options: Any) -> Iterator[None]:
    yield


class Profile:
    """A session of PyTorch's profiler; the first records of kernels are lost, as CUPTI's are."""

    def __init__(self, **options: Any) -> None:
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Profile:
        device.trace = self.events
        return self

    def __exit__(self, *error: object) -> None:
        device.trace = None

    def export_chrome_trace(self, path: str) -> None:
        kernels = [event for event in self.events if event["cat"] == "kernel"]
        lost = {id(event) for event in kernels[:_LOST_RECORDS]}
        kept = [event for event in self.events if id(event) not in lost]
        Path(path).write_text(json.dumps({"traceEvents": kept}), encoding="utf-8")


@contextmanager
def record_function(name: str) -> Iterator[None]:
    begin = time.monotonic() * 1e6
    yield
    if device.trace is not None:
        span = {"ts": begin, "dur": time.monotonic() * 1e6 - begin, "tid": 1, "args": {}}
        device.trace.append({"ph": "X", "cat": "user_annotation", "name": name, **span})


def put(owner: Any, **replaced: Any) -> None:
    """Replace attributes of a module or a class."""
    for name, value in replaced.items():
        setattr(owner, name, value)


chosen = 0  # the GPU that this process uses


def choose(index: int) -> None:
    global chosen
    chosen = index


def properties_of(index: int) -> SimpleNamespace:
    """Of one of the node's GPUs, which only its UUID and its address tell from the others."""
    own = {"uuid": f"{PROPERTIES.uuid}-{index}", "pci_bus_id": PROPERTIES.pci_bus_id + index}
    return SimpleNamespace(**{**vars(PROPERTIES), **own})


def install_torch() -> None:
    """What stands for ``torch.cuda``, the profiler, and products outside of any implementation."""
    replaced: dict[str, Any] = {
        "is_available": lambda: True, "device_count": lambda: GPUS,
        "get_device_properties": properties_of, "get_device_name": lambda: "NVIDIA H200",
        "get_arch_list": lambda: ["sm_80", "sm_90"], "set_device": choose,
        "mem_get_info": lambda index: (1 << 32, 1 << 37), "empty_cache": lambda: None,
        "Event": device.Event, "_sleep": device._sleep, "synchronize": device.synchronize,
        "current_stream": lambda: SimpleNamespace(cuda_stream=7, wait_stream=lambda other: None),
        "Stream": lambda: SimpleNamespace(wait_stream=lambda other: None), "stream": nothing,
        "CUDAGraph": Graph, "graph": capturing,
    }  # fmt: skip
    put(torch.cuda, **replaced)
    sleep = device._sleep

    def spin(cycles: int) -> None:
        sleep(cycles)
        device.kernel("spin_kernel", 0.0)

    put(torch.cuda, _sleep=spin)
    put(torch.version, cuda="13.0")
    put(torch.profiler, profile=Profile, record_function=record_function)
    real_library: Any = ctypes.CDLL

    def library(name: str | None, *rest: Any, **options: Any) -> Any:
        if name == "libcuda.so.1":
            return FakeDriver(device)
        return real_library(name, *rest, **options)

    put(ctypes, CDLL=library)


def install_nvml() -> None:
    """The module ``pynvml`` of one card, whose sensors tell what an H200's might."""
    nvml = FakeNvml(instant=655_000)
    nvml.answers["TotalEnergyConsumption"] = lambda handle: 655_000 * device.host  # millijoules
    module = types.ModuleType("pynvml")
    put(module, __getattr__=lambda name: getattr(nvml, name), nvmlInit=lambda: None)
    nvml.answers["HandleByUUID"] = lambda name: "card"
    sys.modules["pynvml"] = module


def install_rooftile() -> None:
    """Launches that keep the device busy for what the estimate says, and compute nothing."""
    import kernels.correctness.check
    import kernels.device
    import kernels.timers
    import sweeps.doctor.clock_check
    import sweeps.measuring.checking
    import sweeps.measuring.torch_bench
    import sweeps.profiling.profile
    import sweeps.timing.clock
    from kernels.correctness.verify import CheckVerdict
    from kernels.launch import Launch
    from kernels.library.vendor import Library
    from kernels.machine import known_machine
    from sweeps.planning.plan import expected_seconds

    h200 = known_machine("nvidia-h200")
    noise = random.Random(os.getpid())
    known: dict[Any, float] = {}

    def seconds_of(problem: Any) -> float:
        if problem not in known:
            known[problem] = max(expected_seconds([problem], h200)[0], 2e-6)
        slowness = 1 / SPEEDS[chosen % len(SPEEDS)]
        return known[problem] * slowness * noise.lognormvariate(0.0, 0.003)

    def prepare(self: Any, problem: Any, sets: Sequence[Any], config: Any = None) -> Launch:
        def bare(index: int) -> Any:
            device.kernel(f"fake_{self.name}_gemm_128x128", seconds_of(problem))
            return sets[index].out

        return Launch(bare, sets)

    def right(*arguments: Any, **options: Any) -> CheckVerdict:
        return CheckVerdict(1e-4, 1e-2)

    this_gpu: Callable[[int], Any] = kernels.device._this_gpu

    def on_the_host(gpu: int) -> Any:
        found = this_gpu(gpu)
        return type(found)(found.machine, "cpu", found.gpu)

    class Clock(sweeps.timing.clock.CudaClock):
        def __init__(self, module: Any, name: str, sm_clock: Any = None) -> None:
            super().__init__(FakeTorch(device), name, sm_clock=sm_clock)

        def now(self) -> float:
            return device.host

    class SmClock:
        def __init__(self, sms: int, name: str) -> None:
            self._hertz = [0.0, 0.0]

        def mark(self, number: int) -> None:
            def run(start: float) -> float:
                self._hertz[number] = device.hertz
                return start + 2e-6

            device.queue(run)

        def mhz(self) -> float:
            device.synchronize()
            return sum(self._hertz) / len(self._hertz) / 1e6

    def do_bench(launch: Callable[[], object]) -> float:
        with capturing(Graph()):
            launch()
            (seconds,) = device.captured or [0.0]
        return seconds

    def multiply(a: Any, b: Any, out: Any) -> None:
        flops = 2 * a.shape[0] * a.shape[1] * b.shape[1]
        device.kernel("fake_mm", flops / 8e14 + 3e-6)

    def step(name: str, *arguments: Any) -> Callable[[], None]:
        return lambda: device.kernel("fake_step", 1e-3)

    put(kernels.device, _this_gpu=on_the_host, nvidia_driver=lambda: "580.159.04")
    put(sweeps.measuring.torch_bench, CudaClock=Clock, _open_sm_clock=SmClock)
    put(sweeps.measuring.checking, verify=right)
    put(kernels.correctness.check, verify=right)
    put(sweeps.doctor.clock_check, do_bench=do_bench)
    put(sweeps.profiling.profile, training_step=step)
    put(Library, prepare=prepare)
    # Memory that is never touched costs nothing, however large.
    put(torch, mm=multiply, randn=lambda *size, **how: torch.zeros(*size, dtype=how.get("dtype")))
    from kernels.triton.family import TritonFamily
    from kernels.triton.persistent import TritonPersistent

    put(TritonFamily, prepare=prepare, compile_ahead=lambda self, cases: None)
    put(TritonPersistent, prepare=prepare)


install_torch()
install_nvml()
install_rooftile()

if __name__ == "__main__":
    if sys.argv[1:3] == ["-m", "pytest"]:
        print("no test runs on a made-up GPU")
        sys.exit(0)
    few_cases.install(__file__)
    few_cases.run_module()
