"""Facts about machines, such as peak rates, bandwidth and caches, with their sources.

The facts about known GPUs come from ``machines.toml``. The facts about other GPUs are derived from
what the driver reports (:func:`from_properties`). A CPU's peak rates and bandwidth are measured
(:func:`cpu_machine`).
"""

from __future__ import annotations

import functools
import math
import os
import platform
import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from kernels.common.aliases import slug_meant
from kernels.common.checks import is_whole
from kernels.common.counts import enumerated
from kernels.common.documents import (
    COUNT,
    NOT_NEGATIVE,
    POSITIVE,
    SIZE,
    Each,
    Maybe,
    Number,
    misfit,
)
from kernels.common.errors import UserError, nearest

_TABLE = Path(__file__).with_name("machines.toml")
_SLUG = re.compile(r"[a-z0-9-]+")
_COPY_AGAIN = "Copy the recording again, or make a new one."
# Shapes of the JSON of a machine and of a GPU, for `kernels.common.documents`.
_FACTS = {
    "slug": str, "name": str, "kind": str, "generation": str,
    "capability": Maybe([Number(0, 99, whole=True)]), "sms": SIZE, "tensor_mhz": NOT_NEGATIVE,
    "boost_mhz": NOT_NEGATIVE, "bandwidth": POSITIVE, "l2_bytes": COUNT, "shared_sm_bytes": COUNT,
    "shared_cta_bytes": COUNT, "memory_bytes": SIZE, "peaks": Each(POSITIVE), "sources?": Each(str),
    "emulated?": [str],
}  # fmt: skip
_GPU_FACTS = {
    "capability": [Number(0, 99, whole=True)], "tensor_mhz": POSITIVE, "boost_mhz": POSITIVE,
}  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """Facts about one device: rates in FLOP/s, bandwidth in bytes/s, sizes in bytes, clocks in MHz.

    For a CPU, ``sms`` is the number of threads used, and ``l2_bytes`` is the size of its last-level
    cache. ``sources`` says where the facts come from. ``emulated`` lists the dtypes that are slow
    because the machine has no instructions for them.
    """

    slug: str
    name: str
    kind: str  # "gpu" or "cpu"
    generation: str
    capability: tuple[int, int] | None  # compute capability; None for a CPU
    sms: int
    tensor_mhz: float
    boost_mhz: float
    bandwidth: float
    l2_bytes: int
    shared_sm_bytes: int
    shared_cta_bytes: int
    memory_bytes: int
    peaks: Mapping[str, float]  # FLOP/s by dtype; a dtype that is missing is not supported
    sources: Mapping[str, str] = field(default_factory=dict)
    emulated: tuple[str, ...] = ()

    def peak(self, dtype: str) -> float:
        """Return the peak FLOP/s of a dtype, or 0 for a CPU whose peak is not measured yet.

        Raises:
            UserError: if the machine does not support the dtype.
        """
        if dtype not in self.peaks:
            raise UserError(
                f"{self.name} does not compute {dtype}; use one of {', '.join(self.peaks)}."
            )
        return self.peaks[dtype]

    def ridge(self, dtype: str) -> float:
        """Return the ridge point of a dtype's roofline: peak over bandwidth, in FLOP/byte.

        For a CPU, the peak and the bandwidth must have been measured.

        Raises:
            UserError: if the machine does not support the dtype.
        """
        return self.peak(dtype) / self.bandwidth

    @property
    def arch(self) -> str:
        """Architecture: ``sm_90`` for compute capability 9.0, ``cpu`` for a CPU."""
        return "cpu" if self.capability is None else "sm_{}{}".format(*self.capability)

    @property
    def major(self) -> int:
        """Major version of the compute capability, such as 9 for Hopper; 0 for a CPU."""
        return 0 if self.capability is None else self.capability[0]

    @property
    def multiplies_from_shared(self) -> bool:
        """True if the Tensor Cores read operands from shared memory, with wgmma or tcgen05."""
        return self.major in (9, 10)

    def to_json(self) -> dict[str, Any]:
        """Return the machine's facts for run.json."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Machine:
        """Create a machine from its facts in run.json, which may come from another user.

        Raises:
            UserError: if a fact is missing or invalid.
        """
        fault = _fault_of(data)
        if fault:
            raise UserError(f"invalid machine description: {fault}. {_COPY_AGAIN}")
        slug = data["slug"]
        if not _SLUG.fullmatch(slug):
            raise UserError(
                f"{slug!r} is not a valid machine name; only lower-case letters, digits and dashes "
                f"are allowed. {_COPY_AGAIN}"
            )
        # JSON has lists in place of tuples.
        facts = {f.name: data[f.name] for f in fields(cls) if f.name in data}
        facts["emulated"] = tuple(facts.get("emulated", ()))
        if facts["capability"] is not None:
            facts["capability"] = tuple(facts["capability"])
        return cls(**facts)


def _fault_of(data: Any) -> str:
    """Describe the first missing or invalid fact of a machine; return "" if all are valid."""
    fault = misfit(data, _FACTS, "machine")
    if fault:
        return fault
    kind, generation, capability = data["kind"], data["generation"], data["capability"]
    if kind not in ("gpu", "cpu"):
        return f"machine.kind is {kind!r}, not 'gpu' or 'cpu'"
    if kind == "gpu":
        fault = misfit(data, _GPU_FACTS, "machine")
        if fault:
            return fault
    generations = ("cpu",) if kind == "cpu" else tuple(_GENERATIONS.values())
    if generation not in generations:
        valid = enumerated([repr(name) for name in dict.fromkeys(generations)], "or")
        return f"machine.generation is {generation!r}, not {valid}"
    if kind == "cpu" and capability is not None:
        return f"machine.capability is {capability!r}, but a CPU has none"
    if capability is not None and len(capability) != 2:
        return f"machine.capability is {capability!r}, not two whole numbers"
    return ""


@functools.cache
def known_machines() -> dict[str, Machine]:
    """Return every machine in ``machines.toml`` by slug.

    Raises:
        UserError: if the file is damaged or cannot be read.
    """
    with _checked_table() as table:
        sources = table.pop("sources")
        return {slug: _from_entry(slug, _inherited(table, slug), sources) for slug in table}


@contextmanager
def _checked_table() -> Iterator[dict[str, Any]]:
    """Yield the content of machines.toml; turn errors in the ``with`` block into UserErrors."""
    try:
        yield tomllib.loads(_TABLE.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise UserError(
            f"{_TABLE} cannot be read ({type(error).__name__}: {error}). Restore it from the "
            "repository, or install Rooftile again."
        ) from None


def known_machine(slug: str) -> Machine:
    """Return the machine in ``machines.toml`` for a slug, or for an unambiguous part of a slug.

    Raises:
        UserError: if no machine fits, or if more than one machine fits.
    """
    machines = known_machines()
    return machines[slug_meant(slug, machines)]


def machine_of_arch(arch: str) -> Machine:
    """Return the first machine in ``machines.toml`` that has the architecture ``arch``.

    Raises:
        UserError: if no machine in the file has this architecture.
    """
    by_arch: dict[str, Machine] = {}
    for machine in known_machines().values():
        by_arch.setdefault(machine.arch, machine)
    if arch not in by_arch:
        raise UserError(f"architecture {arch!r} is not known; {nearest(arch, by_arch)}")
    return by_arch[arch]


@functools.cache
def _slug_of_device_name() -> dict[str, str]:
    """Return the slugs in machines.toml, by the device name that a GPU's driver reports."""
    slugs: dict[str, str] = {}
    with _checked_table() as table:
        table.pop("sources", None)  # the only entry that is not a machine
        for slug, entry in table.items():
            for name in entry["device_names"]:
                slugs[name] = slug
    return slugs


