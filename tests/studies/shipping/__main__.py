"""Fit the shipped constants to the imported tables of all machines, and judge them.

python -m tests.studies.shipping --narrow FILE --write kernels/timemodel/shipped.json
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from analysis.imports.tables import DTYPES, PublicTable, choose_tables, find_tables, read_rows
from analysis.model.prior import DTYPE
from analysis.model.shift import Shift
from analysis.recordings.imported import VALIDATION, folder_of, is_of_file
from kernels.cli import note, print_json
from kernels.common.errors import UserError
from kernels.common.program import RESULTS, target
from kernels.machine import known_machine, known_machines
from sweeps.store import write_whole

if TYPE_CHECKING:
    from analysis.model.fit import Fit
    from analysis.validation.software import CollectionErrors
    from tests.studies.shipping.learning import Move, ShippedFit


def main(
    results: Annotated[Path, typer.Option(help="Folder of the imported tables.")] = RESULTS,
    write: Annotated[
        Path | None,
        typer.Option("--write", help="File to write, such as kernels/timemodel/shipped.json."),
    ] = None,
    narrow: Annotated[
        Path | None,
        typer.Option(
            "--narrow",
            help="CSV of bf16 times at small N, which the package's tables lack, with the columns "
            "machine, m, n, k and time_us. The intervals of such shapes are learned from it.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Fit the shipped constants to the imported tables, and judge answers on other frameworks."""
    from analysis.validation.software import errors_on_other_tables
    from tests.studies.shipping.generation import (
        averaged_collections,
        carried_collections,
        judge_generation,
    )
    from tests.studies.shipping.learning import (
        advised_moves,
        judge_model,
        judge_moves,
        judge_shipped,
        narrow_collections,
        shipped_fit,
        sibling_shift,
        widened_by_others,
    )

    tables = find_tables()
    chosen = _imported(choose_tables(tables), results)
    collections: list[CollectionErrors] = []
    moves: list[Move] = []
    shipped: dict[str, dict[str, ShippedFit]] = {dtype: {} for dtype in DTYPES.values()}
    for slug, table in chosen.items():
        note(f"{slug} …")
        folder = folder_of(results, slug)
        shift = sibling_shift(table, chosen, tables)
        collections += errors_on_other_tables(folder, table, tables, shift)
        moves += advised_moves(folder, table, tables)
        machine = known_machine(slug)
        for dtype, by_slug in shipped.items():
            if len(read_rows(table, dtype)):
                by_slug[slug] = shipped_fit(
                    machine, table, tables, dtype, shift if dtype == DTYPE else Shift()
                )
    fits = {dtype: widened_by_others(by_slug) for dtype, by_slug in shipped.items()}
    carried = carried_collections(fits[DTYPE], tables)
    averaged = averaged_collections(fits[DTYPE], tables)
    small = narrow_collections(narrow, results, fits[DTYPE]) if narrow else ([], [])
    if write is not None:
        learned = _Learned(collections, shipped[DTYPE], carried, averaged, *small)
        write_whole(write, _shipped_text(chosen, fits, learned))
    judged = {
        "model": judge_model(collections, small[0]),
        "shipped": [
            {"dtype": dtype, **row}
            for dtype, by_slug in shipped.items()
            for row in judge_shipped(list(by_slug.values()), small[1] if dtype == DTYPE else ())
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


def _imported(tables: Mapping[str, PublicTable], results: Path) -> dict[str, PublicTable]:
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


class _Learned(NamedTuple):
    """Errors of predictions of collections that they had not seen, by the prior that predicted."""

    public: Sequence[CollectionErrors]
    shipped: Mapping[str, ShippedFit]
    carried: Sequence[CollectionErrors]
    averaged: Sequence[CollectionErrors]
    narrow_public: Sequence[CollectionErrors]
    narrow_shipped: Sequence[CollectionErrors]


def _shipped_text(
    chosen: Mapping[str, PublicTable], fits: Mapping[str, Mapping[str, Fit]], learned: _Learned
) -> str:
    """The document of shipped.json: see :func:`kernels.timemodel.constants.shipped_fits`."""
    from tests.studies.shipping.generation import averaged_pairs, carried_pairs
    from tests.studies.shipping.learning import (
        constants_spread,
        framework_floor,
        group_in,
        learned_factors,
        learned_spread,
        software_range,
    )

    here = {
        slug: software_range([c for c in learned.public if c.slug == slug] or learned.public)
        for slug in chosen
    }
    everywhere = software_range(learned.public)
    ranges = {slug: everywhere.joined(software) for slug, software in here.items()}
    of_shipped = [c for one in learned.shipped.values() for c in one.collections[1:]]
    ends = {slug: one.range for slug, one in fits[DTYPE].items()}
    document = {
        "source": next(iter(chosen.values())).package,
        "software": everywhere.to_json(),
        "generation": software_range(learned.carried).to_json(),
        "generations": software_range(learned.averaged).to_json(),
        "spreads": {
            "public": learned_spread(learned.public, len(chosen)),
            "shipped": learned_spread(of_shipped, len(chosen)),
            "sibling": {
                **learned_spread(learned.carried, len({c.slug for c in learned.carried})),
                "constants": constants_spread(carried_pairs(fits[DTYPE])),
            },
            "generation": {
                **learned_spread(learned.averaged, len({c.generation for c in learned.averaged})),
                "constants": constants_spread(averaged_pairs(fits[DTYPE])),
            },
        },
        "groups": {
            "public": learned_factors([*learned.public, *learned.narrow_public], ranges),
            "shipped": learned_factors([*of_shipped, *learned.narrow_shipped], ends),
        },
        "floor": framework_floor(find_tables()),
        "machines": {
            slug: {
                "source": chosen[slug].source,
                "software": here[slug].to_json(),
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
    lines = [f"{title:54} median    mean     p95  in the 90% interval, its width"]
    for row in rows:
        errors = "".join(f"{row[column]:8.1%}" for column in ("median", "mean", "p95"))
        lines.append(
            f"{row['machine']:26} {row['source']:26} {errors}{row['coverage_90']:8.1%}"
            f"{row['median_width']:9.1%}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    typer.run(main)
