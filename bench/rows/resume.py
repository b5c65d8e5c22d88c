"""Go on from an interrupted sweep: a row stands if the same source made it with the same software on the same GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from bench import peers
from bench.rows.store import CEILING, Row, latest

#: What must be the same for a row to stand.
SAME = ("gpu", "driver", "cuda", "torch", "triton", "commit", "dirty")

#: What a row measures, on one machine.
Key = tuple[str, str, str, str, str]


def key(row: Row) -> Key:
    """Operation, backend, pass, dtype and shape."""
    return row.op, row.backend, row.pass_, row.dtype, row.shape


def standing(rows: Iterable[Row], facts: Mapping[str, Any]) -> dict[Key, Row]:
    """The rows that need not be measured again, timed or with the reason why not.

    A peer's row is of one version of its library, or of none where that was absent.
    """
    same = (row for row in latest(rows) if all(getattr(row, name) == facts[name] for name in SAME))
    return {key(row): row for row in same if row.level != peers.LEVEL or row.peer_version == peers.version(row.backend)}


def report(rows: Mapping[Key, Row], facts: Mapping[str, Any], file: object) -> str:
    """What is skipped, and how far the source of those rows is known."""
    ceilings = sum(row.op == CEILING for row in rows.values())
    lines = [f"--resume: {len(rows) - ceilings} rows and {ceilings} ceilings in {file} stand and are skipped"]
    same = "GPU, driver, CUDA, PyTorch and Triton"
    if facts["commit"] is None:
        lines.append(f"the commit is unknown here: rows of an unknown commit with the same {same} count as finished")
    elif facts["dirty"] is None:
        lines.append("whether files differ from the commit is unknown here: rows that do not know it either count")
    elif facts["dirty"]:
        lines.append(
            "files differ from the commit: rows of this commit count as finished if files differed then too, and "
            "nobody knows whether it was in the same way; without --resume everything is measured again"
        )
    return "; ".join(lines)