def slug_of_device(name: str) -> str:
    """Return the slug of a GPU, given the name that its driver reports.

    If ``machines.toml`` does not list the name, the slug is derived from the name.
    """
    listed_slug = _slug_of_device_name().get(name)
    if listed_slug:
        return listed_slug
    return _dashes(name) or "unnamed-gpu"  # a name may have no letters or digits


def _inherited(table: Mapping[str, Any], slug: str) -> dict[str, Any]:
    """Return a slug's entry, completed with the facts of the entry that its key ``like`` names."""
    entry = dict(table[slug])
    if "like" not in entry:
        return entry
    base = _inherited(table, entry.pop("like"))
    # The rates are merged dtype by dtype, because an entry may state only those that differ.
    tflops = {**base["tflops"], **entry.get("tflops", {})}
    return {**base, **entry, "tflops": tflops}


def _from_entry(slug: str, entry: Mapping[str, Any], sources: Mapping[str, str]) -> Machine:
    """Create a machine from its entry in machines.toml.

    A fact with a source is stored as a pair: the value, and the key of the source in ``sources``.
    """
    facts: dict[str, Any] = {}
    citations: dict[str, str] = {}
    for key, fact in entry.items():
        if key in ("device_names", "tflops"):  # these two are read below
            continue
        if isinstance(fact, list):
            facts[key], source = fact
            citations[key] = sources[source]
        else:
            facts[key] = fact
    peaks: dict[str, float] = {}
    for dtype, (tflops, source) in entry["tflops"].items():
        peaks[dtype] = tflops * 1e12
        citations[f"peak {dtype}"] = sources[source]
    major, minor = facts["capability"].split(".")
    return Machine(
        slug=slug,
        name=entry["device_names"][0],
        kind="gpu",
        generation=facts["generation"],
        capability=(int(major), int(minor)),
        sms=facts["sms"],
        tensor_mhz=facts["tensor_mhz"],
        boost_mhz=facts["boost_mhz"],
        bandwidth=facts["bandwidth"] * 1e9,
        l2_bytes=facts["l2_mib"] << 20,
        shared_sm_bytes=facts["shared_sm_kib"] << 10,
        shared_cta_bytes=facts["shared_cta_kib"] << 10,
        memory_bytes=int(facts["memory_gb"] * 1e9),
        peaks=peaks,
        sources=citations,
    )


