"""What a change of the Triton kernels does to their inner loops, in machine code.

python -m tests.studies.inner_loops BEFORE AFTER [--write FILE]

BEFORE and AFTER are what `python -m kernels compile --json` printed in a checkout before the change
and in one after it. The file has a line for every kernel that both compiled. Nothing is timed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from kernels.common.program import ROOT

KEY = ["kernel", "operation", "dtype", "layout", "alignment", "arch"]
FACTS = ["instructions", "matrix", "waits_for_all", "registers", "spill_bytes", "shared_bytes",
         "launches", "config"]  # fmt: skip


def main(
    before: Annotated[Path, typer.Argument(help="JSON of the checkout before the change.")],
    after: Annotated[Path, typer.Argument(help="JSON of the one after it.")],
    write: Annotated[Path, typer.Option(help="Where the table goes.")] = (
        ROOT / "results" / "accuracy" / "inner-loops.csv"
    ),
) -> None:
    """Join both, and print the median instructions per matrix instruction by family and GPU."""
    one, other = (
        pd.DataFrame(json.loads(path.read_text(encoding="utf-8")))[[*KEY, *FACTS]]
        for path in (before, after)
    )
    both = one.merge(other, on=KEY, suffixes=("_before", "_after"))
    both.to_csv(write, index=False)
    aligned = both[both["alignment"] == 16]
    for when in ("before", "after"):
        per = aligned[f"instructions_{when}"] / aligned[f"matrix_{when}"]
        aligned = aligned.assign(**{when: per})
    print(aligned.groupby(["kernel", "arch", "dtype"])[["before", "after"]].median().round(1))
    waiting = both[["waits_for_all_before", "waits_for_all_after"]].sum().tolist()
    print(f"{len(both)} kernels; {waiting[0]} wait for every wgmma before, {waiting[1]} after.")


if __name__ == "__main__":
    typer.run(main)
