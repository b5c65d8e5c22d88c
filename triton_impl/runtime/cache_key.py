"""Keys of kernels on disk that are the same whatever else a process has run.

Triton finds what it compiled before, and autotuner.py what it chose, by a kernel's key. It is a hash of its source, of
the keys of what it calls, and of the constants that all of these use. In Triton 3.6 (mended in 3.9) the constants of a
called function are known only once its own key has been asked for (``DependenciesFinder._update_hash`` reads them
before it asks). So a kernel's key depends on which kernels ran before it, and the next process compiles and times it
again.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import triton

from triton_impl import interpreted

_settled: set[int] = set()


def stabilize(kernel: Any) -> None:
    """Ask for the keys of all that a kernel calls, and then for its own."""
    if interpreted() or not isinstance(kernel, triton.JITFunction) or id(kernel) in _settled:
        return
    _settled.add(id(kernel))
    for called in _named(kernel.fn):
        stabilize(called)
    kernel.cache_key  # noqa: B018


def _named(function: Any) -> Iterator[Any]:
    """What the names in a function's body stand for, its own modules' functions among them."""
    used = inspect.getclosurevars(function)
    for value in (*used.globals.values(), *used.nonlocals.values()):
        if not isinstance(value, ModuleType):
            yield value
        elif not value.__name__.startswith("triton."):  # Triton's own are not part of a key
            yield from (getattr(value, name, None) for name in function.__code__.co_names)
