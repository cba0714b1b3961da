"""Without a GPU the Triton kernels run in Triton's interpreter, which must be chosen before Triton
is first imported; with one, GPU tests run on it and the interpreter's skip themselves."""

from __future__ import annotations

import os
import signal
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:
    # The workers are as many as the cores: threads of each worker's BLAS beside them only fight for
    # those. NumPy reads this when it is first imported.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import hypothesis
import pytest
import torch

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background jobs deaf to Ctrl-C, which tests send to their children.
    signal.signal(signal.SIGINT, signal.default_int_handler)

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"


ROOT = Path(__file__).resolve().parent.parent
PUBLIC_DATA = ROOT.parent / "shared" / "data"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also run what takes many minutes")


def pytest_configure(config: pytest.Config) -> None:
    # Machines are shared and slow at times: no test fails for taking long. The health check
    # ``too_slow`` would fail one whose first examples took too many seconds to draw; it is the only
    # health check that goes by the clock.
    hypothesis.settings.register_profile(
        "rooftile",
        deadline=None,
        max_examples=300 if config.getoption("--long") else 100,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("rooftile")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reasons = {}
    if not HAS_GPU:
        reasons["gpu"] = "no GPU that PyTorch can use"
    if not config.getoption("--long"):
        reasons["long"] = "`make attacks` runs it"
    for item in items:
        for keyword, reason in reasons.items():
            if keyword in item.keywords:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(optionalhook=True)  # a GPU node's Python may have pytest without pytest-benchmark
def pytest_benchmark_update_machine_info(machine_info: dict[str, object]) -> None:
    machine_info.pop("node", None)  # a recording names no host


def pytest_report_header() -> str:
    if HAS_GPU:
        return f"GPU: {torch.cuda.get_device_name()}"
    return "GPU: none; GPU tests skip themselves, Triton kernels run in the interpreter"


@pytest.fixture(scope="session")
def device() -> str:
    """Where Triton kernels are tested."""
    return "cuda" if HAS_GPU else "cpu"


@pytest.fixture(scope="session")
def public_data() -> Path:
    """Others' measurements, where they lie beside the checkout."""
    if not PUBLIC_DATA.is_dir():
        pytest.skip("the public measurements are not on this machine")
    return PUBLIC_DATA
