"""Choose the GPUs of a node that share a run."""

from __future__ import annotations

import re

from kernels.common.errors import UserError
from kernels.device import Device, select_device

ALL = "all"


def choose_gpus(text: str, kind: str = "auto") -> dict[int, Device]:
    """Return the devices that the option ``--gpus`` selects, by number.

    On a CPU, each number selects a worker, and ``all`` selects one worker.

    Raises:
        UserError: if the text is invalid, a device cannot be used, or the GPUs are of several
            models.
    """
    import torch

    # 1. Find the numbers.
    if text == ALL:
        is_cpu = select_device(kind).gpu is None
        count = 1 if is_cpu else torch.cuda.device_count()
        numbers = list(range(count))
    elif re.fullmatch(r"\d{1,4}(,\d{1,4})*", text):
        numbers = [int(number) for number in text.split(",")]
    else:
        raise UserError(f"--gpus must be all or a list of numbers such as 0,3, not {text[:40]!r}.")
    # 2. Find the devices, and refuse those that cannot share a run.
    devices = {number: select_device(kind, number) for number in numbers}
    # A number that occurs twice in the text occurs only once in the dictionary.
    if len(devices) < len(numbers):
        raise UserError(f"--gpus {text} contains a number twice; give each number once.")
    models = {device.machine.slug: device.machine.name for device in devices.values()}
    if len(models) > 1:
        raise UserError(
            f"--gpus {text} names GPUs of different models ({', '.join(models.values())}), whose "
            "times must not be mixed; measure each model in a separate run."
        )
    return devices
