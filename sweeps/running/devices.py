"""Register the places where a run takes its samples: GPUs, or nodes in a run on CPUs.

A GPU is recognised by a salted hash. The salt is stored outside the recordings, so that a published
recording does not reveal which card was measured.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import socket
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kernels.common.documents import COUNT, NOT_NEGATIVE, Maybe, misfit
from kernels.common.errors import UserError
from kernels.common.program import USE_FRESH
from kernels.device import Device
from sweeps.claim import claimed
from sweeps.folding.history import History
from sweeps.planning.plan import PlanEntry
from sweeps.running.request import Request
from sweeps.store import Event, read_run, write_json, write_run, write_whole
from sweeps.timing.telemetry import nvml_handle, open_nvml

_SALT = ".salt"
_PLACES = Path("samples", "places.json")
_PLACE = {
    "gpu": COUNT, "id": str, "host": str, "node": COUNT,
    "power_limit_w?": Maybe(NOT_NEGATIVE), "sm_limit_mhz?": Maybe(NOT_NEGATIVE),
}  # fmt: skip
# Relative difference up to which two limits count as equal, because boards report rounded values.
_SAME_LIMIT = 0.02
_LIMITS = {
    "power_limit_w": "a power limit of {:,.0f} W",
    "sm_limit_mhz": "an SM clock limit of {:,.0f} MHz",
}


class DifferentLimitsError(UserError):
    """Raised for a GPU whose power or clock limits differ from those of its run.

    The arguments are limits in words, such as "a power limit of 500 W".
    """

    def __init__(self, limit_here: str, limit_of_run: str) -> None:
        limits = f"has {limit_here}, but the run began with {limit_of_run}"
        super().__init__(
            f"this GPU {limits}. Set this GPU to the run's limit, measure with another --results "
            f"folder, or use {USE_FRESH} to set the run aside and start a new one.",
            exit_code=1,
        )
        self.difference = f"it {limits}"
        """Clause that states both limits, for a message that has already named the GPU."""


def arrive(folder: Path, results: Path, device: Device) -> tuple[int, list[dict[str, Any]]]:
    """Register a device with the run in a folder.

    Call this only inside :func:`sweeps.store.planning`.

    Returns:
        The device's number within the run, and all places of the run. Each place has ``gpu`` (its
        number), ``id`` (its hash), ``node`` (the number of its node) and its limits
        (``power_limit_w`` and ``sm_limit_mhz``; None if unknown).

    Raises:
        DifferentLimitsError: if the device's power or clock limits differ from those of the run.
        UserError: if a file cannot be written.
    """
    # 1. Refuse a device whose limits differ.
    places = read_places(folder)
    limits = _limits_of(device)
    different_limits = find_different_limit(limits, places)
    if different_limits is not None:
        raise DifferentLimitsError(*different_limits)
    # 2. Find the device among the run's places, or add it.
    salt = _salt(results)
    host = _hashed(salt, socket.gethostname())
    device_id = host if device.gpu is None else _hashed(salt, _identity(device))
    place = next((place for place in places if place["id"] == device_id), None)
    if place is None:
        taken_numbers = {place["gpu"] for place in places}
        number = 0 if device.gpu is None else device.gpu
        # Another node's device may have this number. So may another GPU of this node, if
        # CUDA_VISIBLE_DEVICES has changed.
        if number in taken_numbers:
            number = max(taken_numbers) + 1
        nodes = list(dict.fromkeys([*(place["host"] for place in places), host]))
        place = {
            "gpu": number,
            "id": device_id,
            "host": host,
            "node": nodes.index(host),
            **limits,
        }
        places.append(place)
        write_json(folder / _PLACES, {"places": places})
    # 3. Return the places as run.json lists them, without the hashes of the nodes' names.
    public_places = [
        {name: value for name, value in place.items() if name != "host"} for place in places
    ]
    return place["gpu"], sorted(public_places, key=lambda public: public["gpu"])


def take_part(folder: Path, request: Request, device: Device) -> int:
    """Register a device with a folder's run, and return the device's number within the run.

    If the run is on GPUs, also list them in run.json. Call this only inside
    :func:`sweeps.store.planning`.

    Raises:
        DifferentLimitsError: if the device's power or clock limits differ from those of the run.
        UserError: if a file cannot be read or written.
    """
    number, places = arrive(folder, request.results, device)
    if device.gpu is not None:
        hidden_names = set() if request.identify else {"id"}
        gpus = [
            {name: value for name, value in place.items() if name not in hidden_names}
            for place in places
        ]
        record = read_run(folder)
        if record.get("gpus") != gpus:
            write_run(folder, {**record, "gpus": gpus})
    return number


def read_places(folder: Path) -> list[dict[str, Any]]:
    """Return the valid entries of a run's places.json, or an empty list if it cannot be read."""
    with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        text = (folder / _PLACES).read_text(encoding="utf-8")
        return [place for place in json.loads(text)["places"] if not misfit(place, _PLACE)]
    return []


