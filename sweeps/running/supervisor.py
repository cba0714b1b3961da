"""The parent process of a run, which records what its child processes measure.

The cases run in child processes, so that the parent survives a crash.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from kernels.common.counts import counted
from kernels.common.errors import UserError
from kernels.common.program import command
from sweeps.cases.case import Case
from sweeps.folding.counts import STOPPED, Tally
from sweeps.folding.fold import fold
from sweeps.folding.history import BLOCKS, PROCESSES
from sweeps.folding.raised_ceilings import gemms_above_peak
from sweeps.folding.steadiness import choose_repeats, repeating_seconds
from sweeps.measuring.child import Assignment
from sweeps.planning.compiling import compiling
from sweeps.planning.plan import PlanEntry, naming_reserve
from sweeps.process import terminated_as_interrupt, undisturbed
from sweeps.progress import Reporter
from sweeps.running.child_process import Child, how_it_died
from sweeps.running.devices import begun_elsewhere, has_timed_anchors, last_place
from sweeps.running.experimental import (
    Feature,
    crashed_features,
    feature_of,
    refusal,
    unfinished_with,
)
from sweeps.running.run import MEASURE, Run
from sweeps.running.watch import Watch
from sweeps.store import Event, SampleLog, read_events
from sweeps.timing.statistics import CHECKPOINTS

_PATIENCE = 10.0  # multiple of the expected seconds after which a child counts as hung
_MAX_CRASHES = 2  # crashes of a case before it is given up, so that it is retried once
_MAX_IDLE_CRASHES = 3  # children in a row that crash without a sample before the run ends
_SIDE_WORK = {  # kinds of work other than measuring, as messages describe them
    "anchor": "times the anchors",
    "repeat": "re-times cases", "confirm": "re-times pairs", "name": "names kernels",
}  # fmt: skip
_NO_LIMIT = 1e9  # seconds of budget for work that may take as long as it needs
_MAX_FUTILE_NAMINGS = 3  # processes in a row that named no kernel


def carry_out(run: Run, reporter: Reporter, note: Callable[[str], None]) -> str:
    """Measure until the plan is done, the budget is spent or the time is up, and fold the samples.

    If the run has peers, their parent process folds the samples instead. Otherwise the samples are
    folded here, even after an error or an interrupt.

    Returns:
        Reason why measuring ended: ``done``, ``budget``, or ``time`` if the run's ``stop_at`` came
        first.

    Raises:
        UserError: if another process is writing the shard's samples, the measuring process fails,
            or the samples cannot be written or folded.
        OSError: if a sample file cannot be read.
        KeyboardInterrupt: if the user interrupts.
    """
    with _supervisor(run, reporter, note) as supervisor:
        return supervisor.supervise()


def confirm(
    run: Run,
    pairs: Sequence[tuple[PlanEntry, PlanEntry]],
    reporter: Reporter,
    note: Callable[[str], None],
) -> None:
    """Re-time pairs of the run's cases in new processes, then fold the samples.

    The first case of each pair times the original shape, and the second times the candidate.

    Raises:
        UserError: if another process is writing the shard's samples, or the samples cannot be
            written or folded.
        OSError: if a sample file cannot be read.
        KeyboardInterrupt: if the user interrupts.
    """
    with _supervisor(run, reporter, note) as supervisor:
        supervisor.confirm(pairs)


@contextmanager
def _supervisor(run: Run, reporter: Reporter, note: Callable[[str], None]) -> Iterator[_Supervisor]:
    """Yield the supervisor of a run, and fold the samples afterwards if the run has no peers."""
    with SampleLog(run.folder, run.shard) as log, terminated_as_interrupt():
        events, damaged = read_events(run.folder, run.shard)
        for sentence in damaged:
            note(sentence)
        try:
            yield _Supervisor(run, log, events, reporter, note)
        finally:
            # The samples are folded by the plan in run.json. Tests also carry out runs without one.
            if run.peers is None and (run.folder / "run.json").exists():
                # A second Ctrl-C must not stop the folding halfway.
                with undisturbed():
                    fold(run.folder)


class _Supervisor:
    """Supervisor of a shard's child processes, which run one at a time."""

    def __init__(
        self,
        run: Run,
        log: SampleLog,
        events: list[Event],
        reporter: Reporter,
        note: Callable[[str], None],
    ) -> None:
        self._run = run
        self._log = log
        self._reporter = reporter
        self._note = note
        self._tally = Tally(run.planned, events)
        self._idle_crashes = 0  # children in a row that crashed without taking a sample
        self._starting = 0.0  # seconds from the last child's start to its first message
        # Cases that are handled one by one, because a child died while several were in flight.
        self._careful: set[str] = set()
        self._watch = Watch(self._record, run.worker, run.arguments.get("gpu"), run.parent)
        # True once this call or an earlier one has taken a sample.
        self._measured = any(event["event"] == "sample" for event in events)
        self._place = last_place(events)  # place of the latest earlier call that measured the shard
        self._anchored = has_timed_anchors(events, run.place)
        self._blamed: set[str] = set()  # cases in flight when a confirming process died
        # Number of blocks that the present confirming process has taken of each pair.
        self._blocks: Counter[tuple[str, ...]] = Counter()

    def supervise(self) -> str:
        """Measure as :func:`carry_out` does, without folding."""
        # 1. Time the anchors, and wait until this run may measure.
        self._arrive()
        self._time_anchors()
        if self._run.peers:
            self._run.peers.wait(MEASURE)
        # 2. Measure, while other processes compile. Other programs' processes on the GPU are
        # counted before and afterwards, when no process of this run uses it.
        self._refuse_crashed_features()
        compiled_meanwhile = self._unfinished() if self._run.compile_in_parallel else []
        self._watch.look_at_gpu()
        with compiling(self._run.arguments, compiled_meanwhile, self._run.workers):
            end = self._measure()
        self._watch.look_at_gpu()
        # 3. Re-time cases and name kernels in further processes.
        self._repeat_cases()
        self._name_kernels()
        # 4. Record the end, unless an earlier call recorded the same one.
        if self._run.whole and not self._tally.ended(end, self._run.budget):
            self._record_own_event("end", why=end, budget=self._run.budget)
        return end

    def _arrive(self) -> None:
        """Record a change of the shard's place, and the cases that therefore start over.

        Nothing is recorded if the place is not known or the shard is over.
        """
        run = self._run
        if run.place is None or run.place == self._place or self._tally.is_over(run.budget):
            return
        if self._place is not None:
            for case in begun_elsewhere(run.planned, self._tally.histories):
                self._record_own_event("moved", case)
        self._record_own_event("place", place=run.place)

    def _record_own_event(self, event: str, case: str = "", **more: Any) -> None:
        self._record(
            {
                "event": event,
                "case": case,
                "worker": self._run.worker,
                "cost": 0.0,
                "at": time.time(),
                **more,
            }
        )

    def _time_anchors(self) -> None:
        """Time the anchors of the run, if it has any.

        A run without peers skips them if an earlier call has timed them at this place. A run with
        peers always takes part, because peers time their anchors one at a time, then all at once.
        """
        run = self._run
        has_peers = run.peers is not None
        if run.anchors and (has_peers or not self._anchored):
            assignment = self._assignment(run.anchors, _NO_LIMIT, work="anchor")
            self._run_child(replace(assignment, options=run.anchor_options, waits=has_peers))

    def confirm(self, pairs: Sequence[tuple[PlanEntry, PlanEntry]]) -> None:
        """Re-time pairs, each in :data:`PROCESSES` processes."""
        for number in range(1, PROCESSES + 1):
            self._note(
                f"Re-timing {counted(len(pairs), 'pair')} of an original shape and its candidate "
                f"(process {number} of {PROCESSES}) …"
            )
            # A block has two samples of each case. The plan's expected seconds are for six samples.
            samples = 2 * BLOCKS
            planned_seconds = sum(entry.expected for pair in pairs for entry in pair)
            seconds = self._starting + samples / CHECKPOINTS[0] * planned_seconds
            self._reporter.begin("Confirming", seconds, (PROCESSES - number) * seconds)
            self._confirm_once(pairs)

    def _confirm_once(self, pairs: Sequence[tuple[PlanEntry, PlanEntry]]) -> None:
        """Re-time pairs in one process.

        If the process dies or fails, another process times the remaining pairs.
        """
        # Each pair of entries, by the ids of its two cases.
        remaining = {tuple(entry.case.id for entry in pair): pair for pair in pairs}
        while remaining:
            # While the process runs, _record() counts the blocks of each pair. If the process dies,
            # _crashed_confirming() finds the case that is to blame or has to be run by itself.
            self._blamed.clear()
            self._blocks.clear()
            careful_before = len(self._careful)
            planned = [entry for pair in remaining.values() for entry in pair]
            assignment = self._assignment(planned, _NO_LIMIT, work="confirm")
            if self._run_child(assignment) is not None:
                return
            complete = {pair for pair, blocks in self._blocks.items() if blocks == BLOCKS}
            if not self._blamed and not complete and len(self._careful) == careful_before:
                return  # the process ended before its first pair, and another one would, too
            remaining = {
                ids: pair
                for ids, pair in remaining.items()
                if ids not in complete and self._blamed.isdisjoint(ids)
            }

    def _unfinished(self) -> list[Case]:
        histories = self._tally.histories
        return [entry.case for entry in self._run.planned if not histories[entry.case.id].closed]

    def _measure(self) -> str:
        """Run children until measuring ends, and return why: ``done``, ``budget`` or ``time``."""
        run, tally = self._run, self._tally
        # 1. Find the limits. Kernels are named last, and measuring must leave time for that.
        seconds_left = run.budget - tally.spent
        if run.stop_at is not None:
            seconds_left = min(seconds_left, run.stop_at - time.monotonic())
        reserve = self._naming_reserve(seconds_left)
        budget = run.budget - reserve
        until = math.inf if run.stop_at is None else run.stop_at - reserve
        # 2. Run children. After a crash, the next one continues.
        announced = False
        while not tally.complete:
            if tally.spent >= budget:
                return "budget"
            if time.monotonic() >= until:
                return STOPPED
            if not announced:
                announced = True
                limit = min(budget - tally.spent, until - time.monotonic())
                cases = counted(len(run.planned), "case")
                self._note(f"Measuring {cases} for at most {limit:,.0f} s …")
                seconds_after = repeating_seconds(run.budget) if run.repeats else 0.0
                self._reporter.begin("Measuring", limit, seconds_after)
            end = self._run_child(self._assignment(run.planned, budget, until))
            # A child reports ``budget`` even if it ended at its time limit.
            if end == "budget" and time.monotonic() >= until:
                return STOPPED
            if end is not None:
                return end
        return "done"

    def _naming_reserve(self, seconds: float) -> float:
        """Return how many of these ``seconds`` are reserved for naming kernels."""
        cases = [entry.case for entry in self._run.planned]
        # The seconds are negative if more than the budget or the time is used up.
        return naming_reserve(cases, max(0.0, seconds)) if self._run.names_kernels else 0.0

    def _repeat_cases(self) -> None:
        """Re-time some cases in another process, to see how well their medians repeat."""
        if not self._run.repeats:
            return
        # 1. Choose the cases.
        histories = self._tally.histories
        machine = self._run.arguments.get("machine")
        above_peak: dict[str, PlanEntry] = {}  # by dtype
        if machine is not None and machine.kind == "cpu":
            # A peak is raised to what a case reached only if another process reaches it as well.
            above_peak = gemms_above_peak(self._run.planned, histories, machine.peaks)
        chosen = choose_repeats(self._run.planned, histories, self._run.budget, above_peak.values())
        if not chosen:
            return
        # 2. Leave them out if too little time is left.
        if self._run.stop_at is not None:
            seconds_left = self._run.stop_at - time.monotonic()
            seconds_left -= self._naming_reserve(seconds_left)
            # A case's expected time is for six samples. It gets more samples here, so twice the
            # time is required.
            if seconds_left < self._starting + 2 * sum(entry.expected for entry in chosen):
                return
        # 3. Re-time them.
        self._note(f"Re-timing {counted(len(chosen), 'case')} in a new process …")
        naming = self._naming_reserve(self._run.budget)
        self._reporter.begin("Repeating", repeating_seconds(self._run.budget), naming)
        self._run_child(self._assignment(chosen, self._run.budget, work="repeat"))

    def _name_kernels(self) -> None:
        """Name the kernels of the timed cases, in processes that time nothing.

        A profiler slows the launches of the process that loads it, even after the profiler's
        session.
        """
        if not self._run.names_kernels:
            return
        stop_at = math.inf if self._run.stop_at is None else self._run.stop_at
        futile_processes = 0
        unnamed = set(self._tally.unnamed())
        while unnamed and futile_processes < _MAX_FUTILE_NAMINGS:
            # If the remaining time only suffices to start a process, leave naming to the next call.
            if time.monotonic() + self._starting > stop_at:
                return
            self._note(f"Naming the kernels of {counted(len(unnamed), 'case')} …")
            entries = [entry for entry in self._run.planned if entry.case.id in unnamed]
            reserve = naming_reserve([entry.case for entry in entries], self._run.budget)
            self._reporter.begin("Naming kernels", reserve)
            self._run_child(self._assignment(entries, self._run.budget, work="name"))
            still_unnamed = set(self._tally.unnamed())
            futile_processes = futile_processes + 1 if still_unnamed == unnamed else 0
            unnamed = still_unnamed
        if unnamed:
            self._note(f"The kernels of {counted(len(unnamed), 'case')} could not be named.")
        for case in unnamed:
            self._give_up_naming(case)

    def _give_up_naming(self, case: str) -> None:
        """Record an empty kernel name for a case, so that no later process names its kernels."""
        self._record_own_event("facts", case, facts={"kernel": ""})

    def _assignment(
        self,
        planned: Sequence[PlanEntry],
        budget: float,
        until: float = math.inf,
        work: str = "measure",
    ) -> Assignment:
        run = self._run
        return Assignment(
            bench=run.bench,
            arguments=run.arguments,
            planned=planned,
            known=self._tally.all(),
            worker=run.worker,
            budget=budget,
            spent=self._tally.spent,
            until=until,
            careful=frozenset(self._careful),
            work=work,
            longest=run.longest,
        )

    def _run_child(self, assignment: Assignment) -> str | None:
        """Run one child, and return what :meth:`_listen` returns."""
        child = Child.start(assignment)
        if assignment.work == "measure":
            self._watch.begin()
        try:
            return self._listen(child, assignment.work)
        finally:
            child.connection.close()
            child.process.kill()
            child.process.join()

    def _listen(self, child: Child, work: str) -> str | None:
        """Receive a child's messages until the child ends, and act on them.

        :func:`sweeps.measuring.child.work` describes the messages. Return why the child ended, or
        None if the child died or its side work (:data:`_SIDE_WORK`) failed.
        """
        while (message := self._next_message(child, work)) is not None:
            kind, *content = message
            match kind:
                case "visit":  # the child begins to handle cases
                    child.cases, expected = content
                    child.since = time.monotonic()
                    child.patience = max(self._run.min_patience, _PATIENCE * expected)
                case "event":
                    (event,) = content
                    if event["event"] == "sample":
                        child.samples += 1
                    self._record(event)
                    if work == "measure":
                        self._tally.report(self._reporter, self._run.budget)
                        self._watch.look_now_and_then()
                case "wait" if self._run.peers:
                    (gate,) = content
                    self._run.peers.wait(gate)
                    child.connection.send("go")
                case "end":
                    if work == "measure":
                        self._watch.look()
                    return str(content[0])
                case "poisoned":  # the child's context on the GPU is broken, so it ends itself
                    self._handle_death(child, work, str(content[0]))
                    return None
                # The other message is ``failed``. A failure of side work does not end the run.
                case _ if work != "measure":
                    self._note(f"The process that {_SIDE_WORK[work]} stopped: {content[0]}")
                    return None
                case _:
                    outcome = "Nothing could be measured"
                    if self._measured:
                        outcome = "The measuring process stopped"
                    raise UserError(f"{outcome}: {content[0]}", exit_code=1)
        return None

    def _next_message(self, child: Child, work: str) -> tuple[Any, ...] | None:
        """Return a child's next message, or None after handling the death of the child."""
        if not child.sends_in_time():
            child.process.kill()
            self._handle_death(child, work, f"killed after hanging for {child.patience:.0f} s")
            return None
        try:
            message: tuple[Any, ...] = child.connection.recv()
        except (EOFError, ConnectionResetError):
            child.process.join()
            self._handle_death(child, work, how_it_died(child.process.exitcode))
            return None
        if not child.spoke:
            child.spoke = True
            # No visit has begun yet, so ``since`` is the moment at which the child was started.
            self._starting = time.monotonic() - child.since
        return message

    def _handle_death(self, child: Child, work: str, how: str) -> None:
        """Record or report the death of a child."""
        match work:
            case "measure":
                self._crashed(child, how)
            case "confirm":
                self._crashed_confirming(child, how)
            case "name":
                self._crashed_naming(child, how)
            case _:
                self._note_end(work, how)

    def _record(self, event: Event) -> None:
        """Append an event to the shard's sample file, and count it."""
        self._log.append(event)
        if event["event"] == "sample":
            self._measured = True
        self._tally.add(event)
        if event["event"] == "confirm":
            self._blocks[event["case"], event["against"]] += 1

    def _crashed(self, child: Child, how: str) -> None:
        """Record the crash of a case and tell the user, if exactly one case was in flight.

        A crash without a case to blame could repeat forever, so it ends the run if the last
        :data:`_MAX_IDLE_CRASHES` children all crashed without a sample.
        """
        # A child that took samples made progress.
        self._idle_crashes = 0 if child.samples else self._idle_crashes + 1
        # 1. If several cases were in flight, the next child prepares them one by one.
        if len(child.cases) != 1:
            self._careful.update(child.cases)
            if self._idle_crashes >= _MAX_IDLE_CRASHES:
                raise UserError(
                    f"The measuring process crashed {_MAX_IDLE_CRASHES} times without taking a "
                    f"sample ({how}). Run {command('sweeps doctor')} to look for the cause.",
                    exit_code=1,
                )
            return
        # 2. Record the crash of the case that is to blame.
        (case_id,) = child.cases
        self._record(
            {
                "event": "crash",
                "case": case_id,
                "worker": self._run.worker,
                "cost": round(time.monotonic() - child.since, 6),
                "message": how,
            }
        )
        # The canary is not in the plan and has no experimental feature.
        cases = {entry.case.id: entry.case for entry in self._run.planned}
        case = cases.get(case_id)
        label = "the canary GEMM" if case is None else str(case)
        self._note(f"The measuring process ended during {label}: {how}.")
        # 3. Give the case up after its second crash. If it has an experimental feature, give it up
        # after the first, together with all unfinished cases that have this feature.
        crashes = self._tally.all()[case_id].crashes
        feature = None if case is None else feature_of(case)
        if crashes >= _MAX_CRASHES or feature:
            how_often = f"{crashes} times " if crashes > 1 else ""
            self._fail(case_id, "error", f"the process ended {how_often}during this case: {how}.")
        if feature:
            self._refuse_feature(feature, how)

    def _crashed_naming(self, child: Child, how: str) -> None:
        """Give up naming the kernels of the case in flight, if there was exactly one."""
        if len(child.cases) == 1:
            (case,) = child.cases
            self._give_up_naming(case)
        self._note_end("name", how)

    def _crashed_confirming(self, child: Child, how: str) -> None:
        """Blame the case in flight, if there was exactly one, and tell the user.

        The next process leaves out all pairs with a blamed case. If several cases were in flight,
        the next process prepares them one by one.
        """
        if len(child.cases) == 1:
            self._blamed.update(child.cases)
        else:
            self._careful.update(child.cases)
        self._note_end("confirm", how)

    def _note_end(self, work: str, how: str) -> None:
        """Tell the user how a child that did side work ended."""
        self._note(f"The process that {_SIDE_WORK[work]} ended: {how}.")

    def _refuse_crashed_features(self) -> None:
        """Give up unfinished cases whose experimental feature caused a crash in an earlier call."""
        for feature in crashed_features(self._run.planned, self._tally.histories):
            self._refuse_feature(feature, "in an earlier call")

    def _refuse_feature(self, feature: Feature, how: str) -> None:
        """Give up all unfinished cases that use a feature."""
        for case in unfinished_with(feature, self._run.planned, self._tally.histories):
            self._fail(case, "unsupported", refusal(feature, how))

    def _fail(self, case: str, status: str, message: str) -> None:
        """Record that a case has no time; measurements.csv shows ``status`` and ``message``."""
        self._record_own_event("outcome", case, status=status, message=message)
