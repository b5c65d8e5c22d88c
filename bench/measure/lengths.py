"""Attention of one number of tokens, cut into sequences of several lengths."""

from __future__ import annotations

from collections.abc import Sequence

from bench.rows.store import Row
from bench.show.headline import headline

OP = "attention"
#: The name of the picture of its memory.
PICTURE = f"memory-{OP}"


def family(rows: Sequence[Row]) -> list[Row]:
    """Forward rows like those of the headline shape in all but the length; none if they are of one length."""
    mine = [r for r in rows if r.op == OP and r.pass_ == "forward" and r.us and r.peak_mib and setting(r)]
    standing = headline(OP, mine)
    if standing is None:
        return []
    like = next(r for r in mine if (r.shape, r.dtype) == standing)
    found = [r for r in mine if (r.dtype, r.options, setting(r)) == (like.dtype, like.options, setting(like))]
    return found if len({length(r) for r in found}) > 1 else []


def setting(row: Row) -> tuple[int, ...]:
    """Tokens, heads of queries and of keys, head dimension; nothing where keys are not as many as queries."""
    query, key, *_ = [*row.shapes, None, None]
    if query is None or key is None or min(len(query), len(key)) < 3 or query[-2] != key[-2]:
        return ()
    return query[0] * query[-2], query[-3], key[-3], query[-1]


def length(row: Row) -> int:
    return row.shapes[0][-2]