def find_different_limit(
    limits: Mapping[str, Any], places: Sequence[Mapping[str, Any]]
) -> tuple[str, str] | None:
    """Find the first limit in which a GPU differs from the places of a run.

    Return the GPU's limit and the run's limit, both in words, or None if all limits agree.
    Two limits agree if they differ by at most 2%, or if one of them is unknown (None, 0 or
    missing).
    """
    for name, words in _LIMITS.items():
        limit = limits.get(name)
        # The places agree with each other, so the first known limit stands for all of them.
        run_limit = next((place[name] for place in places if place.get(name)), None)
        if limit and run_limit and abs(limit / run_limit - 1) > _SAME_LIMIT:
            return words.format(limit), words.format(run_limit)
    return None


def _salt(results: Path) -> str:
    """Return the salt of a results folder.

    If the salt's file is missing or damaged, create a new salt.
    """
    path = results / _SALT
    with claimed(path):
        salt = ""
        # The file does not exist yet, or is damaged. A file that cannot be read keeps its salt.
        with suppress(FileNotFoundError, UnicodeDecodeError):
            salt = path.read_text(encoding="ascii")
        if not salt:
            salt = secrets.token_hex(16)
            write_whole(path, salt)
        return salt


def _hashed(salt: str, text: str) -> str:
    """Return eight hex digits that identify a string without revealing it."""
    return hashlib.sha256(f"{salt} {text}".encode()).hexdigest()[:8]


def _identity(device: Device) -> str:
    """Return a GPU's UUID or, if PyTorch reports none, its host, PCI address and ordinal."""
    import torch

    properties = torch.cuda.get_device_properties(device.gpu)
    uuid = str(getattr(properties, "uuid", ""))
    if uuid:
        return uuid
    address = [getattr(properties, f"pci_{part}_id", "") for part in ("domain", "bus", "device")]
    return f"{socket.gethostname()} {address} {device.gpu}"


def _limits_of(device: Device) -> dict[str, float | None]:
    """Return the limits of a device by name. An unknown limit is None."""
    limits: dict[str, float | None] = dict.fromkeys(_LIMITS)
    nvml = None if device.gpu is None else open_nvml()
    if nvml is None:
        return limits
    import torch

    handle = nvml_handle(nvml, torch.cuda.get_device_properties(device.gpu))
    if handle is None:
        return limits
    # Drivers and NVML bindings drop queries over time. A limit that cannot be read stays None.
    with suppress(nvml.NVMLError, AttributeError):
        milliwatts = nvml.nvmlDeviceGetPowerManagementLimit(handle)
        limits["power_limit_w"] = float(milliwatts) * 1e-3
    with suppress(nvml.NVMLError, AttributeError):
        megahertz = nvml.nvmlDeviceGetApplicationsClock(handle, nvml.NVML_CLOCK_SM)
        limits["sm_limit_mhz"] = float(megahertz)
    return limits


def last_place(events: Iterable[Event]) -> int | None:
    """Return the number of the place that measured a shard last, or None if no place is recorded.

    ``events`` are the events of the shard, in the order of its sample file.
    """
    # The order of the file decides, because the clocks of two nodes may differ.
    latest_place: int | None = None
    for event in events:
        if event["event"] == "place":
            latest_place = event["place"]
    return latest_place


def has_timed_anchors(events: Sequence[Event], place: int | None, phase: str | None = None) -> bool:
    """Return True if a shard was last measured at ``place``, and an anchor was timed there.

    If ``place`` is None, the shard must have no recorded place. If ``phase`` is given, only anchors
    that were timed in this phase count.
    """
    if place != last_place(events):
        return False
    for event in events:
        if event["event"] != "anchor":
            continue
        # A CPU's anchors have no GPU. A shard that has moved also has the anchors of another GPU.
        gpu = event.get("gpu")
        is_timed_here = gpu is None or gpu == place
        has_phase = phase is None or event["phase"] == phase
        if is_timed_here and has_phase:
            return True
    return False


def begun_elsewhere(planned: Sequence[PlanEntry], histories: Mapping[str, History]) -> list[str]:
    """Return the ids of the cases that start over when their shard moves to another GPU.

    A case starts over if it was begun and its series is not finished. One GPU must measure all
    cases of a series (:mod:`sweeps.planning.lines`), because they are compared with each other.
    """
    from sweeps.planning.lines import series_of  # imports SciPy, which most runs do not need

    series_numbers = series_of([entry.case for entry in planned])
    series_by_case = {
        entry.case.id: series for entry, series in zip(planned, series_numbers, strict=True)
    }
    unfinished_series = {
        series for case, series in series_by_case.items() if not histories[case].closed
    }
    # A case that was not begun, or that starts over already, has an empty history.
    return [
        case
        for case, series in series_by_case.items()
        if series in unfinished_series and histories[case] != History()
    ]
