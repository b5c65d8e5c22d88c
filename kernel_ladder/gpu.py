"""What this package asks of a GPU before it chooses a kernel: one place that every level asks.

A test can make it answer for another GPU (:func:`pretend`), here or where there is none. What is pretended is what the
levels are told. Kernels run on the GPU that is there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Gpu:
    """What decides which kernels a GPU runs. Memory in bytes."""

    name: str
    capability: tuple[int, int]  # compute capability, (9, 0) for an H100
    shared_per_block: int  # shared memory that one block may ask for
    multiprocessors: int
    memory: int


def _gpu(name: str, capability: tuple[int, int], shared_kib: int, multiprocessors: int, memory_gib: int) -> Gpu:
    return Gpu(name, capability, shared_kib * 2**10, multiprocessors, memory_gib * 2**30)


#: GPUs to pretend, one of each kind. CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
KNOWN: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        _gpu("T4", (7, 5), 64, 40, 16),
        _gpu("A100", (8, 0), 163, 108, 80),
        _gpu("A10", (8, 6), 99, 72, 24),
        _gpu("L4", (8, 9), 99, 58, 24),
        _gpu("H100", (9, 0), 227, 132, 80),
        _gpu("B200", (10, 0), 227, 148, 180),
        _gpu("RTX 5090", (12, 0), 99, 170, 32),
    )
}

_pretended: Gpu | None = None
_caches: list[Any] = []  # of functools.cache


def cached(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep what a function of a device's index (and more) returns, until another GPU is pretended."""
    known = functools.cache(function)
    _caches.append(known)
    return known


def forget() -> None:
    """Ask anew whatever :func:`cached` has kept."""
    for known in _caches:
        known.cache_clear()


def visible() -> bool:
    """Whether there is a CUDA GPU, or one is pretended."""
    return _pretended is not None or torch.cuda.is_available()


def count() -> int:
    """How many GPUs are visible."""
    return 1 if _pretended is not None else torch.cuda.device_count() if torch.cuda.is_available() else 0


@cached
def _real(index: int) -> Gpu:
    found: Any = torch.cuda.get_device_properties(index)
    return Gpu(
        name=found.name,
        capability=(found.major, found.minor),
        shared_per_block=found.shared_memory_per_block_optin,
        multiprocessors=found.multi_processor_count,
        memory=found.total_memory,
    )


def of(index: int) -> Gpu:
    """The GPU of an index, as ``tensor.get_device()`` tells it."""
    return _pretended or _real(index)


def current() -> Gpu:
    """The GPU that PyTorch launches on."""
    return _pretended or _real(torch.cuda.current_device())


def pretended() -> bool:
    """Whether what is told of GPUs is pretended."""
    return _pretended is not None


@contextmanager
def pretend(gpu: Gpu | str) -> Iterator[Gpu]:
    """Answer as if every GPU were this one, or one of :data:`KNOWN` by its name. For tests; of all threads."""
    global _pretended
    # What the table keeps follows from what the levels were told.
    from kernel_ladder import table

    before, _pretended = _pretended, KNOWN[gpu] if isinstance(gpu, str) else gpu
    forget()
    table.forget()
    try:
        yield _pretended
    finally:
        _pretended = before
        forget()
        table.forget()
