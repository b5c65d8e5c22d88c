"""What surrounds every launch in Triton's interpreter. Compiled kernels never come by here."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


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


def surround_launches() -> None:
    """Interpret one launch at a time, each in a session of its own. Another thread waits.

    The interpreter keeps what it replaces in the language, and the number of the program that it runs, in globals.
    """
    from triton.runtime.interpreter import GridExecutor

    launch, lock = GridExecutor.__call__, threading.RLock()

    @functools.wraps(launch)
    def in_session(self: Any, *args: Any, **kwargs: Any) -> Any:
        with lock, interpreter_session():
            return launch(self, *args, **kwargs)

    GridExecutor.__call__ = in_session
