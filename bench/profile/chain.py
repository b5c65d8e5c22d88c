"""The chain of operators that a call runs, with the bytes of the tensors that each takes and gives."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: A step's range in a profile has this name and a number.
STEP = "kernel_ladder step"

#: In-place operators that do not read what they write.
OVERWRITES = ("copy_", "fill_", "zero_", "normal_", "uniform_")
#: Operators that allocate memory and do not touch it.
ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


@dataclass
class Step:
    """One operator: bytes of each tensor that it reads, and of each that it writes."""

    name: str
    read: list[int]
    written: list[int]
    number: int  # of its range in a profile
    us: float | None = None
    kernels: list[str] = field(default_factory=list)  # the names of those that it launched, in order

    @property
    def bytes(self) -> int:
        return sum(self.read) + sum(self.written)


def tensor_bytes(x: torch.Tensor) -> int:
    """Bytes of memory behind a tensor: an expanded dimension repeats what is there once."""
    sizes = (size for size, stride in zip(x.shape, x.stride(), strict=True) if stride != 0 or size == 0)
    return math.prod(sizes) * x.element_size()


class Chain(TorchDispatchMode):
    """Records the operators below autograd while it is active, a backward's too. Views move nothing and are left out.

    An operator that PyTorch makes up of others (``aten::_euclidean_dist``) is recorded as those others. What a kernel
    reads twice, or keeps in memory for itself, is not seen here: hardware counters alone tell.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self._ranges = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.is_view or func.overloadpacket.__name__ in ALLOCATIONS:
            return func(*args, **kwargs)
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        composite = _composite_key(func, "CUDA" if any(x.is_cuda for x in given) else "CPU")
        done, number = len(self.steps), self._ranges
        self._ranges += 1
        with record_function(f"{STEP} {number}"):
            if composite is None:
                result = func(*_numbers_as_tensors(func, args), **kwargs)
            else:
                with self:
                    result = func._op_dk(composite, *args, **kwargs)
        if len(self.steps) == done:  # else it consists of other operators, which are recorded
            read, written = _operands(func, args, kwargs, given, result)
            if read or written:
                self.steps.append(Step(str(func), read, written, number))
        return result


@functools.cache
def _composite_key(func: Any, device_key: str) -> torch._C.DispatchKey | None:
    """The dispatch key of an operator's decomposition into others; None where the device has a kernel for it."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    if not has(func.name(), device_key):
        for key in ("CompositeExplicitAutograd", "CompositeImplicitAutograd"):
            if has(func.name(), key):
                return getattr(torch._C.DispatchKey, key)
    return None


def _numbers_as_tensors(func: Any, args: tuple) -> tuple:
    """Arguments with numbers in the place of tensors made tensors: some operators take no Python number there.

    ``aten::bitwise_and.Scalar`` is made up of ``aten::bitwise_and.Tensor``, and hands the number on.
    """
    return tuple(
        torch.tensor(x) if isinstance(x, bool | int | float) and isinstance(a.type, torch.TensorType) else x
        for a, x in zip(func._schema.arguments, args, strict=False)
    )


def _operands(
    func: Any, args: tuple, kwargs: dict, given: list[torch.Tensor], result: Any
) -> tuple[list[int], list[int]]:
    """Bytes of each tensor read and of each written; a tensor given twice is read once."""
    read: dict[tuple, int] = {}
    written: dict[tuple, int] = {}
    for argument, value in _bound(func, args, kwargs):
        for x in tree_leaves(value):
            if not isinstance(x, torch.Tensor):
                continue
            changed = argument.alias_info is not None and argument.alias_info.is_write
            if changed:
                written[_place(x)] = tensor_bytes(x)
            if not changed or not (argument.kwarg_only or func.overloadpacket.__name__ in OVERWRITES):
                read[_place(x)] = tensor_bytes(x)
    storages = {x.untyped_storage().data_ptr() for x in given}
    outputs = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
    new = [x for x in outputs if x.untyped_storage().data_ptr() not in storages]
    if not new and not written and outputs:
        return [], []  # a view by another name, as aten::_unsafe_view
    written.update({_place(x): tensor_bytes(x) for x in new})
    return list(read.values()), list(written.values())


def _bound(func: Any, args: tuple, kwargs: dict) -> Iterator[tuple[Any, Any]]:
    for i, argument in enumerate(func._schema.arguments):
        if i < len(args):
            yield argument, args[i]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def _place(x: torch.Tensor) -> tuple:
    return x.data_ptr(), tuple(x.shape), x.stride(), x.dtype


def record(call: Callable[[], Any]) -> list[Step]:
    """The steps of one call."""
    with Chain() as chain:
        call()
    return chain.steps
