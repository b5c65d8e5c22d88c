"""What several commands take, and what to answer to a mistake in it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

import torch

from kernel_ladder.spec import PASSES

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
DTYPE_SHORT = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "half": "float16", "float": "float32"}


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


def split(option: str, values: Sequence[str] | None, accepted: Iterable[str]) -> list[str]:
    """The names of a repeatable option that takes several, separated by commas; none where it is not given.

    Raises:
        UsageError: it is given without a name. Whether the names are known is for :func:`known` to say.
    """
    for value in values or ():
        if not value.replace(",", "").strip():
            raise UsageError(f"{option}: no name in {value!r}; known are {', '.join(accepted)}")
    return [part for value in values or () for part in value.split(",") if part]


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a name or of its usual short form."""
    return DTYPES[known("dtype", DTYPE_SHORT.get(name, name), list(DTYPES))]


def passes_of(name: str) -> tuple[str, ...]:
    """The passes that ``forward``, ``backward`` or ``both`` stands for."""
    return PASSES if name == "both" else (known("pass", name, (*PASSES, "both")),)
