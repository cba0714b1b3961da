"""Sweeps as data: read a TOML file, check every word of it, and expand it into cases.

    question = "What does this sweep answer?"      # the first line of the file
    op = "gemm"                                    # gemm, conv, or linear (a layer's three GEMMs)

    [[block]]                                      # the product of its axes; as many as wanted
    on = "gpu"                                     # only there; without it, everywhere
    m = { from = 256, to = 4096, step = 256 }
    n = 4096
    k = "n"
    dtype = "all"                                  # every dtype of this kind of machine
    where = ["flops <= 1e12"]                      # filters on sizes, flops, bytes, intensity

Shapes can also be listed, for one block or at the top for all: ``shapes = ["4096,4096,1024"]``,
the sizes in the command line's order. What runs over the batch (a GEMM's ``batch``, a
convolution's ``images``, a linear layer's ``tokens``) is never in the list: it stays an axis.
"""

from __future__ import annotations

import operator
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kernels.errors import UserError, nearest
from kernels.machine import Machine
from kernels.problem import (
    CONV_LAYOUTS,
    DTYPE_BYTES,
    GEMM_LAYOUTS,
    PASSES,
    Conv,
    Gemm,
    Problem,
    linear,
    parse_pair,
)  # fmt: skip
from sweeps.axes import Axis, parse_axis, resolve_axis
from sweeps.case import CACHES, FILLS, MODES, Case

FOLDER = Path(__file__).with_name("specs")

_SHAPE: dict[str, tuple[str, ...]] = {
    "gemm": ("m", "n", "k"),
    "conv": ("c", "h", "w", "kout", "r", "s", "stride", "padding", "dilation", "groups"),
    "linear": ("features_in", "features_out"),
}
_BATCH = {"gemm": "batch", "conv": "images", "linear": "tokens"}
_SIZES = {op: (_BATCH[op], *shape) for op, shape in _SHAPE.items()}
_DEFAULTS: dict[str, Any] = {
    "batch": 1, "stride": 1, "padding": 0, "dilation": 1, "groups": 1, "dtype": "all",
    "implementation": "library", "config": "", "mode": "burst", "cache": "cold", "fill": "normal",
}  # fmt: skip
_LAYOUTS = {"gemm": GEMM_LAYOUTS, "conv": CONV_LAYOUTS, "linear": ()}
_PASSES = {"gemm": (), "conv": PASSES, "linear": ("forward", "dgrad", "wgrad")}
_HOW = ("implementation", "config", "mode", "cache", "fill")
_TOP_KEYS = ("question", "op", "default", "shapes", "block")
_DTYPES_OF = {"gpu": ("fp32", "tf32", "fp16", "bf16"), "cpu": ("fp32", "bf16")}
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt,
    "==": operator.eq, "!=": operator.ne,
}  # fmt: skip

Library = Callable[[Problem, Machine], str]
Chosen = Callable[[str, Problem, Machine], str]


@dataclass(frozen=True)
class Block:
    """A product of axes, checked."""

    on: str | None
    axes: Mapping[str, Axis]
    shapes: tuple[str, ...]
    where: tuple[tuple[str, str, str | float], ...]


@dataclass(frozen=True)
class Sweep:
    """A named set of cases and the question that it answers."""

    name: str
    question: str
    op: str
    default: bool
    blocks: tuple[Block, ...]


@cache
def all_sweeps() -> dict[str, Sweep]:
    """Every sweep of ``sweeps/specs`` by name."""
    return {path.stem: read_sweep(path) for path in sorted(FOLDER.glob("*.toml"))}


