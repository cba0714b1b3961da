from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kernels.machine as machine_module
from kernels.common.errors import UserError
from kernels.machine import (
    _FLOPS_PER_CLOCK,
    DeviceProperties,
    Machine,
    _slug_of_device_name,
    cpu_machine,
    cpu_slug,
    cpu_threads,
    from_properties,
    instruction_set,
    known_machine,
    known_machines,
    machine_of_arch,
    slug_of_device,
    usable_cores,
)  # fmt: skip

WANTED = (
    "nvidia-v100-sxm2-16gb", "nvidia-v100-pcie-32gb", "nvidia-a100-sxm-80gb",
    "nvidia-a100-pcie-80gb", "nvidia-h100-sxm", "nvidia-h200", "nvidia-l40s", "nvidia-b200",
    "nvidia-rtx-pro-6000", "nvidia-h20", "nvidia-h800", "nvidia-a10", "nvidia-l40",
    "nvidia-a40", "nvidia-rtx-a6000", "nvidia-a30",
    "nvidia-geforce-rtx-3090", "nvidia-geforce-rtx-4090", "nvidia-geforce-rtx-5090",
)  # fmt: skip

TENSOR_CORE_SHARE = {
    "nvidia-h20": 148 / 633, "nvidia-l40": 0.5, "nvidia-geforce-rtx-3090": 0.5,
    "nvidia-geforce-rtx-4090": 0.5, "nvidia-geforce-rtx-5090": 0.5,
}  # fmt: skip
"""Share of the chip's Tensor Core rate that a card reaches; other cards reach all of it."""

# Properties of an RTX 4090, under a name that machines.toml does not list.
UNKNOWN = DeviceProperties(
    name="NVIDIA GeForce RTX 4090 D",
    capability=(8, 9),
    sms=128,
    memory_bytes=24 << 30,
    l2_bytes=72 << 20,
    shared_sm_bytes=100 << 10,
    shared_cta_bytes=99 << 10,
    boost_mhz=2520,
    memory_mhz=10501,
    bus_bits=384,
)


@pytest.mark.parametrize("slug", WANTED)
def test_the_machines_that_scripts_name_are_there(slug: str) -> None:
    assert known_machine(slug).slug == slug


@pytest.mark.parametrize("machine", known_machines().values(), ids=lambda m: m.slug)
def test_peaks_agree_with_clock_and_flops_per_clock(machine: Machine) -> None:
    """A number that was copied from another card fails this test."""
    rates = _FLOPS_PER_CLOCK[machine.capability]  # type: ignore[index]
    assert set(machine.peaks) == set(rates)
    for dtype, peak in machine.peaks.items():
        clock = machine.boost_mhz if dtype == "fp32" else machine.tensor_mhz
        share = 1.0 if dtype == "fp32" else TENSOR_CORE_SHARE.get(machine.slug, 1.0)
        assert peak == pytest.approx(share * rates[dtype] * machine.sms * clock * 1e6, rel=0.03)


@pytest.mark.parametrize("machine", known_machines().values(), ids=lambda m: m.slug)
def test_every_fact_has_a_source(machine: Machine) -> None:
    facts = {
        "sms", "tensor_mhz", "boost_mhz", "bandwidth", "l2_mib", "shared_sm_kib",
        "shared_cta_kib", "memory_gb", *(f"peak {dtype}" for dtype in machine.peaks),
    }  # fmt: skip
    assert set(machine.sources) == facts
    assert all(len(source) > 10 for source in machine.sources.values())


def test_ridge_points_of_the_h200_are_the_published_ones() -> None:
    # 989 TFLOP/s divided by 4.8 TB/s is 206 FLOP per byte.
    assert known_machine("nvidia-h200").ridge("bf16") == pytest.approx(206, abs=1)


def test_a_dtype_without_units_is_an_error_in_a_sentence() -> None:
    with pytest.raises(
        UserError, match="Tesla V100-SXM2-16GB does not compute bf16; use one of fp32, fp16"
    ):
        known_machine("nvidia-v100-sxm2-16gb").peak("bf16")


def test_a_misspelt_machine_names_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'nvidia-h200'"):
        known_machine("nvidai-h200")
    with pytest.raises(UserError, match="architecture 'sm_91' is not known"):
        machine_of_arch("sm_91")


def test_a_known_card_keeps_its_slug_and_takes_its_own_memory() -> None:
    h200 = replace(UNKNOWN, name="NVIDIA H200", capability=(9, 0), memory_bytes=150_754_820_096)
    machine = from_properties(h200)
    assert machine.slug == "nvidia-h200"
    assert machine.memory_bytes == 150_754_820_096
    assert machine.bandwidth == 4.8e12


