"""What host code must know of a call: whether a compiler traces it, and whether autograd will differentiate it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.compiler import is_compiling

#: The classes of tensors that are their own memory; others wrap them, or have no data.
PLAIN = (torch.Tensor, torch.nn.Parameter)


class _State(threading.local):
    shapes_only = False
    formula = False


_state = _State()


def shapes_only() -> bool:
    """Whether a rung's host code should only allocate its results, and return before any cache key or launch."""
    return _state.shapes_only


def wants_gradient(*inputs: torch.Tensor | None) -> bool:
    """Whether autograd will differentiate a call with these inputs."""
    if torch.is_grad_enabled():
        for x in inputs:  # every call runs this, and a generator takes longer
            if x is not None and x.requires_grad:
                return True
    return False


def concrete(size: int | torch.SymInt) -> int:
    """A size; where torch.compile has a symbol for it, the example's, without a guard on it."""
    if type(size) is int:
        return size
    hint = size.node.hint  # type: ignore[union-attr]
    return 1 if hint is None else int(hint)


def product_of(sizes: Iterable[int | torch.SymInt]) -> int:
    """The product of sizes, each as :func:`concrete`. A loop: torch.compile traces no ``map`` in ``math.prod``."""
    product = 1
    for size in sizes:
        product *= concrete(size)
    return product


def dense_at_a_glance(x: torch.Tensor) -> bool:
    """Whether a tensor with data is contiguous. Of a traced one it is not asked: the answer would be a guard.

    A view of a cache becomes contiguous when the cache is full, and would be compiled for once more.
    """
    return not is_compiling() and type(x) in PLAIN and x.is_contiguous()


def in_graph() -> bool:
    """Whether a formula's tensor operations become part of a graph that the caller compiles."""
    return _state.formula or is_compiling()


@contextmanager
def inferring_shapes() -> Iterator[None]:
    """Within this context, rungs' host code runs for the shapes of its results only."""
    before, _state.shapes_only = _state.shapes_only, True
    try:
        yield
    finally:
        _state.shapes_only = before


@contextmanager
def building_graph() -> Iterator[None]:
    """Within this context, formulas run for their tensor operations, which a graph records."""
    before, _state.formula = _state.formula, True
    try:
        yield
    finally:
        _state.formula = before


def address(x: torch.Tensor) -> int:
    """A tensor's start address, in bytes. Without data, its offset in its storage, assumed aligned to 16 bytes."""
    if type(x) in PLAIN:
        try:
            return x.data_ptr()
        except RuntimeError:  # a functional wrapper
            pass
    offset = x.storage_offset()
    return offset * x.element_size() if isinstance(offset, int) else 0
