from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from filelock import SoftFileLease

from kernels.common.errors import UserError
from sweeps import claim as claim_module
from sweeps import plain_lease
from sweeps.claim import SUFFIX, Claim, claimed
from sweeps.store import SampleLog

_HOLD = """
import sys, time, types
from pathlib import Path
if sys.argv[2] == "plain":
    sys.modules["filelock"] = types.ModuleType("filelock")  # an old one
from sweeps.claim import Claim
claim = Claim(Path(sys.argv[1]), "taken")
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture(params=["filelock", "plain"])
def lease(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test with filelock's lease, and with the replacement for an old filelock."""
    if request.param == "plain":
        monkeypatch.setattr(claim_module, "SoftFileLease", plain_lease.PlainLease)
        monkeypatch.setattr(claim_module, "Timeout", plain_lease.Timeout)
    return str(request.param)


def test_one_process_at_a_time(tmp_path: Path, lease: str) -> None:
    path, order = tmp_path / "plan", []

    def wait_and_enter() -> None:
        with claimed(path):
            order.append("second")

    with claimed(path):
        other = threading.Thread(target=wait_and_enter)
        other.start()
        time.sleep(0.3)
        order.append("first")
    other.join()
    assert order == ["first", "second"]
    assert list(tmp_path.iterdir()) == []


def test_the_claim_of_a_killed_process_is_taken_over_at_once(tmp_path: Path, lease: str) -> None:
    path = tmp_path / "1-of-2.jsonl"
    child = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(path), lease], stdout=subprocess.PIPE,
        cwd=Path(claim_module.__file__).parents[1],
    )  # fmt: skip
    assert child.stdout is not None
    child.stdout.readline()
    with pytest.raises(UserError, match="taken"):
        Claim(path, "taken")
    child.send_signal(signal.SIGKILL)
    child.wait()
    claim = Claim(path, "taken")
    assert not claim.lost
    with pytest.raises(UserError, match="taken"):
        Claim(path, "taken")
    claim.release()
    Claim(path, "taken").release()


def test_a_node_that_is_gone_is_waited_for_until_its_claim_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This node cannot see another node's processes, only that they do not renew a claim."""
    monkeypatch.setattr(claim_module, "_LEASE_SECONDS", 0.5)
    path = tmp_path / "shard"
    Claim(path, "taken").release()
    record = [
        "filelock/2", f"pid={os.getpid()}", "host=another-node", "mode=lease", "token=" + "0" * 32,
        "duration=0.5",
    ]  # fmt: skip
    marker = path.with_name(path.name + SUFFIX)
    marker.write_text("\n".join(record) + "\n")
    marker.chmod(0o644)
    Claim(path, "taken").release()


def test_a_folder_that_cannot_be_written_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: object, **limits: float) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(SoftFileLease, "acquire", full)
    with pytest.raises(UserError, match=r"could not be written \(No space left on device\)"):
        Claim(tmp_path / "shard", "taken")


def test_a_full_disk_leaves_no_claim_without_an_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No process could take over an empty file, so the run could never be resumed."""

    def full() -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "shard.claim"
    lease = plain_lease.PlainLease(path, 1.0, 0o644)
    with monkeypatch.context() as patch:
        patch.setattr(plain_lease, "_claim_text", full)
        with pytest.raises(OSError, match="No space left"):
            lease.acquire(0.0, 0.01)
        assert not path.exists()
        ended = subprocess.Popen(["true"])
        ended.wait()
        path.write_text(f"{ended.pid}\n{socket.gethostname()}\n", encoding="utf-8")
        with pytest.raises(plain_lease.Timeout):
            lease.acquire(0.0, 0.01)
        assert lease.owner is not None
    lease.acquire(0.0, 0.01)
    assert path.read_text(encoding="utf-8") == plain_lease._claim_text()
    lease.release()


def test_a_claim_with_a_damaged_process_id_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "shard.claim"
    path.write_text(f"{10**30}\n{socket.gethostname()}\n", encoding="utf-8")
    lease = plain_lease.PlainLease(path, 1.0, 0o644)
    lease.acquire(0.0, 0.01)
    assert path.read_text(encoding="utf-8") == plain_lease._claim_text()
    lease.release()


def test_whoever_was_taken_over_knows_it_and_writes_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim_module, "_LEASE_SECONDS", 0.3)
    event = {"event": "aside", "case": "", "worker": "1/1"}

    def go_on(log: SampleLog) -> None:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            log.append(event)
            time.sleep(0.05)

    with SampleLog(tmp_path, (1, 1)) as log:
        log.append(event)
        (tmp_path / "samples" / f"1-of-1.jsonl{SUFFIX}").unlink()
        with pytest.raises(UserError, match="lost its claim on .* or the claim file was removed"):
            go_on(log)