def test_an_unknown_card_has_the_reported_facts_and_geforce_halves_the_peak() -> None:
    machine = from_properties(UNKNOWN)
    assert machine.slug == "nvidia-geforce-rtx-4090-d"
    assert machine.generation == "ada"
    assert machine.bandwidth == pytest.approx(1008e9, rel=0.001)  # the datasheet's
    assert machine.peaks["fp32"] == pytest.approx(82.6e12, rel=0.01)  # the datasheet's
    assert machine.peaks["bf16"] == pytest.approx(165.2e12, rel=0.01)  # the datasheet's
    assert "half" in machine.sources["peaks"]


def test_a_titan_does_not_halve() -> None:
    titan = from_properties(replace(UNKNOWN, name="NVIDIA TITAN RTX", capability=(7, 5)))
    assert "half" not in titan.sources["peaks"]


def test_the_source_names_an_assumed_bandwidth_if_the_memory_clock_is_not_reported() -> None:
    machine = from_properties(replace(UNKNOWN, memory_mhz=0.0))
    assert machine.bandwidth == known_machine("nvidia-geforce-rtx-4090").bandwidth
    assert "assumed equal to nvidia-geforce-rtx-4090" in machine.sources["bandwidth"]


def test_the_source_names_an_assumed_clock_if_the_device_does_not_report_it() -> None:
    machine = from_properties(replace(UNKNOWN, boost_mhz=0.0))
    assert machine.boost_mhz == known_machine("nvidia-geforce-rtx-4090").boost_mhz
    assert "assumed equal to nvidia-geforce-rtx-4090" in machine.sources["clocks"]
    assert Machine.from_json(machine.to_json()) == machine
    slice_ = replace(UNKNOWN, name="NVIDIA H200 MIG 1g.18gb", capability=(9, 0), boost_mhz=0.0)
    assert from_properties(slice_).boost_mhz == known_machine("nvidia-h200").boost_mhz


def test_a_card_newer_than_the_table_takes_the_newest_older_row() -> None:
    machine = from_properties(replace(UNKNOWN, name="NVIDIA X1", capability=(13, 0)))
    assert machine.arch == "sm_130"
    assert machine.generation == "blackwell-rtx"
    assert "12.0" in machine.sources["peaks"]


def test_a_mig_slice_has_its_share_of_the_whole_cards_peaks() -> None:
    whole = known_machine("nvidia-h20")  # slower than its compute capability allows
    slice_ = replace(UNKNOWN, name="NVIDIA H20 MIG 3g.48gb", capability=(9, 0), sms=whole.sms // 2)
    machine = from_properties(slice_)
    assert machine.peaks == {dtype: peak / 2 for dtype, peak in whole.peaks.items()}
    assert machine.tensor_mhz == whole.tensor_mhz
    assert "nvidia-h20" in machine.sources["peaks"]


def test_a_mig_slice_keeps_its_name_and_takes_its_share_of_bandwidth() -> None:
    slice_ = replace(
        UNKNOWN, name="NVIDIA A100-SXM4-80GB MIG 3g.40gb", capability=(8, 0), sms=42,
        memory_bytes=40_000_000_000,
    )  # fmt: skip
    machine = from_properties(slice_)
    assert machine.slug == "nvidia-a100-sxm4-80gb-mig-3g-40gb"
    assert machine.sms == 42
    assert machine.bandwidth == pytest.approx(2039e9 / 2)
    assert "nvidia-a100-sxm-80gb" in machine.sources["bandwidth"]


@pytest.mark.parametrize(
    ("model", "instructions", "threads", "slug"),
    [
        ("AMD EPYC 7763 64-Core Processor", "avx2", 2, "cpu-amd-epyc-7763-64-core-avx2-2t"),
        ("Intel(R) Xeon(R) Platinum 8480C CPU @ 2.10GHz", "amx", 96,
         "cpu-intel-xeon-platinum-8480c-amx-96t"),
        ("AMD EPYC", "avx512", 1, "cpu-amd-epyc-avx512-1t"),
        ("Intel(R) Core(TM) i9-13900K", "avx2", 32, "cpu-intel-core-i9-13900k-avx2-32t"),
    ],
)  # fmt: skip
def test_cpu_slugs(model: str, instructions: str, threads: int, slug: str) -> None:
    assert cpu_slug(model, instructions, threads) == slug


def test_a_cpu_without_a_model_is_named_by_its_architecture() -> None:
    assert cpu_slug("", "neon", 4).startswith("cpu-")
    assert cpu_slug("", "neon", 4).endswith("-neon-4t")


@pytest.mark.parametrize(
    ("cpuinfo", "instructions"),
    [
        ("processor\t: 0\nflags\t\t: fpu sse2 avx avx2 fma\n", "avx2"),
        ("flags\t\t: avx2 avx512f avx512_bf16 amx_bf16 amx_tile\n", "amx"),
        ("flags\t\t: avx2 avx512f avx512_bf16\n", "avx512bf16"),
        ("flags\t\t: avx2 avx512f avx512_vnni\n", "avx512"),
        ("Features\t: fp asimd sve bf16\n", "neonbf16"),
        ("Features\t: fp asimd crc32\n", "neon"),
        ("flags\t\t: fpu sse2\n", "base"),
    ],
)
def test_the_widest_instruction_set_is_found(cpuinfo: str, instructions: str) -> None:
    assert instruction_set(cpuinfo) == instructions


def a_cpuinfo(cores: int, threads_of_core: int = 1) -> str:
    blocks = [f"processor\t: {thread * cores + core}\nphysical id\t: 0\ncore id\t\t: {core}"
              for thread in range(threads_of_core) for core in range(cores)]  # fmt: skip
    return "\n\n".join(blocks)


def test_cores_are_counted_where_this_process_may_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {*range(16)}, raising=False)
    monkeypatch.setattr(machine_module, "_quota_cores", lambda: math.inf)
    assert usable_cores(a_cpuinfo(8, 2)) == 8
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 8, 1})
    assert usable_cores(a_cpuinfo(8, 2)) == 2
    assert usable_cores("") == 3  # without a description of cores, each processor counts
    monkeypatch.setattr(machine_module, "_quota_cores", lambda: 1.5)
    assert usable_cores("") == 2


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (3, 1), (4, 3), (64, 63)])
def test_a_core_is_left_for_other_processes(
    monkeypatch: pytest.MonkeyPatch, cores: int, threads: int
) -> None:
    monkeypatch.delenv("THREADS", raising=False)
    monkeypatch.setattr(machine_module, "usable_cores", lambda: cores)
    assert cpu_threads() == threads
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setenv("THREADS", "5")
    assert cpu_threads() == 5
    for text in ("two", "0", "9", "9" * 5000):
        monkeypatch.setenv("THREADS", text)
        with pytest.raises(UserError, match="THREADS is '.*'; give a whole number from 1 to 8"):
            cpu_threads()