# --- A GPU that machines.toml does not list ------------------------------------------------------


@dataclass(frozen=True)
class DeviceProperties:
    """Facts that the driver reports about a GPU; clocks are in MHz, sizes in bytes.

    A clock that is not reported is 0.
    """

    name: str
    capability: tuple[int, int]
    sms: int
    memory_bytes: int
    l2_bytes: int
    shared_sm_bytes: int
    shared_cta_bytes: int
    boost_mhz: float
    memory_mhz: float
    bus_bits: int

    @property
    def bandwidth(self) -> float:
        """Bandwidth in bytes/s: two transfers per memory clock over the whole bus."""
        return 2 * self.memory_mhz * 1e6 * self.bus_bits / 8


# FLOPs per clock and SM, from the architecture whitepapers (the sources in machines.toml). Products
# of 16-bit operands are added in fp32. A dtype that is missing has no arithmetic units on the chip.
_FLOPS_PER_CLOCK: dict[tuple[int, int], dict[str, int]] = {
    (7, 0): {"fp32": 128, "fp16": 1024},
    (7, 5): {"fp32": 128, "fp16": 1024},
    (8, 0): {"fp32": 128, "tf32": 1024, "fp16": 2048, "bf16": 2048},
    (8, 6): {"fp32": 256, "tf32": 512, "fp16": 1024, "bf16": 1024},
    (8, 9): {"fp32": 256, "tf32": 512, "fp16": 1024, "bf16": 1024, "fp8": 2048},
    (9, 0): {"fp32": 256, "tf32": 2048, "fp16": 4096, "bf16": 4096, "fp8": 8192},
    (10, 0): {"fp32": 256, "tf32": 4096, "fp16": 8192, "bf16": 8192, "fp8": 16384},
    (10, 3): {"fp32": 256, "tf32": 4096, "fp16": 8192, "bf16": 8192, "fp8": 16384},
    (12, 0): {"fp32": 256, "tf32": 512, "fp16": 1024, "bf16": 1024, "fp8": 2048},
}
_GENERATIONS = {
    (7, 0): "volta",
    (7, 5): "turing",
    (8, 0): "ampere",
    (8, 6): "ampere",
    (8, 9): "ada",
    (9, 0): "hopper",
    (10, 0): "blackwell",
    (10, 3): "blackwell",
    (12, 0): "blackwell-rtx",
}


def from_properties(properties: DeviceProperties) -> Machine:
    """Take a GPU's facts from ``machines.toml``, or derive them if the file does not list the card.

    The name and the memory size are always those that the driver reports. A MIG slice counts as a
    card that is not listed.
    """
    # 1. Take the facts of a listed card from the file.
    slug = slug_of_device(properties.name)
    if slug in known_machines():
        return replace(
            known_machines()[slug], name=properties.name, memory_bytes=properties.memory_bytes
        )

    # 2. Derive the peaks. If the table of rates lacks the capability, the rates of the next older
    # capability are used, or those of 7.0 if the table has no older one.
    rates_capability = max(
        (listed for listed in _FLOPS_PER_CLOCK if listed <= properties.capability), default=(7, 0)
    )
    generation = _GENERATIONS[rates_capability]
    similar = _similar_card(properties, generation)
    boost_mhz = properties.boost_mhz or similar.boost_mhz
    peaks, peaks_source = _derived_peaks(properties, rates_capability, boost_mhz)
    # 3. Derive the bandwidth, and take all other facts as the driver reports them.
    bandwidth, bandwidth_source = _derived_bandwidth(properties, similar)
    sources = {"peaks": peaks_source, "bandwidth": bandwidth_source}
    if not properties.boost_mhz:
        sources["clocks"] = (
            f"assumed equal to {similar.slug}'s boost clock, because {_NOT_REPORTED}"
        )
    sources["everything else"] = _DEVICE_REPORT
    return Machine(
        slug=slug,
        name=properties.name,
        kind="gpu",
        generation=generation,
        capability=properties.capability,
        sms=properties.sms,
        tensor_mhz=similar.tensor_mhz if _whole_card(properties) else boost_mhz,
        boost_mhz=boost_mhz,
        bandwidth=bandwidth,
        l2_bytes=properties.l2_bytes,
        shared_sm_bytes=properties.shared_sm_bytes,
        shared_cta_bytes=properties.shared_cta_bytes,
        memory_bytes=properties.memory_bytes,
        peaks=peaks,
        sources=sources,
    )


