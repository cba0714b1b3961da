"""Which tests run, and where. Without a GPU the Triton kernels run in Triton's interpreter, which
must be chosen before Triton is first imported; with one, GPU tests run on it and the interpreter's
skip themselves."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

if "PYTEST_XDIST_WORKER" in os.environ:
    # The workers keep all cores busy: threads of each worker's BLAS would only fight for those.
    # NumPy reads this when it is first imported.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import hypothesis
import pytest
import torch

from kernels.machine import usable_processors
from tests.support import tiers

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background jobs deaf to Ctrl-C, which tests send to their children.
    signal.signal(signal.SIGINT, signal.default_int_handler)

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"


ROOT = Path(__file__).resolve().parent.parent
PUBLIC_DATA = Path(os.environ.get("ROOFTILE_PUBLIC_DATA", ROOT.parent / "shared" / "data"))
"""Tables of public measurements; CONTRIBUTING says which. Tests that need them are skipped where
they are not."""

_LEFT_OUT = pytest.StashKey[Counter[str]]()
_WHY = {
    "gpu": "{} GPU tests need a GPU",
    "slow": "{} slow tests are left to `make test-all`",
}  # fmt: skip


@pytest.hookimpl(optionalhook=True)  # without pytest-xdist there are no workers
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """One worker more than processors: on two of them, tests wait a fifth of their time."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None  # pytest-xdist reads it
    return usable_processors() + 1


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier", choices=tiers.TIERS, default="fast",
        help="which tests run: fast, all (also the slow ones), or long (only the long ones)",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    tiers.tier = config.getoption("--tier")
    config.stash[_LEFT_OUT] = Counter()
    # Machines are shared and slow at times: no test fails for taking long. The health check
    # ``too_slow`` would fail one whose first examples took too many seconds to draw; it is the only
    # health check that goes by the clock.
    hypothesis.settings.register_profile(
        "rooftile",
        deadline=None,
        max_examples=tiers.EXAMPLES[tiers.tier],
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("rooftile")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out, without a skip, what belongs to another tier or needs a GPU that is not here."""
    kept = []
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if getattr(getattr(item, "function", None), "is_hypothesis_test", False):
            marks.add(tiers.PROPERTY)
        why = tiers.left_out(marks) or ("gpu" if "gpu" in marks and not HAS_GPU else "")
        if why:
            config.stash[_LEFT_OUT][why] += 1
        else:
            kept.append(item)
    items[:] = kept


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # a worker of xdist: its parent prints the counts
        session.config.workeroutput["left_out"] = dict(session.config.stash[_LEFT_OUT])


@pytest.hookimpl(optionalhook=True)  # without pytest-xdist there are no workers
def pytest_testnodedown(node: Any) -> None:
    """Each worker collects all tests, so that any one's counts are those of the run."""
    node.config.stash[_LEFT_OUT] = Counter(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    counts = config.stash[_LEFT_OUT]
    if told := [words.format(counts[why]) for why, words in _WHY.items() if counts[why]]:
        terminalreporter.write_line("; ".join(told) + ".")


@pytest.hookimpl(optionalhook=True)  # a GPU node's Python may have pytest without pytest-benchmark
def pytest_benchmark_update_machine_info(machine_info: dict[str, object]) -> None:
    machine_info.pop("node", None)  # a recording names no host


def pytest_report_header() -> str:
    if HAS_GPU:
        return f"GPU: {torch.cuda.get_device_name()}"
    return "GPU: none; Triton kernels run in the interpreter"


@pytest.fixture(scope="session")
def device() -> str:
    """Where Triton kernels are tested."""
    return "cuda" if HAS_GPU else "cpu"


@pytest.fixture(scope="session")
def public_data() -> Path:
    """Folder of public measurements: ``ROOFTILE_PUBLIC_DATA``, or next to the checkout."""
    if not PUBLIC_DATA.is_dir():
        pytest.skip("needs the public measurements (ROOFTILE_PUBLIC_DATA)")
    return PUBLIC_DATA
