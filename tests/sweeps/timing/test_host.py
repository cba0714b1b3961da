from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from sweeps.timing.host import HostWatch


class FakeProc:
    """``/proc`` of a machine with two cores, 100 ticks per second, and our process 7."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.seconds = folder, 0.0
        self.ours = self.theirs = self.stolen = self.idle = 0
        self.write()

    def write(self) -> None:
        used = self.ours + self.theirs
        line = f"cpu  {used} 0 0 {self.idle} 0 0 0 {self.stolen} 0 0\ncpu0 0 0 0 0 0 0 0 0 0 0\n"
        (self.folder / "stat").write_text(line, encoding="ascii")
        (self.folder / "7").mkdir(exist_ok=True)
        fields = " ".join(["S", *"0" * 10, str(self.ours), "0", "0", "0", "0"])
        (self.folder / "7" / "stat").write_text(f"7 (a) b) {fields}\n", encoding="ascii")

    def go_on(self, seconds: float, ours: float, theirs: float = 0.0, stolen: float = 0.0) -> None:
        """Let time pass. Both cores are idle in the time that the arguments do not use."""
        self.seconds += seconds
        self.ours += round(100 * ours)
        self.theirs += round(100 * theirs)
        self.stolen += round(100 * stolen)
        self.idle += round(100 * (2 * seconds - ours - theirs - stolen))
        self.write()

    def watch(self) -> HostWatch:
        return HostWatch(lambda: [7], self.folder, lambda: self.seconds)


def test_what_others_used_is_not_what_we_used(tmp_path: Path) -> None:
    proc = FakeProc(tmp_path)
    watch = proc.watch()
    proc.go_on(10.0, ours=19.0)
    assert watch.since() == 10.0
    use = watch.look()
    assert use is not None
    assert (use.seconds, use.steal, use.others) == (10.0, 0.0, 0.0)
    proc.go_on(10.0, ours=10.0, theirs=8.0, stolen=2.0)
    use = watch.look()
    assert use is not None
    assert use.steal == pytest.approx(0.1)
    assert use.others == pytest.approx(0.4)


def test_a_process_that_ends_while_it_is_read_counts_as_ended(tmp_path: Path) -> None:
    proc = FakeProc(tmp_path)
    watch = proc.watch()
    proc.go_on(10.0, ours=5.0)
    (tmp_path / "7" / "stat").write_text("", encoding="ascii")
    assert watch.look() is None  # our part of the used time is not known


def test_no_share_is_negative_if_the_counter_of_stolen_time_decreases(tmp_path: Path) -> None:
    proc = FakeProc(tmp_path)
    proc.go_on(10.0, ours=5.0, stolen=5.0)
    watch = proc.watch()
    proc.go_on(10.0, ours=5.0, stolen=-2.0)
    use = watch.look()
    assert use is not None
    assert (use.steal, use.others) == (0.0, 0.0)


def test_what_a_process_used_that_ended_is_counted_once(tmp_path: Path) -> None:
    """The ticks of process 8 go to process 7, which reaped it. Process 9 has started meanwhile."""
    proc = FakeProc(tmp_path)
    alive = [7, 8]

    def tick(pid: int, own: int, reaped: int = 0) -> None:
        (tmp_path / str(pid)).mkdir(exist_ok=True)
        fields = " ".join(["S", *"0" * 10, str(own), "0", str(reaped), "0", "0"])
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a) {fields}\n", encoding="ascii")

    tick(8, own=400)
    watch = HostWatch(lambda: alive, tmp_path, lambda: proc.seconds)
    alive[:] = [7, 9]
    proc.go_on(10.0, ours=5.0, theirs=4.0)
    tick(7, own=200, reaped=600)  # process 8 had already used 400 of these at the first look
    tick(9, own=100)
    use = watch.look()
    assert use is not None
    assert use.others == pytest.approx(0.2)


def test_nothing_is_said_where_the_system_or_a_process_is_gone(tmp_path: Path) -> None:
    proc = FakeProc(tmp_path)
    watch = proc.watch()
    proc.go_on(5.0, ours=1.0)
    (tmp_path / "7" / "stat").unlink()
    assert watch.look() is None
    (tmp_path / "stat").unlink()
    proc.seconds += 5.0
    assert watch.look() is None
    assert HostWatch(lambda: [7], tmp_path / "none").look() is None


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="no /proc/stat here")
def test_this_host_tells() -> None:
    """This host reports its use, whatever else runs on it."""
    watch = HostWatch(lambda: [os.getpid()])
    begin = time.monotonic()
    while time.monotonic() < begin + 0.3:
        pass
    use = watch.look()
    assert use is not None
    assert use.seconds >= 0.3
