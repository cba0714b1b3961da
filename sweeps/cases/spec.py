"""Read sweeps from TOML files, and check them.

    question = "What does this sweep answer?"      # at the top of the file
    op = "gemm"                                    # the operation (see below)

    [[block]]                                      # all combinations of its axes; may be repeated
    on = "gpu"                                     # only on GPUs [default: all machines]
    m = { from = 256, to = 4096, step = 256 }
    n = 4096
    k = "n"
    dtype = "all"                                  # all dtypes on a GPU; fp32 and bf16 on a CPU
    where = ["flops <= 1e12"]                      # filters by size, flops, bytes, intensity, dtype

``implementation`` is ``library``, for the vendor library, or the name of an implementation, such as
``triton-tiled``. ``config`` is one of these:

- an empty string, for the implementation's own choice;
- ``best`` and a number, such as ``best 4`` for the four configs that the implementation ranks
  first;
- ``all``, for all candidate configs of the implementation except experimental ones;
- ``experimental``, for the candidates that ``all`` leaves out;
- the text of one config.

Dtypes that the machine emulates are left out, unless the user requested them or the block has no
other dtypes. ``dtype = "emulated"`` selects only the emulated dtypes.

``cache`` is ``cold`` or ``warm``. If ``op`` is ``gemm`` or ``linear`` and ``mode`` is ``burst``,
``cache`` may also be ``weights-cold``: the first operand is then warm and the second cold, as in
inference.

``op`` is ``gemm``, ``conv``, ``linear`` (the three GEMMs of a linear layer), ``layer``,
``projections``, ``timesteps`` or ``lstm``. If ``op`` is ``layer``, the axis ``layer`` names the
kind of layer, such as ``relu`` or ``layernorm``.

Shapes can also be listed as ``shapes = ["4096,4096,1024"]``, with the sizes in the order of
:data:`SHAPE`. Shapes at the top of the file are for all blocks that list no shapes. One size of
each operation, such as a GEMM's ``batch`` or a convolution's ``images``, is always an axis and
never part of a listed shape. ``vary = { n = [-1, 1, 8] }`` adds variants of each listed shape, with
n one less, one more and eight more. If ``vary`` names several sizes, each variant changes only one
of them.

``default = false`` at the top of a file in :file:`specs/` keeps the file's sweep out of runs that
name no sweep.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kernels.common.errors import UserError, nearest
from kernels.operation import LAYERS
from kernels.problem import CONV_LAYOUTS, GEMM_LAYOUTS, PASSES, TIMED_DTYPES
from sweeps.cases.axes import PAIRS, Axis, parse_axis, parse_size_axis, resolution_order
from sweeps.cases.case import CACHES, FILLS, MODES

FOLDER = Path(__file__).resolve().parents[1] / "specs"
"""Folder with the TOML files of the sweeps that come with Rooftile."""

SHAPE: dict[str, tuple[str, ...]] = {
    "gemm": ("m", "n", "k"),
    "conv": ("c", "h", "w", "kout", "r", "s", "stride", "padding", "dilation", "groups"),
    "linear": ("features_in", "features_out"),
    "layer": ("c", "h", "w"),
    "projections": ("m", "n", "k"),
    "timesteps": ("m", "n", "k"),
    "lstm": ("minibatch", "hidden", "features"),
}
"""Names of the sizes in a listed shape, in order, by operation."""
_BATCH = {  # name of the size that is always an axis, by operation
    "gemm": "batch", "conv": "images", "linear": "tokens", "layer": "images",
    "projections": "count", "timesteps": "count", "lstm": "steps",
}  # fmt: skip
SIZES = {op: (_BATCH[op], *shape) for op, shape in SHAPE.items()}
"""Names of all sizes by operation: the size that is always an axis, then those of :data:`SHAPE`."""
_DEFAULTS: dict[str, Any] = {
    "batch": 1, "stride": 1, "padding": 0, "dilation": 1, "groups": 1, "dtype": "all",
    "implementation": "library", "config": "", "mode": "burst", "cache": "cold", "fill": "normal",
}  # fmt: skip
_LAYOUTS = {"gemm": GEMM_LAYOUTS, "conv": CONV_LAYOUTS, "layer": CONV_LAYOUTS}
_PASSES = {"conv": PASSES, "linear": ("forward", "dgrad", "wgrad")}
_DTYPE_GROUPS = ("all", "emulated")  # words that stand for several dtypes
_OPTIONS = ("implementation", "config", "mode", "cache", "fill")
_WEIGHTS_COLD = ("gemm", "linear")  # operations whose GEMMs can be timed with cold weights
_TOP_KEYS = ("question", "op", "default", "shapes", "block")

QUANTITIES = ("flops", "bytes", "intensity")
"""Attributes of a problem that a filter may limit, besides the sizes and the dtype."""

_CONDITION = re.compile(r"\s*(\w+)\s*(<=|>=|==|!=|<|>)\s*([\w.+-]+)\s*")

Filter = tuple[str, str, str | float]
"""Left side, comparison operator and right side of a filter."""


@dataclass(frozen=True)
class Block:
    """A checked ``[[block]]``: all combinations of its axes that pass its filters."""

    on: str | None
    """Kind of machine that the block is for, ``gpu`` or ``cpu``; None for both."""
    axes: Mapping[str, Axis]
    shapes: tuple[str, ...]
    """Listed shapes and their variants, such as ``4096,4096,1024``; empty if all sizes are axes."""
    where: tuple[Filter, ...]


@dataclass(frozen=True)
class Sweep:
    """Named set of cases, and the question that these cases answer."""

    name: str
    question: str
    op: str
    default: bool
    """True if runs that name no sweep include this one."""
    blocks: tuple[Block, ...]


def all_sweeps() -> dict[str, Sweep]:
    """Return the sweeps of ``sweeps/specs`` by name, without those of :func:`broken_sweeps`."""
    return {name: sweep for name, sweep in _read_folder().items() if isinstance(sweep, Sweep)}


def broken_sweeps() -> dict[str, UserError]:
    """Return the errors of invalid or unreadable files in ``sweeps/specs``, by sweep name."""
    return {name: error for name, error in _read_folder().items() if isinstance(error, UserError)}


@cache
def _read_folder() -> dict[str, Sweep | UserError]:
    sweeps: dict[str, Sweep | UserError] = {}
    for path in sorted(FOLDER.glob("*.toml")):
        try:
            sweeps[path.stem] = read_sweep(path)
        except UserError as error:
            sweeps[path.stem] = error
    return sweeps


def read_sweep(path: Path) -> Sweep:
    """Read and check the TOML file of a sweep.

    Raises:
        UserError: if the file cannot be read or is not a valid sweep.
    """
    # 1. Read the file.
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or error
        raise UserError(
            f"{path} cannot be read ({reason}); check its path and permissions."
        ) from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:  # TOML is always in UTF-8
        raise UserError(f"{path.name} is not valid TOML ({error}); correct it.") from None
    # 2. Check the keys at the top of the file.
    _check_keys(table, _TOP_KEYS, path.name)
    for key in ("question", "op", "block"):
        if key not in table:
            raise UserError(f"{path.name} has no {key!r}; every sweep needs one.")
    _check_type(table["question"], str, f"{path.name}: question", "a sentence")
    is_default = table.get("default", True)
    _check_type(is_default, bool, f"{path.name}: default", "true or false")
    _check_word(table["op"], tuple(SIZES), f"{path.name}: op")
    blocks = table["block"]
    if not (isinstance(blocks, list) and all(isinstance(block, dict) for block in blocks)):
        raise UserError(
            f"{path.name}: block is not a list of tables; begin each block with [[block]], in "
            "double brackets."
        )
    # 3. Check the blocks. Shapes at the top of the file are for every block that lists no shapes.
    shared_keys = {"shapes": table["shapes"]} if "shapes" in table else {}
    checked_blocks = tuple(
        _read_block({**shared_keys, **block}, table["op"], f"{path.name}: block {number}")
        for number, block in enumerate(blocks, 1)
    )
    return Sweep(path.stem, table["question"], table["op"], is_default, checked_blocks)


def axis_names(op: str) -> tuple[str, ...]:
    """Return the names of the axes that a block may have in a sweep of the operation ``op``."""
    layer_axis = ("layer",) if op == "layer" else ()
    layout_axis = ("layout",) if op in _LAYOUTS else ()
    pass_axis = ("pass",) if op in _PASSES else ()
    return (*SIZES[op], *layer_axis, "dtype", *layout_axis, *pass_axis, *_OPTIONS)


def _read_block(block: Mapping[str, Any], op: str, location: str) -> Block:
    """Check the TOML table of a ``[[block]]``, and return the block.

    If the table lists no shapes, the caller has added those at the top of the file, if any.
    """
    # 1. Read the kind of machine, the listed shapes and their variants.
    names = axis_names(op)
    _check_keys(block, ("on", "shapes", "vary", "where", *names), location)
    if "on" in block:
        _check_word(block["on"], ("gpu", "cpu"), f"{location}: on")
    shapes = _read_shapes(block.get("shapes", []), op, location)
    clashing = [name for name in SHAPE[op] if name in block]
    if shapes and clashing:
        raise UserError(f"{location} has both shapes and {clashing[0]!r}; give only one of them.")
    if "vary" in block:
        shapes = _read_vary(block["vary"], shapes, op, location)
    # 2. Read each axis, or take its default. By default, a linear layer is timed in all passes, and
    # a convolution only forward. An axis may be a multiple of another size of the block, whether
    # that size is part of the listed shapes or an axis.
    sizes = [name for name in SIZES[op] if name in block or (shapes and name in SHAPE[op])]
    axes: dict[str, Axis] = {}
    for name in names:
        if name in block and name in SIZES[op]:
            other_sizes = [size for size in sizes if size != name]
            axes[name] = parse_size_axis(block[name], f"{location}: {name}", name, other_sizes)
        elif name in block:
            axes[name] = parse_axis(block[name], f"{location}: {name}")
        elif name in _DEFAULTS:
            axes[name] = (_DEFAULTS[name],)
        elif name == "layout":
            axes[name] = ("nt",) if op == "gemm" else ("nhwc",)
        elif name == "pass":
            axes[name] = _PASSES[op] if op == "linear" else ("fprop",)
        elif not (shapes and name in SHAPE[op]):
            # A list of shapes replaces only some of the axes.
            alternative = ", or a list of shapes" if name in SHAPE[op] else ""
            raise UserError(f"{location} has no {name!r}; add it{alternative}.")
    # 3. Check the axes together, and read the filters. Listed shapes replace the default values of
    # their sizes.
    if shapes:
        axes = {name: axis for name, axis in axes.items() if name not in SHAPE[op]}
    resolution_order(axes, location)  # raises UserError if axes depend on one another in a cycle
    _check_words(axes, op, location)
    _check_dtypes(axes, location)
    _check_weights_cold(axes, op, location)
    filters = block.get("where", [])
    _check_type(filters, list, f"{location}: where", "a list of filters")
    return Block(
        block.get("on"), axes, shapes, tuple(_read_filter(text, op, location) for text in filters)
    )


def _check_words(axes: Mapping[str, Axis], op: str, location: str) -> None:
    """Refuse words that are not valid for the operation."""
    valid_words = {
        "dtype": (*_DTYPE_GROUPS, *TIMED_DTYPES),
        "layer": tuple(LAYERS),
        "layout": _LAYOUTS.get(op, ()),
        "pass": _PASSES.get(op, ()),
        "mode": MODES,
        "cache": CACHES,
        "fill": FILLS,
    }
    for name, declared in axes.items():
        if name in SIZES[op]:
            continue
        for word in _words(declared):
            if name in valid_words:
                _check_word(word, valid_words[name], f"{location}: {name}")
            else:  # only the implementations know which words they take
                _check_type(word, str, f"{location}: {name}", "a string")


def _check_dtypes(axes: Mapping[str, Axis], location: str) -> None:
    """Refuse a list of several dtypes that contains ``all`` or ``emulated``."""
    words = _words(axes["dtype"])
    for word in words:
        if word in _DTYPE_GROUPS and len(words) > 1:
            raise UserError(
                f"{location}: dtype {word!r} cannot be combined with other dtypes; give it by "
                "itself, or list the dtypes."
            )


def _check_weights_cold(axes: Mapping[str, Axis], op: str, location: str) -> None:
    """Refuse ``weights-cold`` for operations and modes that do not support it.

    For sustained work, the sampler neither empties the cache nor loads the first operand into it.
    """
    if "weights-cold" not in _words(axes["cache"]):
        return
    if op not in _WEIGHTS_COLD:
        raise UserError(
            f"{location}: cache 'weights-cold' is available only for "
            f"{' and '.join(_WEIGHTS_COLD)}, not for {op}; use 'cold' or 'warm'."
        )
    if "sustained" in _words(axes["mode"]):
        raise UserError(
            f"{location}: cache 'weights-cold' is available only in mode 'burst'; remove "
            "'sustained' from mode."
        )


def _words(axis: Axis) -> tuple[Any, ...]:
    assert isinstance(axis, tuple)  # only an axis of sizes may be a multiple or have edges
    return axis


def _read_shapes(shapes: Any, op: str, location: str) -> tuple[str, ...]:
    """Check a list of shapes, which are strings such as ``4096,4096,1024``, and return them."""
    _check_type(shapes, list, f"{location}: shapes", "a list of strings")
    for shape in shapes:
        sizes = str(shape).split(",")
        # A stride, padding or dilation may be a pair such as 2x1, one number for each direction.
        are_numbers = len(sizes) == len(SHAPE[op]) and all(
            re.fullmatch(r"\d+(x\d+)?" if name in PAIRS else r"\d+", size)
            for name, size in zip(SHAPE[op], sizes, strict=True)
        )
        if not are_numbers:
            raise UserError(
                f"{location}: {shape!r} is not a shape; give {','.join(SHAPE[op])} as numbers."
            )
    return tuple(shapes)


def _read_vary(vary: Any, shapes: Sequence[str], op: str, location: str) -> tuple[str, ...]:
    """Return each shape, followed by its variants, in which ``vary`` adds an offset to one size.

    ``vary`` maps each size that is varied to an offset or a list of offsets.
    """
    if not shapes:
        raise UserError(f"{location} has vary but no shapes to change; add shapes, or remove vary.")
    _check_type(vary, dict, f"{location}: vary", "a table such as { n = [-1, 1] }")
    _check_keys(vary, [name for name in SHAPE[op] if name not in PAIRS], f"{location}: vary")
    variants: dict[str, None] = {}  # the dictionary is used as a set that keeps its order
    for shape in shapes:
        variants[shape] = None
        sizes = shape.split(",")
        for name, declared in vary.items():
            position = SHAPE[op].index(name)
            # A table becomes an offset, too, so that the error below says what is expected.
            offsets = declared if isinstance(declared, list) else [declared]
            for offset in parse_axis(offsets, f"{location}: vary.{name}"):
                if isinstance(offset, bool) or not isinstance(offset, int):
                    raise UserError(f"{location}: vary.{name} takes whole numbers, not {offset!r}.")
                new_size = int(sizes[position]) + offset
                if new_size < 1:
                    raise UserError(
                        f"{location}: vary.{name} is {offset}, which makes {name} of {shape!r} "
                        "smaller than 1; use a larger offset."
                    )
                new_sizes = [*sizes[:position], str(new_size), *sizes[position + 1 :]]
                variants[",".join(new_sizes)] = None
    return tuple(variants)


def _read_filter(text: Any, op: str, location: str) -> Filter:
    """Parse a filter such as ``flops <= 1e12``."""
    match = _CONDITION.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise UserError(
            f"{location}: {text!r} is not a filter; write a filter such as 'flops <= 1e12'."
        )
    left, sign, right = match.groups()
    numeric_names = (*SIZES[op], *QUANTITIES)
    _check_word(left, (*numeric_names, "dtype"), f"{location}: the left side of a filter")
    if left == "dtype":
        _check_word(sign, ("==", "!="), f"{location}: the operator after dtype")
        _check_word(right, tuple(TIMED_DTYPES), f"{location}: the dtype of a filter")
        return left, sign, right
    if right in numeric_names:
        return left, sign, right
    try:
        number = float(right)
    except ValueError:
        number = math.nan
    if math.isnan(number):
        raise UserError(
            f"{location}: the right side of a filter must be a number or a name such as flops, not "
            f"{right!r}; {nearest(right, numeric_names)}"
        )
    return left, sign, number


def _check_keys(table: Mapping[str, Any], valid: Sequence[str], location: str) -> None:
    for key in table:
        if key not in valid:
            raise UserError(f"{location} has an unknown key {key!r}; {nearest(key, valid)}")


def _check_type(value: Any, kind: type, location: str, expected: str) -> None:
    """Refuse a value whose type is not ``kind``; ``expected`` describes a valid value."""
    if not isinstance(value, kind):
        raise UserError(f"{location} must be {expected}, not {value!r}.")


def _check_word(word: Any, valid: Sequence[str], location: str) -> None:
    if word not in valid:
        raise UserError(f"{location} is {word!r}; {nearest(str(word), valid)}")
