"""What is shipped for those who measured and imported nothing: constants, and how sure they are."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from analysis.commands.app import ResultsOption, app
from analysis.model.generation import DTYPE
from analysis.model.shift import Shift
from analysis.recordings.imported import VALIDATION, folder_of, is_of_file
from analysis.recordings.tables import DTYPES, Table, choose_tables, find_tables, read_rows
from kernels.cli import JsonOption, note, print_json
from kernels.errors import UserError
from kernels.machine import known_machine, known_machines
from kernels.program import RESULTS, target
from sweeps.store import write_whole

if TYPE_CHECKING:
    from analysis.model.fit import Fit
    from analysis.validation.software import Collection, Move, ShippedFit


@app.command("ship")
def ship_command(
    results: ResultsOption = RESULTS,
    write: Annotated[
        Path | None, typer.Option("--write", help="Write what is shipped, kernels/shipped.json.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Fit the shipped constants to the imported tables, and judge answers on other software."""
    from analysis.validation.generation import carried_collections, judge_generation
    from analysis.validation.software import (
        advised_moves,
        judge_model,
        judge_moves,
        judge_shipped,
        other_collections,
        shipped_fit,
        sibling_shift,
        widened_by_others,
    )

    tables = find_tables()
    chosen = _imported(choose_tables(tables), results)
    collections: list[Collection] = []
    moves: list[Move] = []
    shipped: dict[str, dict[str, ShippedFit]] = {dtype: {} for dtype in DTYPES.values()}
    for slug, table in chosen.items():
        note(f"{slug} …")
        folder = folder_of(results, slug)
        shift = sibling_shift(table, chosen, tables)
        collections += other_collections(folder, table, tables, shift)
        moves += advised_moves(folder, table, tables)
        machine = known_machine(slug)
        for dtype, by_slug in shipped.items():
            if len(read_rows(table, dtype)):
                by_slug[slug] = shipped_fit(
                    machine, table, tables, dtype, shift if dtype == DTYPE else Shift()
                )
    fits = {dtype: widened_by_others(by_slug) for dtype, by_slug in shipped.items()}
    carried = carried_collections(fits[DTYPE], tables)
    if write is not None:
        write_whole(write, _shipped_text(chosen, fits, collections, carried))
    judged = {
        "model": judge_model(collections),
        "shipped": [
            {"dtype": dtype, **row}
            for dtype, by_slug in shipped.items()
            for row in judge_shipped(list(by_slug.values()))
        ],
        "generation": judge_generation(shipped[DTYPE], carried),
        "advice": judge_moves(moves),
    }
    if as_json:
        print_json(judged)
        return
    print(_errors_text("model", judged["model"]))
    print(_errors_text("shipped", judged["shipped"]))
    print(_errors_text("generation", judged["generation"]))
    for row in judged["advice"]:
        print(
            f"to {row['question']}: of {row['moves']} moves {row['faster']:.0%} are faster with "
            f"other software; promised {row['median_claimed']:.0%}, there "
            f"{row['median_gained']:.0%} in the median"
        )


def _imported(tables: Mapping[str, Table], results: Path) -> dict[str, Table]:
    """The tables of all machines; each must have been imported."""
    known = {slug: table for slug, table in sorted(tables.items()) if slug in known_machines()}
    for slug in known:
        folder = folder_of(results, slug)
        if not (folder / VALIDATION).exists() or is_of_file(folder):
            raise UserError(
                f"{slug}'s table is not imported in {results}; run {target('import', 'import')} "
                "first."
            )
    return known


def _shipped_text(
    chosen: Mapping[str, Table], fits: Mapping[str, Mapping[str, Fit]],
    collections: Sequence[Collection], carried: Sequence[Collection],
) -> str:  # fmt: skip
    """kernels/shipped.json; :func:`kernels.constants.shipped_fits` says what is in it."""
    from analysis.validation.software import group_in, software_range

    document = {
        "source": next(iter(chosen.values())).package,
        "software": software_range(collections).to_json(),
        "generation": software_range(carried).to_json(),
        "machines": {
            slug: {
                "source": chosen[slug].source,
                # A machine that nobody measured with other software is expected to be like all.
                "software": software_range(
                    [c for c in collections if c.slug == slug] or collections
                ).to_json(),
                "groups": {
                    group_in(dtype): by_slug[slug].to_json()
                    for dtype, by_slug in fits.items()
                    if slug in by_slug
                },
            }
            for slug in chosen
        },
    }
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def _errors_text(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [f"{title:54} median    mean     p95  in the 90 % interval, its width"]
    for row in rows:
        errors = "".join(f"{row[column]:8.1%}" for column in ("median", "mean", "p95"))
        lines.append(
            f"{row['machine']:26} {row['source']:26} {errors}{row['coverage_90']:8.1%}"
            f"{row['median_width']:9.1%}"
        )
    return "\n".join(lines)