_DEVICE_REPORT = "the device's own properties"
_NOT_REPORTED = "the device does not report this value"


def _similar_card(properties: DeviceProperties, generation: str) -> Machine:
    """Return the listed card that supplies the facts that the driver does not report."""
    whole_card = _whole_card(properties)
    if whole_card is not None:
        return whole_card
    relatives = [m for m in known_machines().values() if m.generation == generation]
    return min(relatives, key=lambda m: abs(m.sms - properties.sms))


def _whole_card(properties: DeviceProperties) -> Machine | None:
    """Return the listed card of which a GPU is a MIG slice; None if the card is not listed."""
    slug = _slug_of_device_name().get(properties.name.partition(" MIG ")[0])
    return None if slug is None else known_machines()[slug]


def _derived_peaks(
    properties: DeviceProperties, rates_capability: tuple[int, int], boost_mhz: float
) -> tuple[dict[str, float], str]:
    """Return the peaks (FLOP/s, by dtype) of a card that is not listed, and their source."""
    whole_card = _whole_card(properties)
    if whole_card is not None:
        share = min(1.0, properties.sms / whole_card.sms)
        source = f"those of {whole_card.slug}, in proportion to the slice's SMs"
        return {dtype: peak * share for dtype, peak in whole_card.peaks.items()}, source
    # The Tensor Cores of GeForce cards accumulate in fp32 at half of their rate.
    is_geforce = "GeForce" in properties.name
    peaks: dict[str, float] = {}
    for dtype, flops_per_clock in _FLOPS_PER_CLOCK[rates_capability].items():
        peak = flops_per_clock * properties.sms * boost_mhz * 1e6
        peaks[dtype] = peak * (0.5 if is_geforce and dtype != "fp32" else 1.0)
    major, minor = rates_capability
    source = f"SMs × clock × FLOPs per clock and SM of compute capability {major}.{minor}"
    if is_geforce:
        source += (
            "; half of this on Tensor Cores, because GeForce cards accumulate in fp32 at half rate"
        )
    return peaks, source


def _derived_bandwidth(properties: DeviceProperties, similar: Machine) -> tuple[float, str]:
    """Return the bandwidth (bytes/s) of a card that is not listed, and its source."""
    whole_card = _whole_card(properties)
    if whole_card is not None:
        share = min(1.0, properties.memory_bytes / whole_card.memory_bytes)
        source = f"that of {whole_card.slug}, in proportion to the slice's memory"
        return whole_card.bandwidth * share, source
    if properties.bandwidth:
        return properties.bandwidth, f"{_DEVICE_REPORT}: 2 × memory clock × bus width"
    source = f"assumed equal to {similar.slug}'s bandwidth, because {_NOT_REPORTED}"
    return similar.bandwidth, source


# --- This CPU ------------------------------------------------------------------------------------


def cpu_model() -> str:
    """Return the CPU's model name as the system reports it, or "" if none is reported."""
    text = _cpuinfo()
    if not text:
        return platform.processor()
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match.group(1).strip() if match else ""


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ""


def instruction_set(cpuinfo: str | None = None) -> str:
    """Return the CPU's widest instruction set, such as ``avx2``, or ``base`` if none is known.

    ``cpuinfo`` is the text of a ``/proc/cpuinfo`` file; by default, this machine's file is read.
    """
    text = _cpuinfo() if cpuinfo is None else cpuinfo
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    flags = set(match.group(1).split()) if match else set()
    if not flags and platform.machine() == "arm64":
        return "neon"  # macOS has no /proc, and all its ARM CPUs have NEON
    return next((name for flag, name in _INSTRUCTION_SETS.items() if flag in flags), "base")


