"""Mistakes in a command line, and what to answer to a name that nothing bears."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


class UsageError(Exception):
    """A mistake in the command line. Its message says what was given and what is accepted."""


def nearest(given: str, names: Sequence[str]) -> str:
    """``did you mean 'this' or 'that'?``, or nothing where no name is near."""
    near = difflib.get_close_matches(given, names, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(map(repr, near))}? " if near else ""


def known(kind: str, given: str, names: Sequence[str]) -> str:
    """`given`, if it is one of `names`; else an error with the nearest and all of them."""
    if given in names:
        return given
    raise UsageError(f"unknown {kind} {given!r}; {nearest(given, names)}Known are {', '.join(names)}")
