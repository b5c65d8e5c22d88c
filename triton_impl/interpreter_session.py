"""What surrounds every launch in Triton's interpreter; compiled kernels never come by here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def interpreter_session() -> Iterator[None]:
    """Surround interpreted launches.

    The interpreter computes a whole block in NumPy, masked-out lanes too, whose values are arbitrary: NumPy's warnings
    about overflow, division by zero and invalid values say nothing of a result. NumPy raises no others here, and what
    it does about them elsewhere stays.
    """
    import numpy

    with numpy.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore"):
        yield


def in_session(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which launches kernels, inside a session."""

    @functools.wraps(function)
    def in_a_session(*arguments: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*arguments, **options)
        with interpreter_session():
            return function(*arguments, **options)

    return in_a_session
