"""``python -m bench merge FILE…``: join the rows of several files, such as the shares of one sweep."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console

from bench.measure import ceilings
from bench.rows import resume, store
from bench.rows.order import by_climb
from bench.rows.store import Row


def merged(found: Iterable[Row]) -> list[Row]:
    """The newest row of each call, in the order of the climb.

    Rows of one source and software on one model of GPU are of one run, as for ``--resume``. They are held to the best
    matrix product that any of them has measured.
    """
    newest = by_climb(store.latest(found))
    runs: dict[tuple, list[int]] = {}
    for place, row in enumerate(newest):
        runs.setdefault(tuple(getattr(row, name) for name in resume.SAME), []).append(place)
    for places in runs.values():
        for place, row in zip(places, ceilings.with_best_products(newest[i] for i in places), strict=True):
            newest[place] = row
    return newest


def main(argv: Sequence[str], console: Console) -> int:
    """Join files into another, whose rows stay where none is newer. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench merge", description=main.__doc__.partition(".")[0] + ".")
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="rows")
    parser.add_argument("--into", type=Path, metavar="FILE", required=True, help="where they go, beside what is there")
    args = parser.parse_args(argv)
    given = [row for path in args.files for row in store.read_given(path)]
    with store.writing(args.into):
        before = store.read(args.into)
        store.check_writable(args.into)
        whole = merged([*before, *given])
        store.write(args.into, whole)
    kept = {(row.key, row.when) for row in whole} - {(row.key, row.when) for row in before}
    console.print(f"{len(kept)} of {len(given)} rows are new in {args.into}, which holds {len(whole)}", soft_wrap=True)
    return 0
