"""Counts of machine instructions in a kernel's inner loop, read from the output of ``nvdisasm``.

PTX shows the work that the kernel asks for. Only machine code (SASS) shows how many other
instructions the loop has, such as those for addresses, masks and predicates. SASS also shows
whether the loop waits for all matrix instructions or keeps some in flight.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import triton

_LABEL = re.compile(r"^\s*\.(L_x_\d+):")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);")
_TARGET = re.compile(r"`\(\.(L_x_\d+)\)")
_MATRIX = re.compile(r"^(HGMMA|QGMMA|IGMMA|HMMA|QMMA|IMMA|DMMA|UTC\w*MMA|FFMA2?)\b")
_WAITS_FOR_ALL = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x0\b")
_ENDS = ("EXIT", "RET", "BRX")


@dataclass(frozen=True)
class LoopCode:
    """Counts of the machine instructions in one iteration of a kernel's loop over K.

    ``matrix`` is the number of instructions that multiply matrices or, in fp32, that multiply and
    add. ``waits_for_all`` is True if the iteration waits for every wgmma.
    """

    instructions: int
    matrix: int
    waits_for_all: bool


NO_LOOP = LoopCode(instructions=0, matrix=0, waits_for_all=False)


def disassemble(cubin: bytes) -> str:
    """Return the machine code of a binary as text, using the ``nvdisasm`` that Triton includes."""
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = subprocess.run([program, "-c", file.name], capture_output=True, text=True, check=True)
    return run.stdout


def loop_code(sass: str) -> LoopCode:
    """Return the counts for one iteration of the innermost loop with the most matrix instructions.

    In a persistent kernel, the loop over K may contain code that finishes a tile. Most iterations
    skip this code. Among the paths through the loop that have the most matrix instructions, the
    shortest one is therefore counted. The result is :data:`NO_LOOP` if no loop has matrix
    instructions.
    """
    lines, labels = _read(sass)
    # 1. Find the loops, as (first line, last line). Each backward branch is the end of a loop.
    loops = []
    for position, line in enumerate(lines):
        begin = labels.get(line.target, len(lines))
        if begin <= position:
            loops.append((begin, position))
    # 2. Keep the loops that multiply, and only the innermost one of nested loops.
    multiplying = [
        (begin, end) for begin, end in loops if any(line.matrix for line in lines[begin : end + 1])
    ]
    innermost = [
        loop for loop in multiplying if not any(_encloses(loop, other) for other in multiplying)
    ]
    # 3. Read one iteration of each of these loops.
    iterations = [_best_path(lines[begin : end + 1], begin, labels) for begin, end in innermost]
    return max(iterations, key=lambda iteration: iteration.matrix, default=NO_LOOP)


def _encloses(outer: tuple[int, int], inner: tuple[int, int]) -> bool:
    return outer != inner and outer[0] <= inner[0] and inner[1] <= outer[1]


@dataclass(frozen=True)
class _Line:
    matrix: bool  # whether it multiplies matrices
    waits: bool  # whether it waits for every wgmma
    target: str  # label that the line branches to, or empty
    falls_through: bool  # whether execution may continue with the next line


def _read(sass: str) -> tuple[list[_Line], dict[str, int]]:
    """Return the instructions, and for each label the position of the instruction after it."""
    lines: list[_Line] = []
    labels: dict[str, int] = {}
    for text in sass.splitlines():
        label, instruction = _LABEL.match(text), _INSTRUCTION.match(text)
        if label:
            labels[label.group(1)] = len(lines)
        if not instruction:
            continue
        predicate, name, operands = instruction.groups()
        # A predicate among the operands, as P1 in "@P0 BRA P1, `(.L_x_1)", is also a condition.
        is_conditional = bool(predicate) or re.match(r"\s*!?U?P", operands) is not None
        target = _TARGET.search(operands) if name.startswith("BRA") else None
        leaves = bool(target) or name.startswith(_ENDS)
        lines.append(
            _Line(
                matrix=bool(_MATRIX.match(name)),
                waits=bool(_WAITS_FOR_ALL.search(f"{name}{operands}")),
                target=target.group(1) if target else "",
                falls_through=is_conditional or not leaves,
            )
        )
    return lines, labels


class _Path(NamedTuple):
    """Counts of the lines on a path of execution; the better of two paths compares as greater."""

    matrix: int  # lines that multiply matrices
    minus_lines: int  # negative number of lines, so that a shorter path is greater
    waits: int  # lines that wait for every wgmma


def _best_path(loop: Sequence[_Line], begin: int, labels: dict[str, int]) -> LoopCode:
    """Return the counts of the best path (:class:`_Path`) from the loop's first line to its last.

    Backward branches inside the loop are ignored: they repeat a wait for a barrier, or belong to
    another loop. ``begin`` is the position of the loop's first line in the whole code. The result
    is :data:`NO_LOOP` if no path reaches the last line.
    """
    # The list holds the best path to each line, without that line, or None if no path reaches it.
    best: list[_Path | None] = [None] * len(loop)
    best[0] = _Path(0, 0, 0)
    for position, line in enumerate(loop):
        before = best[position]
        if before is None:
            continue
        path = _Path(before.matrix + line.matrix, before.minus_lines - 1, before.waits + line.waits)
        if position == len(loop) - 1:
            return LoopCode(-path.minus_lines, path.matrix, path.waits > 0)
        next_positions = [position + 1] if line.falls_through else []
        # A line that does not branch gets a negative target, which is never ahead.
        target = labels.get(line.target, -1) - begin
        if target > position:
            next_positions.append(target)
        for next_position in next_positions:
            if next_position < len(loop):
                best_so_far = best[next_position]
                best[next_position] = path if best_so_far is None else max(path, best_so_far)
    return NO_LOOP
