"""Work of a kernel's inner loop, read from its PTX: multiply-adds and copied bytes.

A GEMM spends most of its time in the loop over K. In each iteration, which covers bk elements of K,
a tile of bm × bn results needs bm · bn · bk multiply-adds and (bm + bn) · bk elements of A and B.
If an iteration computes or copies more, the compiled code does work that the algorithm does not
need.
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
"""Families of matrix instructions in order of preference, each with its pattern in PTX.

``fma`` is listed as a family, because fp32 has no matrix instruction.
"""

BULK_COPY = "complete_tx::bytes"
"""Text that PTX contains only in TMA copies into shared memory."""

_WARP_THREADS = 32
_PATTERN = dict(INSTRUCTIONS)
_BLOCK = re.compile(r"^\$L__(BB\d+_\d+):(.*)$")
_FALL_THROUGH = re.compile(r"^// %bb\.\d+:(.*)$")
_OF_LOOP = re.compile(r"in Loop: Header=(BB\d+_\d+)")
_HEADER = re.compile(r"=>\s*This (?:Inner )?Loop Header")
_SHAPE = re.compile(r"\.m(\d+)n(\d+)k(\d+)\.")
_CONSTANT = re.compile(r"mov\.b32\s+(%r\d+), (-?\d+);")
_TENSOR_CORE_5 = re.compile(r"tcgen05\.mma\.\S*kind::(\w+)\s+\[[^\]]*\],[^,]+,[^,]+, (%r\d+)")
_CP_ASYNC = re.compile(r"\bcp\.async\.c[ag]\.shared\.global.*?, (0x[0-9a-fA-F]+|\d+)[,;]")
_BULK = re.compile(r"mbarrier\.arrive\.expect_tx\.\S+ _, \[[^\]]*\], (\d+);")
_LOAD = re.compile(r"\bld\.global(?:\.[\w:]+)*?(?:\.v(\d))?\.[busf](\d+)\b")


@dataclass(frozen=True)
class InnerLoop:
    """Work of one iteration of a kernel's loop over K.

    - ``instruction`` is the kernel's family of matrix instructions in :data:`INSTRUCTIONS`, or ""
      if the kernel has none.
    - ``products`` is the number of multiply-adds that one CTA computes.
    - ``copied`` is the number of bytes that the CTA copies from global memory.
    - ``copy_bytes`` is the size of the narrowest copy: the number of bytes that one thread copies
      at once, or the mean size of the blocks that TMA copies. It is 0 if nothing is copied.
    """

    instruction: str
    products: int
    copied: int
    copy_bytes: int


def inner_loop(ptx: str, warps: int) -> InnerLoop:
    """Read the work of one iteration of the loop over K from a kernel's PTX.

    If the kernel has several innermost loops, one iteration of each is counted, because each group
    of warps in a warp-specialised kernel has a separate loop. ``warps`` is the number of warps in
    each group that multiplies.
    """
    # The first family of INSTRUCTIONS that occurs is the one that multiplies.
    instruction = next((name for name, pattern in INSTRUCTIONS if re.search(pattern, ptx)), "")
    constants = {name: int(value) for name, value in _CONSTANT.findall(ptx)}
    products, copied = 0, 0
    copy_widths: list[int] = []
    for loop in _loops(ptx):
        text = "\n".join(loop)
        products += _products(loop, instruction, warps, constants)
        # A thread copies to shared memory (cp.async), or it loads a vector of values (ld.global).
        thread_bytes = [int(size, base=0) for size in _CP_ASYNC.findall(text)]  # 0x10 or 16
        for vector_length, element_bits in _LOAD.findall(text):
            # A load without a vector length, such as ``.v4``, reads one value.
            thread_bytes.append(int(vector_length or 1) * int(element_bits) // 8)
        # A barrier announces how many bytes TMA will bring, for one block or for several.
        bulk_bytes = [int(size) for size in _BULK.findall(text)]
        copied += sum(bulk_bytes) + _WARP_THREADS * warps * sum(thread_bytes)
        copy_widths += thread_bytes
        if bulk_bytes:
            copy_widths.append(sum(bulk_bytes) // text.count(BULK_COPY))
    return InnerLoop(instruction, products, copied, min(copy_widths, default=0))


def _products(loop: Iterable[str], instruction: str, warps: int, constants: dict[str, int]) -> int:
    """Count the multiply-adds that the instructions in a loop's lines compute for one CTA.

    ``constants`` maps the names of registers, such as ``%r12``, to the constants that they hold. A
    tcgen05 instruction reads its instruction descriptor from such a register.
    """
    total = 0
    for line in loop:
        if not instruction or not re.search(_PATTERN[instruction], line):
            continue
        if instruction == "fma":
            total += _WARP_THREADS * warps * (2 if "f32x2" in line else 1)
        elif instruction == "tcgen05":
            match = _TENSOR_CORE_5.search(line)
            assert match is not None, f"the operands were not found in: {line}"
            kind, register = match.groups()
            # The instruction descriptor has N / 8 from bit 17 and M / 16 from bit 24.
            descriptor = constants[register]
            n = (descriptor >> 17 & 0x3F) * 8
            m = (descriptor >> 24 & 0x1F) * 16
            k = 8 if kind == "tf32" else 16  # the elements in 32 bytes of an operand
            total += m * n * k
        else:
            shape = _SHAPE.search(line)
            assert shape is not None, f"the shape was not found in: {line}"
            m, n, k = map(int, shape.groups())
            # Four warps together issue one wgmma. An mma.sync belongs to a single warp.
            issuers = warps // 4 if instruction == "wgmma" else warps
            total += m * n * k * issuers
    return total


def _loops(ptx: str) -> list[list[str]]:
    """Return the lines of each innermost loop, one list per loop."""
    lines_by_header: dict[str, list[str]] = defaultdict(list)
    innermost_headers: set[str] = set()
    # LLVM's notes on a block are comments in the block's first line and in the lines after it. They
    # say that the block is the header of a loop, or they name the header of the loop around it.
    loop_header = ""  # header of the innermost loop around the current line, or empty
    label = ""  # label of the current block; empty if no branch leads to it
    notes = ""  # LLVM's notes on the current block, as far as they were read
    in_notes = False  # whether the current line belongs to the notes
    for line in ptx.splitlines():
        block = _BLOCK.match(line)
        if block or _FALL_THROUGH.match(line):
            label = block.group(1) if block else ""
            notes = line
            in_notes = True
        elif in_notes and line.lstrip().startswith("//"):
            notes += line
        else:
            in_notes = False
        if in_notes:
            enclosing = _OF_LOOP.search(notes)
            loop_header = enclosing.group(1) if enclosing else ""
            if _HEADER.search(notes):
                loop_header = label
            if "This Inner Loop" in notes:
                innermost_headers.add(label)
        elif loop_header:
            lines_by_header[loop_header].append(line.strip())
    return [lines for header, lines in lines_by_header.items() if header in innermost_headers]
