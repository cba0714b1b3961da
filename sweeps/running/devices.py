"""Places where a run takes its samples: which GPUs on which nodes, numbered within the run.

A GPU is recognised by a hash of its UUID with a random salt. The salt stays with the results, so
that nobody who has only the published files can find out which card it was. On one node, a GPU
keeps the number that PyTorch gives it, if that is free. The places of a CPU's run are its nodes.
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
# Two limits that differ by no more than this share are the same: boards report rounded values.
_SAME = 0.02
_LIMITS = {
    "power_limit_w": "a power limit of {:.0f} W",
    "sm_limit_mhz": "an SM clock of {:.0f} MHz",
}


def arrive(folder: Path, results: Path, device: Device) -> tuple[int, list[dict[str, Any]]]:
    """Register a device with the run of a folder. Return its number and all places of the run.

    Call this only while nobody else plans in that folder.

    Args:
        folder: the run's folder.
        results: the folder of the salt, so that a GPU has one hash in all runs there.
        device: the device that will take samples.

    Returns:
        The device's number within the run, and for each place ``gpu`` (its number), ``id``,
        ``node`` (a number), and the settings ``power_limit_w`` and ``sm_limit_mhz`` (None: not
        known).

    Raises:
        UserError: if the device's power or clocks are limited differently from those of the run.
    """
    # 1. Refuse a device whose limits differ.
    places = read_places(folder)
    settings = _settings(device)
    different_limits = limits_apart(settings, places)
    if different_limits is not None:
        limit_here, limit_of_run = different_limits
        raise UserError(
            f"this GPU has {limit_here}, but the run began with {limit_of_run}. Leave this GPU "
            f"out, measure it with another --results folder, or use {USE_FRESH} to set the run "
            "aside and start a new one.",
            exit_code=1,
        )
    # 2. Find the device among the run's places, or add it.
    salt = _salt(results)
    host = _hashed(salt, socket.gethostname())
    device_id = host if device.gpu is None else _hashed(salt, _identity(device))
    place = next((place for place in places if place["id"] == device_id), None)
    if place is None:
        taken_numbers = {place["gpu"] for place in places}
        number = device.gpu or 0
        if number in taken_numbers:  # another node has a GPU with this number
            number = max(taken_numbers) + 1
        nodes = list(dict.fromkeys([*(place["host"] for place in places), host]))
        place = {
            "gpu": number,
            "id": device_id,
            "host": host,
            "node": nodes.index(host),
            **settings,
        }
        places.append(place)
        write_json(folder / _PLACES, {"places": places})
    # 3. Return the places as run.json lists them, where a node has only its number.
    public_places = [
        {name: value for name, value in place.items() if name != "host"} for place in places
    ]
    return place["gpu"], sorted(public_places, key=lambda public: public["gpu"])


def take_part(folder: Path, request: Request, device: Device) -> int:
    """Register a device with a folder's run, and list the run's GPUs in run.json.

    Return the device's number within the run. Call this only while nobody else plans in that
    folder, because it writes the GPUs to run.json.

    Args:
        folder: the run's folder.
        request: the results folder, and whether run.json identifies GPUs.
        device: the device that will take samples.

    Raises:
        UserError: if the device's power or clocks are limited differently from those of the run.
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
    """Return the places of a run as its nodes recognise them; none if they are not recorded.

    Each place has what :func:`arrive` returns, and ``host``, a hash of the node's name.
    """
    with suppress(OSError, ValueError, TypeError, KeyError):
        text = (folder / _PLACES).read_text(encoding="utf-8")
        return [dict(place) for place in json.loads(text)["places"]]
    return []


def limits_apart(
    settings: Mapping[str, Any], places: Sequence[Mapping[str, Any]]
) -> tuple[str, str] | None:
    """Compare the limits of a GPU with those of the other places.

    Return the first limit that differs, for the GPU and for the others, in words; None if all
    agree. A limit that is not known agrees with any other.
    """
    for name, words in _LIMITS.items():
        limit = settings.get(name)
        # The places agree with each other, so the first known limit stands for all of them.
        run_limit = next((place[name] for place in places if place.get(name)), None)
        if limit and run_limit and abs(limit / run_limit - 1) > _SAME:
            return words.format(limit), words.format(run_limit)
    return None


def _salt(results: Path) -> str:
    """Return the salt of a results folder; draw and store it at first use."""
    path = results / _SALT
    with claimed(path):
        try:
            return path.read_text(encoding="ascii")
        except (OSError, UnicodeDecodeError):
            write_whole(path, secrets.token_hex(16))
    return path.read_text(encoding="ascii")


def _hashed(salt: str, text: str) -> str:
    """Return eight hex digits that stand for a text and do not reveal it without the salt."""
    return hashlib.sha256(f"{salt} {text}".encode()).hexdigest()[:8]


def _identity(device: Device) -> str:
    """Return what identifies a card: its UUID.

    An old PyTorch does not report the UUID. The node and the PCI address stand in for it then.
    """
    import torch

    properties = torch.cuda.get_device_properties(device.gpu)
    uuid = str(getattr(properties, "uuid", ""))
    address = [getattr(properties, f"pci_{part}_id", "") for part in ("domain", "bus", "device")]
    return uuid or f"{socket.gethostname()} {address} {device.gpu}"


def _settings(device: Device) -> dict[str, float | None]:
    """Return the limits that were set for power and clocks; None if NVML does not report them."""
    settings: dict[str, float | None] = dict.fromkeys(_LIMITS)
    nvml = None if device.gpu is None else open_nvml()
    if nvml is None:
        return settings
    import torch

    handle = nvml_handle(nvml, torch.cuda.get_device_properties(device.gpu))
    # Newer bindings drop queries that newer drivers no longer answer.
    with suppress(nvml.NVMLError, AttributeError):
        milliwatts = nvml.nvmlDeviceGetPowerManagementLimit(handle)
        settings["power_limit_w"] = float(milliwatts) * 1e-3
    with suppress(nvml.NVMLError, AttributeError):
        megahertz = nvml.nvmlDeviceGetApplicationsClock(handle, nvml.NVML_CLOCK_SM)
        settings["sm_limit_mhz"] = float(megahertz)
    return settings


def last_place(events: Iterable[Event]) -> int | None:
    """Return the place where a shard was last measured: the number of the GPU or of a CPU's node.

    Return None if it was not measured.
    """
    visits = [(event["at"], event["place"]) for event in events if event["event"] == "place"]
    if not visits:
        return None
    _, place = max(visits)
    return place


def begun_elsewhere(planned: Sequence[PlanEntry], known: Mapping[str, History]) -> list[str]:
    """Return the ids of cases that have events and belong to a series that is not finished.

    A series has the cases that are compared with each other (:mod:`sweeps.planning.lines`), so one
    GPU must measure all of them.

    Args:
        planned: the shard's cases.
        known: the histories of these cases.
    """
    from sweeps.planning.lines import series_of  # needs SciPy, which most runs do without

    series_numbers = series_of([entry.case for entry in planned])
    series_by_case = {
        entry.case.id: series for entry, series in zip(planned, series_numbers, strict=True)
    }
    unfinished = {series for case, series in series_by_case.items() if not known[case].closed}
    # A case without events has an empty history.
    return [
        case
        for case, series in series_by_case.items()
        if series in unfinished and known[case] != History()
    ]
