"""Markdown tables of the compiled kernels: one per family, with a column per architecture."""

from __future__ import annotations

from collections.abc import Sequence

import triton

from kernels.common.program import target
from kernels.compiler.compilecheck import CompileRow
from kernels.problem import WIDE_BYTES

_HEAD = """# What the compiler makes of the kernels

Written by {written} with Triton {version}; no GPU is needed.
Each cell covers all layouts of a GEMM, or all passes of a convolution. The column `rows` says
whether the length of the operands' rows is a multiple of 16 bytes (aligned rows) or an odd number
of elements. The config is the one that would be chosen for a GEMM of 4096³ (4095³ for odd rows),
or for a 3 × 3 convolution of a ResNet. The convolution has images of 14 × 14 pixels and 256
channels (255 for odd rows). A cell says:

- the matrix instruction, the largest number of registers per thread, and the spilled bytes, if any;
- the width of the narrowest copy from global to shared memory, in bytes per thread, or `TMA` if
  whole blocks are copied;
- the shared memory of a CTA;
- the largest number of machine instructions in one iteration of the loop over K, and how many of
  them multiply, such as `88:4`;
- `waits` if the loop waits for every wgmma before the next iteration;
- the number of kernels of one call, if there are several.

In the {aligned:,} kernels for aligned rows, one iteration of the loop over K computes
{products} times the multiplications and copies {copied} times the bytes that a tile needs."""


def compile_markdown(rows: Sequence[CompileRow]) -> str:
    """Return the Markdown document of the compiled kernels."""
    arches = list(dict.fromkeys(row.arch for row in rows))
    aligned = [row for row in rows if row.alignment == WIDE_BYTES]
    lines = [
        _HEAD.format(
            written=target("compile-check WRITE=kernels/COMPILED.md", "compile --write FILE"),
            version=triton.__version__,
            products=_range([row.products for row in aligned]),
            copied=_range([row.copied for row in aligned]),
            aligned=len(aligned),
        )
    ]
    for family in dict.fromkeys(row.kernel for row in rows):
        family_rows = [row for row in rows if row.kernel == family]
        lines += ["", f"## {family}", "", *_family_table(family_rows, arches)]
    return "\n".join([*lines, ""])


def _family_table(rows: Sequence[CompileRow], arches: Sequence[str]) -> list[str]:
    """Return the lines of one family's table: a header, and a line for each dtype and alignment."""
    rows_of_line: dict[tuple[str, int], list[CompileRow]] = {}
    for row in rows:
        rows_of_line.setdefault((row.dtype, row.alignment), []).append(row)
    lines = [f"| dtype | rows | {' | '.join(arches)} |", "|---|---|" + "---|" * len(arches)]
    for (dtype, alignment), line_rows in rows_of_line.items():
        # The column `rows` says whether the operands' rows are multiples of 16 bytes. These words
        # must not change, because differing_cells() finds the cells of an older document by them.
        alignment_text = f"of {WIDE_BYTES} bytes" if alignment == WIDE_BYTES else "odd"
        cells = [_cell([row for row in line_rows if row.arch == arch]) for arch in arches]
        lines.append(f"| {dtype} | {alignment_text} | {' | '.join(cells)} |")
    return lines


def differing_cells(stored_document: str, new_document: str) -> list[str]:
    """Return a line for each table cell that differs between a stored document and a new one.

    Cells that the new document lacks are not compared.
    """
    stored_cells = _cells_of(stored_document)
    lines = []
    for names, cell in _cells_of(new_document).items():
        stored_cell = stored_cells.get(names)
        if stored_cell is None:
            lines.append(f"{' '.join(names)}: new, {cell}")
        elif stored_cell != cell:
            lines.append(f"{' '.join(names)}: {cell} instead of {stored_cell}")
    return lines


def _cells_of(document: str) -> dict[tuple[str, ...], str]:
    """Return the text of each cell of a document by (family, dtype, alignment, architecture)."""
    cells: dict[tuple[str, ...], str] = {}
    family, arches = "", []
    for line in document.splitlines():
        if line.startswith("## "):
            family = line.removeprefix("## ")
        elif line.startswith("| dtype "):
            arches = [word.strip() for word in line.strip("|").split("|")[2:]]
        elif line.startswith("| "):
            words = [word.strip() for word in line.strip("|").split("|")]
            if len(words) > 2:  # a damaged line may have too few cells, or too many
                dtype, alignment, *texts = words
                for arch, text in zip(arches, texts, strict=False):
                    cells[family, dtype, alignment, arch] = text
    return cells


def _cell(rows: Sequence[CompileRow]) -> str:
    if not rows:
        return "–"
    # A row whose compilation failed has no matrix instruction.
    instruction = ", ".join(dict.fromkeys(row.mma or "failed" for row in rows))
    registers = max(row.registers for row in rows)
    spilled = max(row.spill_bytes for row in rows)
    spills = f", {spilled} B spilled" if spilled else ""
    narrowest = min(row.copy_bytes for row in rows)
    # A thread copies at most 16 bytes, so a wider copy is a whole block that TMA copies.
    copies = "TMA" if narrowest > WIDE_BYTES else f"{narrowest} B"
    shared_kib = max(row.shared_bytes for row in rows) / 1024
    longest_loop = max(rows, key=lambda row: row.instructions)
    waits = ", waits" if any(row.waits_for_all for row in rows) else ""
    launches = max(row.launches for row in rows)
    kernel_count = f", {launches} kernels" if launches > 1 else ""
    return (
        f"{instruction} {registers}{spills}<br>{copies}, {shared_kib:.0f} KiB"
        f"<br>{longest_loop.instructions}:{longest_loop.matrix}{waits}{kernel_count}"
    )


def _range(values: Sequence[float]) -> str:
    low, high = min(values, default=0.0), max(values, default=0.0)
    return f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}"
