"""A shard that goes on with another GPU: which of its cases must begin anew there.

A series is compared within itself, and GPUs of one model differ by several percent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from sweeps.planning.plan import PlanEntry
from sweeps.running.fold import History
from sweeps.store import Event


def last_place(events: Iterable[Event]) -> int | None:
    """The number of the GPU, or of a CPU's node, that a shard was last measured on."""
    places = [(event["at"], event["place"]) for event in events if event["event"] == "place"]
    return max(places)[1] if places else None


def begun_elsewhere(planned: Sequence[PlanEntry], known: Mapping[str, History]) -> list[str]:
    """The cases of which something is known, in series that are not finished.

    Args:
        planned: the shard's cases.
        known: their histories.
    """
    from sweeps.planning.series import series_of  # SciPy, which most runs can do without

    numbers = series_of([entry.case for entry in planned])
    ids = [entry.case.id for entry in planned]
    unfinished = {n for n, case in zip(numbers, ids, strict=True) if not known[case].closed}
    return [
        case for number, case in zip(numbers, ids, strict=True)
        if number in unfinished and known[case] != History()
    ]  # fmt: skip