def read_sweep(path: Path) -> Sweep:
    """Read and check one file.

    Raises:
        UserError: naming file, key and the nearest valid word.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path.name} is not valid TOML: {error}.") from None
    _check_keys(table, _TOP_KEYS, path.name)
    for key in ("question", "op", "block"):
        if key not in table:
            raise UserError(f"{path.name} has no {key!r}; every sweep needs one.")
    _check_word(table["op"], tuple(_SIZES), f"{path.name}: op")
    shared = {"shapes": table["shapes"]} if "shapes" in table else {}
    blocks = tuple(
        _read_block({**shared, **block}, table["op"], f"{path.name}: block {number}")
        for number, block in enumerate(table["block"], 1)
    )
    return Sweep(path.stem, table["question"], table["op"], table.get("default", True), blocks)


def _axis_names(op: str) -> tuple[str, ...]:
    layout = ("layout",) if _LAYOUTS[op] else ()
    passes = ("pass",) if _PASSES[op] else ()
    return (*_SIZES[op], "dtype", *layout, *passes, *_HOW)


def _read_block(block: Mapping[str, Any], op: str, where: str) -> Block:
    names = _axis_names(op)
    _check_keys(block, ("on", "shapes", "where", *names), where)
    if "on" in block:
        _check_word(block["on"], ("gpu", "cpu"), f"{where}: on")
    shapes = tuple(block.get("shapes", ()))
    for shape in shapes:
        if len(str(shape).split(",")) != len(_SHAPE[op]):
            raise UserError(f"{where}: shapes are written {','.join(_SHAPE[op])}, not {shape!r}.")
    axes: dict[str, Axis] = {}
    for name in names:
        if name in block:
            axes[name] = parse_axis(block[name], f"{where}: {name}", block)
        elif name in _DEFAULTS:
            axes[name] = (_DEFAULTS[name],)
        elif name == "layout":
            axes[name] = ("nt",) if op == "gemm" else ("nhwc",)
        elif name == "pass":
            axes[name] = _PASSES[op] if op == "linear" else ("fprop",)
        elif not (shapes and name in _SHAPE[op]):
            raise UserError(f"{where} has no {name!r}; every {op} needs it, or shapes.")
    known = {
        "dtype": ("all", *DTYPE_BYTES), "layout": _LAYOUTS[op], "pass": _PASSES[op],
        "mode": MODES, "cache": CACHES, "fill": FILLS,
    }  # fmt: skip
    for name, words in known.items():
        declared = axes.get(name, ())
        for word in declared if isinstance(declared, tuple) else ():
            _check_word(word, words, f"{where}: {name}")
    filters = tuple(_read_filter(text, op, where) for text in block.get("where", ()))
    return Block(block.get("on"), axes, shapes, filters)


def _read_filter(text: str, op: str, where: str) -> tuple[str, str, str | float]:
    match = re.fullmatch(r"\s*(\w+)\s*(<=|>=|==|!=|<|>)\s*([\w.+-]+)\s*", text)
    names = (*_SIZES[op], "flops", "bytes", "intensity", "dtype")
    if match is None:
        raise UserError(f"{where}: a filter reads like 'flops <= 1e12', not {text!r}.")
    left, sign, right = match.groups()
    _check_word(left, names, f"{where}: where")
    if right in names or right in DTYPE_BYTES:
        return left, sign, right
    try:
        return left, sign, float(right)
    except ValueError:
        raise UserError(
            f"{where}: where compares with {right!r}; {nearest(right, names)}"
        ) from None


def _check_keys(table: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key in table:
        if key not in known:
            raise UserError(f"{where} has no key {key!r}; {nearest(key, known)}")


def _check_word(word: Any, known: Sequence[str], where: str) -> None:
    if word not in known:
        raise UserError(f"{where} is {word!r}; {nearest(str(word), known)}")


def expand(sweep: Sweep, machine: Machine, library: Library, chosen: Chosen) -> list[Case]:
    """The cases of a sweep on a machine, in declared order, none twice.

    Args:
        sweep: the declaration.
        machine: decides blocks, dtypes and edges.
        library: names the library implementation of a problem.
        chosen: the text of the config that an implementation would choose for a problem, for
            ``config = ""``.
    """
    cases: dict[Case, None] = {}
    for block in sweep.blocks:
        if block.on not in (None, machine.kind):
            continue
        for values in _products(sweep, block, machine):
            problem = _problem(sweep, values)
            if not all(_passes(f, problem, values) for f in block.where):
                continue
            name = values["implementation"]
            if name == "library":
                name = library(problem, machine)
            config = values["config"] or chosen(name, problem, machine)
            how = (values[key] for key in ("mode", "cache", "fill"))
            cases[Case(sweep.name, problem, name, config, *how)] = None
    return list(cases)


def _products(sweep: Sweep, block: Block, machine: Machine) -> Iterator[dict[str, Any]]:
    """Every combination of the block's axes, sizes varying fastest."""
    names = [name for name in _axis_names(sweep.op) if name in block.axes]
    if block.shapes:
        names = [name for name in names if name not in _SHAPE[sweep.op]]
    sizes = [name for name in names if name in _SIZES[sweep.op]]
    others = [name for name in names if name not in _SIZES[sweep.op]]
    # An axis that refers to another, or whose edges lie where others say, comes after it.
    sizes.sort(key=lambda name: not isinstance(block.axes[name], tuple))

    def extend(values: dict[str, Any], names: Sequence[str]) -> Iterator[dict[str, Any]]:
        if not names:
            yield values
            return
        name, *rest = names
        options = resolve_axis(block.axes[name], values, machine, name)
        if name == "dtype" and options == ["all"]:
            options = list(_DTYPES_OF[machine.kind])
        for option in options:
            yield from extend({**values, name: option}, rest)

    for start in block.shapes or ("",):
        listed = dict(zip(_SHAPE[sweep.op], start.split(","), strict=True)) if start else {}
        yield from extend(listed, [*others, *sizes])


def _problem(sweep: Sweep, values: Mapping[str, Any]) -> Problem:
    size = {name: values[name] for name in _SIZES[sweep.op]}
    dtype = values["dtype"]
    try:
        if sweep.op == "gemm":
            batch, m, n, k = (int(size[name]) for name in _SIZES["gemm"])
            return Gemm(m, n, k, dtype, values["layout"], batch)
        if sweep.op == "linear":
            tokens, features_in, features_out = (int(size[name]) for name in _SIZES["linear"])
            return linear(tokens, features_in, features_out, dtype)[values["pass"]]
        sizes = (int(size[name]) for name in _SIZES["conv"][:7])
        pairs = (parse_pair(str(size[name]), name) for name in ("stride", "padding", "dilation"))
        how = values["layout"], values["pass"]
        return Conv.build(sizes, pairs, int(size["groups"]), dtype, *how)
    except ValueError as error:
        raise UserError(f"{sweep.name}.toml declares an impossible problem: {error}") from None


def _passes(
    condition: tuple[str, str, str | float], problem: Problem, values: Mapping[str, Any]
) -> bool:
    left, sign, right = condition

    def value(word: str | float) -> Any:
        if isinstance(word, str) and word in ("flops", "bytes", "intensity", "dtype"):
            return getattr(problem, word)
        return float(values[word]) if isinstance(word, str) and word in values else word

    return _COMPARE[sign](value(left), value(right))
