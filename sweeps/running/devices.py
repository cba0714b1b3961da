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
    places = read_places(folder)
    salt = _salt(results)
    host = _hashed(salt, socket.gethostname())
    device_id = host if device.gpu is None else _hashed(salt, _identity(device))
    settings = _settings(device)
    if difference := limits_apart(settings, places):
        raise UserError(
            f"this GPU has {difference[0]}, but the run began with {difference[1]}. Leave this GPU "
            f"out, measure it with another --results folder, or use {USE_FRESH} to set the run "
            "aside and start a new one.",
            exit_code=1,
        )
    registered = [place for place in places if place["id"] == device_id]
    if not registered:
        numbers = {place["gpu"] for place in places}
        preferred = device.gpu or 0
        number = preferred if preferred not in numbers else max(numbers) + 1
        nodes = list(dict.fromkeys([*(place["host"] for place in places), host]))
        registered = [
            {"gpu": number, "id": device_id, "host": host, "node": nodes.index(host), **settings}
        ]
        places += registered
        write_json(folder / _PLACES, {"places": places})
    public = [{name: value for name, value in p.items() if name != "host"} for p in places]
    return registered[0]["gpu"], sorted(public, key=lambda place: place["gpu"])


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
        hidden = set() if request.identify else {"id"}
        gpus = [{name: v for name, v in gpu.items() if name not in hidden} for gpu in places]
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
    agree.
    """
    for name, words in _LIMITS.items():
        limit = settings.get(name)
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
    for name, query, arguments, unit in (
        ("power_limit_w", "nvmlDeviceGetPowerManagementLimit", (), 1e-3),
        ("sm_limit_mhz", "nvmlDeviceGetApplicationsClock", ("NVML_CLOCK_SM",), 1.0),
    ):
        # Newer bindings drop queries that newer drivers no longer answer.
        with suppress(nvml.NVMLError, AttributeError):
            extra = [getattr(nvml, word) for word in arguments]
            settings[name] = float(getattr(nvml, query)(handle, *extra)) * unit
    return settings


def last_place(events: Iterable[Event]) -> int | None:
    """Return the place where a shard was last measured: the number of the GPU or of a CPU's node.

    Return None if it was not measured.
    """
    places = [(event["at"], event["place"]) for event in events if event["event"] == "place"]
    return max(places)[1] if places else None


def begun_elsewhere(planned: Sequence[PlanEntry], known: Mapping[str, History]) -> list[str]:
    """Return the ids of cases that have events and belong to a series that is not finished.

    Args:
        planned: the shard's cases.
        known: the histories of these cases.
    """
    from sweeps.planning.lines import series_of  # needs SciPy, which most runs do without

    numbers = series_of([entry.case for entry in planned])
    ids = [entry.case.id for entry in planned]
    unfinished = {n for n, case in zip(numbers, ids, strict=True) if not known[case].closed}
    return [
        case
        for number, case in zip(numbers, ids, strict=True)
        if number in unfinished and known[case] != History()
    ]
