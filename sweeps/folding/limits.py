"""Compute a lower limit for the time of a launch, and find measured times below this limit.

If the limit is right, a shorter time is a measurement error. The limit is the longer of two times:

- The time of the arithmetic at the highest clock. Winograd and FFT algorithms for convolutions save
  multiplications, but at least one remains for each output element and input channel (Winograd
  1980).
- The time to read a GEMM's operands from memory. This time is used only for cold bursts on a GPU.
"""

from __future__ import annotations

from kernels.common.program import command
from kernels.machine import Machine, known_machines
from kernels.problem import DTYPE_BYTES, Conv, Gemm
from sweeps.cases.case import Case

_SLACK = 1.03  # factor that exceeds the errors of clocks and event timers
_MEASURED_SLACK = 1.15  # factor by which a measured ceiling may be exceeded without a remark


def min_seconds(case: Case, machine: Machine) -> float:
    """Return the lower limit of one launch's time in seconds.

    An unknown peak or bandwidth does not limit the time.
    """
    problem = case.problem
    peak = machine.peaks.get(problem.dtype, 0.0)
    flops = problem.flops
    if isinstance(problem, Conv):
        # A Winograd or FFT algorithm may save all multiplications of a filter but one.
        flops //= problem.r * problem.s
    # The vendor may state the peak at a clock below the highest.
    if machine.tensor_mhz:
        peak *= max(1.0, machine.boost_mhz / machine.tensor_mhz)
    seconds = flops / peak if peak else 0.0
    # A burst that begins with an empty cache must read its operands from memory.
    reads_memory = case.cache == "cold" and case.mode == "burst" and machine.kind == "gpu"
    if reads_memory and isinstance(problem, Gemm) and machine.bandwidth:
        a_elements, b_elements, _ = problem.operand_elements
        read_elements = problem.batch * (a_elements + b_elements)
        read_bytes = read_elements * DTYPE_BYTES[problem.dtype]
        seconds = max(seconds, read_bytes / machine.bandwidth)
    return seconds


def _is_from_datasheet(machine: Machine) -> bool:
    """Return True if ``machines.toml`` lists the machine, with ceilings mostly from datasheets."""
    return machine.slug in known_machines()


def too_fast(case: Case, seconds: float, machine: Machine) -> tuple[bool, str]:
    """Return whether ``seconds`` is too short a time for a launch, and a sentence about that time.

    The sentence is empty unless the time is below the lower limit by more than a tolerance for
    errors of the clock and of the limit. Ceilings that were measured, or derived from what a device
    reports, may themselves be too low. If the limit is computed from such ceilings, the time never
    counts as too short, and the sentence is only a remark.
    """
    minimum = min_seconds(case, machine)
    if _is_from_datasheet(machine):
        if seconds * _SLACK >= minimum:
            return False, ""
        return True, (
            f"a launch took {seconds * 1e6:.3g} µs, but {machine.name} needs at least "
            f"{minimum * 1e6:.3g} µs at its peak rates, so this time is wrong. Check the timer "
            f"with {command('sweeps doctor --clock')}."
        )
    speed_over_ceiling = minimum / seconds
    if speed_over_ceiling <= _MEASURED_SLACK:
        return False, ""
    source = "measured by the run" if machine.kind == "cpu" else "derived from the GPU's properties"
    return False, (
        f"the case's speed is {speed_over_ceiling:.2f} times the machine's ceiling, which was "
        f"{source} and may be too low."
    )
