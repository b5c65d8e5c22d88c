"""The facts of a GPU on which the choice of a kernel depends. Every level gets them from this module.

A test can replace them by those of another GPU (:func:`pretend`), even without a GPU. The levels then see the pretended
GPU; kernels still run on the real one.
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
    """The properties that decide which kernels a GPU runs. Memory in bytes."""

    name: str
    capability: tuple[int, int]  # compute capability, (9, 0) for an H100
    shared_per_block: int  # maximum (opt-in) shared memory of one block
    multiprocessors: int
    memory: int


def _gpu(name: str, capability: tuple[int, int], shared_kib: int, multiprocessors: int, memory_gib: int) -> Gpu:
    return Gpu(name, capability, shared_kib * 2**10, multiprocessors, memory_gib * 2**30)


#: GPUs that tests pretend, one per kind. CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
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
_caches: list[Any] = []  # functions wrapped by functools.cache


def cached(function: Callable[..., Any]) -> Callable[..., Any]:
    """Cache a function of a device's index (and other arguments) until another GPU is pretended."""
    known = functools.cache(function)
    _caches.append(known)
    return known


def forget() -> None:
    """Clear every cache of :func:`cached`."""
    for known in _caches:
        known.cache_clear()


def visible() -> bool:
    """Whether a CUDA GPU is present or pretended."""
    return _pretended is not None or torch.cuda.is_available()


def count() -> int:
    """The number of visible GPUs."""
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
    """The GPU of an index, which ``tensor.get_device()`` returns."""
    return _pretended or _real(index)


def multiprocessors(x: torch.Tensor) -> int:
    """Those of a tensor's GPU; an H100's where there is no GPU to ask."""
    return of(x.get_device()).multiprocessors if x.is_cuda and visible() else KNOWN["H100"].multiprocessors


def current() -> Gpu:
    """The GPU that PyTorch launches on."""
    return _pretended or _real(torch.cuda.current_device())


def pretended() -> bool:
    """Whether a GPU is pretended."""
    return _pretended is not None


@contextmanager
def pretend(gpu: Gpu | str) -> Iterator[Gpu]:
    """Answer as if every GPU were `gpu`, or the one of :data:`KNOWN` by that name. For tests; affects all threads."""
    global _pretended
    # The table's caches depend on what the levels saw.
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


def capturing() -> bool:
    """Whether the current stream is being captured by a CUDA graph.

    PyTorch raises an error if asked where it is built for the CPU, or for CUDA on a machine without a driver.
    """
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
