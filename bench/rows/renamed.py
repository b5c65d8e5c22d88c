"""Rungs that have another name now: older rows are read under it, and files keep what they say."""

from __future__ import annotations

#: (operation, backend in the file) -> the day from which that name means another rung, and the rung's name now.
RENAMED: dict[tuple[str, str], tuple[str, str]] = {
    ("matmul", "compile.default"): ("2026-11-26", "compile.formula"),
    ("attention", "compile.default"): ("2026-11-26", "compile.formula"),
}


def current(op: str, backend: str, when: str) -> str:
    """The present name of the rung that a row was measured of; `when` is the row's time in ISO 8601."""
    renamed = RENAMED.get((op, backend))
    return renamed[1] if renamed is not None and when < renamed[0] else backend
