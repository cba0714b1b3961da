"""Follow the progress of a run that other processes carry out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from sweeps.folding.counts import Tally
from sweeps.planning.plan import PlanEntry
from sweeps.progress import Reporter
from sweeps.store import Event, parse_event, samples_path


def shards_of_node(node: tuple[int, int], total: int) -> range:
    """Return the numbers of the shards that a node measures, counted from 1.

    ``node`` is a pair: the number of the node, counted from 1, and the number of nodes. ``total``
    is the run's number of shards, a multiple of the number of nodes.
    """
    number, nodes = node
    shards_per_node = total // nodes
    first_shard = (number - 1) * shards_per_node + 1
    return range(first_shard, first_shard + shards_per_node)


class Follower:
    """Progress of selected shards of a run, read from their growing sample files."""

    def __init__(
        self, folder: Path, planned: Sequence[PlanEntry], shards: Iterable[int], total: int
    ) -> None:
        """Begin to follow shards; nothing is read yet.

        Args:
            folder: the run's folder.
            planned: all cases of the run.
            shards: the shards to follow, counted from 1.
            total: number of shards of the run.
        """
        self._files = {shard: samples_path(folder, (shard, total)) for shard in shards}
        self._bytes_read = dict.fromkeys(self._files, 0)
        self._tallies = {
            shard: Tally([entry for entry in planned if entry.shard in (None, shard)], [])
            for shard in self._files
        }

    def look(self) -> None:
        """Read the events that were appended since the last call."""
        for shard, path in self._files.items():
            for event in self._new_events(shard, path):
                self._tallies[shard].add(event)

    def _new_events(self, shard: int, path: Path) -> Iterable[Event]:
        """Yield the events that were appended to a shard's file since the last call."""
        try:
            with open(path, "rb") as file:
                file.seek(self._bytes_read[shard])
                appended = file.read()
        except OSError:  # the shard has not begun
            return
        # The worker may still be writing the last line. That line is read at the next look.
        complete_lines, _, _ = appended.rpartition(b"\n")
        if complete_lines:
            self._bytes_read[shard] += len(complete_lines) + len(b"\n")
        for line in complete_lines.split(b"\n"):
            event, _ = parse_event(line)
            if event is not None:  # damaged lines are counted when the run is folded
                yield event

    def unfinished(self, budget: float) -> list[int]:
        """Return the numbers of the unfinished shards.

        A shard is finished if it has ended with a budget of at least ``budget`` seconds. A shard
        that last stopped at a time limit is unfinished.
        """
        return [shard for shard, tally in self._tallies.items() if not tally.is_over(budget)]

    @property
    def tallies(self) -> list[Tally]:
        """Progress of each shard."""
        return [*self._tallies.values()]


def report(followers: Iterable[Follower], reporter: Reporter, budget: float) -> None:
    """Report the progress of all shards together.

    Each shard has a budget of ``budget`` seconds. The reported time left is that of the unfinished
    shard with the most time left.
    """
    tallies = [tally for follower in followers for tally in follower.tallies]
    open_tallies = [tally for tally in tallies if not tally.is_over(budget)]
    least_spent = min((tally.spent for tally in open_tallies), default=budget)
    reporter.update(
        done=sum(tally.seen for tally in tallies),
        total=sum(len(tally.histories) for tally in tallies),
        left=budget - least_spent,
    )
