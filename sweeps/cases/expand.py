"""Expand a sweep into its cases: the combinations of axis values that pass the filters."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kernels.common.errors import UserError
from kernels.machine import Machine
from kernels.operation import SERIES, Layer, Lstm, Series, Workload
from kernels.problem import Conv, Gemm, linear, parse_pair
from sweeps.cases.axes import PAIRS, resolution_order, resolve_axis, single_size
from sweeps.cases.case import Case
from sweeps.cases.spec import QUANTITIES, SHAPE, SIZES, Block, Filter, Sweep

# Largest number of combinations of one block's axes. It stops a mistyped range, which would take
# minutes to expand.
_MAX_COMBINATIONS = 200_000
_DTYPES_OF = {"gpu": ("fp32", "tf32", "fp16", "bf16"), "cpu": ("fp32", "bf16")}
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt,
    "==": operator.eq, "!=": operator.ne,
}  # fmt: skip

Library = Callable[[Workload, Machine], str]
Configured = Callable[[str, str, Workload, Machine], Sequence[str]]


def expand(
    sweep: Sweep,
    machine: Machine,
    library: Library,
    configured: Configured,
    requested: Sequence[str] = (),
) -> list[Case]:
    """Return the cases of a sweep on a machine, in declared order and without duplicates.

    ``library`` returns the name of the vendor library's implementation of a problem. ``configured``
    returns the configs to time, given the name of the implementation, the value of the sweep's axis
    ``config``, the problem and the machine. ``requested`` are dtypes that are kept even if the
    machine emulates them.

    Raises:
        UserError: if the sweep cannot be expanded, for example because a combination is not a valid
            problem.
    """
    cases: dict[Case, None] = {}  # the dictionary is used as a set that keeps its order
    for block in sweep.blocks:
        if block.on not in (None, machine.kind):
            continue
        for position, values in enumerate(_combinations(sweep, block, machine, requested)):
            if position == _MAX_COMBINATIONS:
                raise UserError(
                    f"{sweep.name}.toml has a block with more than {_MAX_COMBINATIONS:,} "
                    "combinations; use larger steps or fewer values."
                )
            problem = _problem(sweep, values)
            if not all(_meets(condition, problem, values) for condition in block.where):
                continue
            implementation = values["implementation"]
            if implementation == "library":
                implementation = library(problem, machine)
            for config in configured(implementation, values["config"], problem, machine):
                case = Case(
                    sweep.name,
                    problem,
                    implementation,
                    config,
                    mode=values["mode"],
                    cache=values["cache"],
                    fill=values["fill"],
                )
                cases[case] = None
    return list(cases)


def _combinations(
    sweep: Sweep, block: Block, machine: Machine, requested: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yield every combination of the values of a block's axes, as a dictionary by axis name.

    If the block lists shapes, each dictionary also has the sizes of one shape, as strings.
    """
    # The axes of words can precede all sizes, because no word depends on a size.
    ordered_names = resolution_order(block.axes)
    size_axes = [name for name in ordered_names if name in SIZES[sweep.op]]
    word_axes = [name for name in ordered_names if name not in SIZES[sweep.op]]

    def extend(values: dict[str, Any], names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Yield ``values``, extended by each combination of values of the axes ``names``."""
        if not names:
            yield values
            return
        name, *later_names = names
        # The values of an axis may depend on those of the axes before it.
        options = resolve_axis(block.axes[name], values, machine, name)
        if name == "dtype":
            options = list(_dtypes(options, machine, requested))
        for option in options:
            yield from extend({**values, name: option}, later_names)

    if not block.shapes:
        yield from extend({}, [*word_axes, *size_axes])
    for shape in block.shapes:
        shape_values = dict(zip(SHAPE[sweep.op], shape.split(","), strict=True))
        yield from extend(shape_values, [*word_axes, *size_axes])


def _dtypes(declared: list[str], machine: Machine, requested: Sequence[str]) -> Sequence[str]:
    """Return the dtypes that a block's ``dtype`` axis selects on a machine.

    Dtypes that the machine emulates are left out, because they would take most of the run's time.
    An emulated dtype is kept if the user requested it, or if the block selects only emulated
    dtypes.
    """
    if declared == ["emulated"]:
        return machine.emulated
    dtypes = _DTYPES_OF[machine.kind] if declared == ["all"] else declared
    kept = [dtype for dtype in dtypes if dtype not in machine.emulated or dtype in requested]
    return kept if kept else dtypes


def _problem(sweep: Sweep, values: Mapping[str, Any]) -> Workload:
    """Build the problem that a combination of axis values describes."""
    dtype = values["dtype"]

    def size(name: str) -> int:
        return int(values[name])  # sizes of listed shapes are strings

    try:
        if sweep.op == "gemm":
            return Gemm(size("m"), size("n"), size("k"), dtype, values["layout"], size("batch"))
        if sweep.op == "linear":
            gemms_by_pass = linear(size("tokens"), size("features_in"), size("features_out"), dtype)
            return gemms_by_pass[values["pass"]]
        if sweep.op == "layer":
            return Layer(
                values["layer"],
                size("images"),
                size("c"),
                size("h"),
                size("w"),
                dtype,
                values["layout"],
            )
        if sweep.op in SERIES:
            return Series(sweep.op, size("count"), size("m"), size("n"), size("k"), dtype)
        if sweep.op == "lstm":
            return Lstm(size("steps"), size("minibatch"), size("hidden"), size("features"), dtype)
        # The only operation that is left is ``conv``.
        sizes = (size(name) for name in ("images", "c", "h", "w", "kout", "r", "s"))
        pairs = (parse_pair(str(values[name]), name) for name in PAIRS)
        return Conv.build(sizes, pairs, size("groups"), dtype, values["layout"], values["pass"])
    except ValueError as error:
        raise UserError(f"{sweep.name}.toml declares an invalid problem: {error}") from None


def _meets(condition: Filter, problem: Workload, values: Mapping[str, Any]) -> bool:
    """Return True if a problem with these axis values meets a condition."""
    left, sign, right = condition

    def value_of(side: str | float) -> Any:
        if not isinstance(side, str):
            return side
        if side in (*QUANTITIES, "dtype"):
            return getattr(problem, side)
        if side in values:
            return single_size(values[side], side)
        return side  # a dtype, which stands for itself

    return _COMPARE[sign](value_of(left), value_of(right))
