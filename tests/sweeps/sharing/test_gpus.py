from __future__ import annotations

from dataclasses import replace

import pytest

from kernels.common.errors import UserError
from kernels.device import Device, this_cpu
from kernels.machine import known_machine
from sweeps.sharing import gpus
from sweeps.sharing.gpus import choose_gpus


def test_on_a_cpu_numbers_are_workers() -> None:
    assert list(choose_gpus("all", "cpu")) == [0]
    assert list(choose_gpus("0,1", "cpu")) == [0, 1]
    assert {device.gpu for device in choose_gpus("3,1", "cpu").values()} == {None}


@pytest.mark.parametrize("text", ["", "0,", "a", "0 1", "-1", "0;1", "all,0", "0,12345"])
def test_what_names_no_gpu_is_one_sentence(text: str) -> None:
    with pytest.raises(UserError, match="--gpus must be all or a list of numbers such as 0,3"):
        choose_gpus(text, "cpu")


def test_a_gpu_is_named_once() -> None:
    with pytest.raises(UserError, match="contains a number twice"):
        choose_gpus("0,1,0", "cpu")


def test_gpus_of_two_models_are_two_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    slugs = ["nvidia-h200", "nvidia-h100-sxm"]

    def select(kind: str, number: int = 0) -> Device:
        return replace(this_cpu(), machine=known_machine(slugs[number]), gpu=number)

    monkeypatch.setattr(gpus, "select_device", select)
    assert list(choose_gpus("1")) == [1]
    with pytest.raises(UserError, match=r"different models .*H200.*H100.*separate run"):
        choose_gpus("0,1")