def test_bf16_is_emulated_where_no_instruction_computes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for instructions, emulated in (("avx2", ("bf16",)), ("avx512", ("bf16",)), ("amx", ())):
        monkeypatch.setattr(machine_module, "instruction_set", lambda found=instructions: found)
        assert cpu_machine({"fp32": 1e11}, 3e10, 2).emulated == emulated


def test_machines_survive_json() -> None:
    for machine in (*known_machines().values(), cpu_machine({"fp32": 1e11}, 3e10, 2)):
        assert Machine.from_json(json.loads(json.dumps(machine.to_json()))) == machine


@pytest.mark.parametrize("slug", ["../../escaped", "", "NVIDIA H100", "a/b", "a\n", None, 7])
def test_a_stranger_s_slug_names_no_folder_elsewhere(slug: object) -> None:
    data = {**known_machine("nvidia-h200").to_json(), "slug": slug}
    with pytest.raises(
        UserError, match=r"is not a valid machine name|machine\.slug is .*, not text"
    ):
        Machine.from_json(data)


@pytest.mark.parametrize(
    ("fact", "value"),
    [
        ("sms", 0),
        ("bandwidth", -1.0),
        ("peaks", {"bf16": "fast"}),
        ("capability", "9.0"),
        ("capability", []),
        ("capability", [9, 0, 1]),
        ("capability", None),
        ("generation", "rubin"),
        ("generation", "cpu"),
        ("tensor_mhz", 0),
        ("boost_mhz", 0.0),
    ],
)
def test_absurd_facts_of_a_stranger_are_refused(fact: str, value: object) -> None:
    data = {**known_machine("nvidia-h200").to_json(), fact: value}
    with pytest.raises(UserError, match=f"invalid machine description: machine.{fact}"):
        Machine.from_json(data)


@pytest.mark.parametrize("text", ["[", "a-gpu = 1", '[sources]\n\n["a-gpu"]\nsms = 1\n'])
def test_a_damaged_table_of_machines_is_one_sentence(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "machines.toml").write_text(text)
    monkeypatch.setattr("kernels.machine._TABLE", tmp_path / "machines.toml")
    for reader in (known_machines, _slug_of_device_name):
        with pytest.raises(UserError, match=r"machines\.toml cannot be read .*Restore it"):
            reader.__wrapped__()


@given(st.text())
def test_every_slug_that_is_made_of_a_name_is_one(name: str) -> None:
    for slug in (slug_of_device(name), cpu_slug(name, "avx2", 8)):
        data = {**known_machine("nvidia-h200").to_json(), "slug": slug}
        assert Machine.from_json(data).slug == slug


def test_a_cpu_with_a_compute_capability_is_refused() -> None:
    data = {**cpu_machine({"fp32": 1e11}, 1e10, 2).to_json(), "capability": [9, 0]}
    with pytest.raises(UserError, match="but a CPU has none"):
        Machine.from_json(data)
