"""A sweep's file once it is done: no superseded rows, in the order of the climb, held to the best ceiling."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.measure import ceilings
from bench.rows import store
from bench.rows.order import by_climb
from bench.rows.store import Row


def tidy(output: Path, run: Sequence[Row]) -> list[Row]:
    """Rewrite a file without superseded rows, in the order of the climb; returns the rows of this run as written.

    They are held to the best matrix product that the whole run has measured: see ceilings.with_best_products. This
    run's rows supersede others, whatever the clock said when those were made.
    """
    mine = {(row.key, row.when) for row in run}
    whole = store.read(output)
    own = {row.key: row for row in whole if (row.key, row.when) in mine}
    found = by_climb(own.get(row.key, row) for row in store.latest(whole))
    finished = iter(ceilings.with_best_products(row for row in found if row.key in own))
    written = [next(finished) if row.key in own else row for row in found]
    store.write(output, written)
    return [row for row in written if row.key in own]