# Short names of instruction sets by their flag in /proc/cpuinfo, the widest set first.
_INSTRUCTION_SETS = {
    "amx_bf16": "amx", "avx512_bf16": "avx512bf16", "avx512f": "avx512", "avx2": "avx2",
    "bf16": "neonbf16", "asimd": "neon",
}  # fmt: skip
_WITH_BF16 = ("amx", "avx512bf16", "neonbf16")  # instruction sets that multiply bf16


def cpu_threads() -> int:
    """Return the number of threads with which Rooftile measures this CPU.

    The environment variable ``THREADS`` sets the number. The default is the number of usable cores
    minus one, or 1 if fewer than four cores are usable. Without an idle core, other processes would
    delay one of the threads, and all other threads would wait for it.

    Raises:
        UserError: if ``THREADS`` is set, but not to a whole number from 1 to the number of logical
            processors.
    """
    override = os.environ.get("THREADS", "")
    if override:
        most = os.cpu_count() or 1
        if not is_whole(override) or not 1 <= int(override) <= most:
            raise UserError(f"THREADS is {override!r}; give a whole number from 1 to {most}.")
        return int(override)
    cores = usable_cores()
    return cores - 1 if cores >= 4 else 1


def usable_cores(cpuinfo: str | None = None) -> int:
    """Count the physical cores that this process may use, within its container's CPU quota.

    A quota that is not a whole number of cores is rounded up.
    """
    usable = _usable_processors()
    text = _cpuinfo() if cpuinfo is None else cpuinfo
    # The text has a block of lines for each logical processor. Processors of the same core have the
    # same physical id and core id.
    cores = set()
    for block in text.split("\n\n"):
        ids = dict(re.findall(r"^([\w ]+?)\s*:\s*(\d+)$", block, re.MULTILINE))
        if int(ids.get("processor", -1)) in usable and "core id" in ids:
            cores.add((ids.get("physical id"), ids["core id"]))
    # If the system does not describe cores, each logical processor counts as one.
    count = len(cores) or len(usable)
    return max(1, math.ceil(min(count, _quota_cores())))


def usable_processors() -> int:
    """Count the logical processors that this process may use, within its container's CPU quota."""
    return max(1, math.ceil(min(len(_usable_processors()), _quota_cores())))


def _usable_processors() -> set[int]:
    """Return the ids of the logical processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _quota_cores() -> float:
    """Return the container's CPU quota (cgroup v2) in cores, or infinity if it has no quota."""
    # The file may be missing, and without a quota its first word is "max".
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return int(quota) / int(period)
    return math.inf


def cpu_slug(model: str, instructions: str, threads: int) -> str:
    """Return the slug of a CPU: its model, its instruction set and the number of threads used.

    >>> cpu_slug("Intel(R) Xeon(R) Platinum 8480C CPU @ 2.10GHz", "amx", 8)
    'cpu-intel-xeon-platinum-8480c-amx-8t'
    """
    short = re.sub(r"\((R|TM)\)|@.*|\b(CPU|Processor)\b", " ", model, flags=re.IGNORECASE)
    name = _dashes(short) or _dashes(platform.machine())  # the model's name may be empty
    return f"cpu-{name}-{instructions}-{threads}t"


def cpu_machine(peaks: Mapping[str, float], bandwidth: float, threads: int) -> Machine:
    """Return this CPU with its measured peaks (FLOP/s by dtype) and bandwidth (bytes/s).

    Values that are not measured yet are 0.
    """
    model, instructions = cpu_model(), instruction_set()
    measured = "measured by the run: the best of several passes"
    return Machine(
        slug=cpu_slug(model, instructions, threads),
        name=model or platform.machine(),
        kind="cpu",
        generation="cpu",
        capability=None,
        sms=threads,
        tensor_mhz=0.0,
        boost_mhz=0.0,
        bandwidth=bandwidth,
        l2_bytes=_last_level_cache(),
        shared_sm_bytes=0,
        shared_cta_bytes=0,
        memory_bytes=_total_memory(),
        peaks=dict(peaks),
        sources={"peaks": measured, "bandwidth": measured, "l2_bytes": "the operating system"},
        emulated=() if instructions in _WITH_BF16 else ("bf16",),
    )


def _last_level_cache() -> int:
    """Return the size in bytes of the largest reported cache, or 32 MiB if none is reported."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text(encoding="ascii").strip()  # such as 32768K
        if text and text[-1] in units:
            sizes.append(int(text[:-1]) * units[text[-1]])
    return max(sizes, default=32 << 20)


def _total_memory() -> int:
    """Return the size of the host's memory in bytes, or 0 if the system does not report it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0


def _dashes(name: str) -> str:
    """Convert a name to lower-case words of a-z and 0-9, separated by dashes."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
