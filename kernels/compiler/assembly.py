"""Work of a kernel's inner loop, read from its PTX: multiply-adds and copied bytes.

A GEMM's time is spent in the loop over K. If one turn of it does more multiply-adds than the tile's
bm · bn · bk, or copies more than the blocks' (bm + bn) · bk elements, the compiler does work that
the algorithm does not need. LLVM notes next to every basic block which loop it belongs to.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

INSTRUCTIONS = (
    ("tcgen05", r"\btcgen05\.mma\."),
    ("wgmma", r"\bwgmma\.mma_async\."),
    ("mma.sync", r"\bmma\.sync\."),
    ("fma", r"\bfma\.rn\.f32(?:x2)?\b"),
)
"""Families of matrix instructions and their patterns, in the order of preference."""

BULK_COPY = "complete_tx::bytes"
"""Text that occurs in a TMA copy into shared memory, and nowhere else."""

_PATTERN = dict(INSTRUCTIONS)
_BLOCK = re.compile(r"^\$L__(BB\d+_\d+):(.*)$")
_FALL_THROUGH = re.compile(r"^// %bb\.\d+:(.*)$")
_OF_LOOP = re.compile(r"in Loop: Header=(BB\d+_\d+)")
_HEADER = re.compile(r"=>\s*This (?:Inner )?Loop Header")
_SHAPE = re.compile(r"\.m(\d+)n(\d+)k(\d+)\.")
_CONSTANT = re.compile(r"mov\.b32\s+(%r\d+), (-?\d+);")
_TENSOR_CORE_5 = re.compile(r"tcgen05\.mma\.\S*kind::(\w+)\s+\[[^\]]*\],[^,]+,[^,]+, (%r\d+)")
_CP_ASYNC = re.compile(r"\bcp\.async\.c[ag]\.shared\.global.*?, (?:0x)?([0-9a-fA-F]+)[,;]")
_BULK = re.compile(r"mbarrier\.arrive\.expect_tx\.\S+ _, \[[^\]]*\], (\d+);")
_LOAD = re.compile(r"\bld\.global(?:\.[\w:]+)*?(?:\.v(\d))?\.[busf](\d+)\b")


@dataclass(frozen=True)
class InnerLoop:
    """One turn of a kernel's loop over K.

    - ``instruction`` is one of :data:`INSTRUCTIONS`, or empty.
    - ``products`` counts the multiply-adds of one CTA.
    - ``copied`` counts the bytes that the CTA brings from global memory.
    - ``copy_bytes`` is the width of its narrowest copy: the bytes that one thread copies, or the
      whole block that TMA copies.
    """

    instruction: str
    products: int
    copied: int
    copy_bytes: int


def inner_loop(ptx: str, warps: int) -> InnerLoop:
    """Read the loop over K. The loops of a warp-specialised kernel are added up.

    Args:
        ptx: PTX of one kernel.
        warps: number of warps that multiply; in a specialised kernel, those of one consumer group,
            because each group has a loop of its own.
    """
    instruction = next((name for name, p in INSTRUCTIONS if re.search(p, ptx)), "")
    constants = {name: int(value) for name, value in _CONSTANT.findall(ptx)}
    products, copied, widths = 0, 0, []
    for loop in _loops(ptx):
        text = "\n".join(loop)
        products += _products(loop, instruction, warps, constants)
        bulk = [int(size) for size in _BULK.findall(text)]
        threads = [int(size, 16) for size in _CP_ASYNC.findall(text)]
        threads += [int(n or 1) * int(bits) // 8 for n, bits in _LOAD.findall(text)]
        copied += sum(bulk) + 32 * warps * sum(threads)
        widths += threads
        if bulk:
            widths.append(sum(bulk) // text.count(BULK_COPY))
    return InnerLoop(instruction, products, copied, min(widths, default=0))


def _products(loop: Iterable[str], instruction: str, warps: int, constants: dict[str, int]) -> int:
    """Count the multiply-adds that a CTA's instructions in these lines do."""
    total = 0
    for line in loop:
        if not instruction or not re.search(_PATTERN[instruction], line):
            continue
        if instruction == "fma":
            total += 32 * warps * (2 if "f32x2" in line else 1)
        elif instruction == "tcgen05":
            match = _TENSOR_CORE_5.search(line)
            if match:  # the instruction descriptor: N / 8 from bit 17, M / 16 from bit 24
                kind, register = match.groups()
                word = constants[register]
                n, m = (word >> 17 & 0x3F) * 8, (word >> 24 & 0x1F) * 16
                total += m * n * (8 if kind == "tf32" else 16)
        else:
            shape = _SHAPE.search(line)
            assert shape is not None
            m, n, k = map(int, shape.groups())
            total += m * n * k * (warps // 4 if instruction == "wgmma" else warps)
    return total


def _loops(ptx: str) -> list[list[str]]:
    """Return the lines of each innermost loop, without those of other loops."""
    lines: dict[str, list[str]] = defaultdict(list)
    inner: set[str] = set()
    # LLVM's notes on a block follow the block's first line as comments. They give the loop that the
    # block is the header of, or the header of the loop around it.
    current, label, notes, in_notes = "", "", "", False
    for line in ptx.splitlines():
        block = _BLOCK.match(line)
        if block or _FALL_THROUGH.match(line):
            label, notes, in_notes = block.group(1) if block else "", line, True
        elif in_notes and line.lstrip().startswith("//"):
            notes += line
        else:
            in_notes = False
        if in_notes:
            enclosing = _OF_LOOP.search(notes)
            current = label if _HEADER.search(notes) else enclosing.group(1) if enclosing else ""
            if "This Inner Loop" in notes:
                inner.add(label)
            continue
        if current:
            lines[current].append(line.strip())
    return [lines[header] for header in lines if header in inner]
