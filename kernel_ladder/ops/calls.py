"""How every public function calls the table: arguments as plain numbers, autocast, DTensors."""

from __future__ import annotations

import numbers
import operator
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from kernel_ladder import autocast, autograd, operators, selection, table
from kernel_ladder.errors import UnsupportedError, raise_for_memory
from kernel_ladder.spec import DTYPES, Inputs, dtype_name, dtype_names, each
from kernel_ladder.tracing import PLAIN
from kernel_ladder.transforms import transforms_active


def call(op: str, backend: str | None, inputs: Inputs, options: dict[str, Any]) -> Any:
    compiling = is_compiling()  # read once: it costs as much as is_neg(), which torch.compile cannot trace
    if compiling:
        if not transforms_active() and forward_ad._current_level < 0 and not any(map(is_sharded, inputs)):
            return operators.call(op, backend, inputs, options)
        if autocast.applies_to(inputs):
            return autocast.call(lambda given: call(op, backend, given, options), op, inputs)
        restated = table.spec(op).check(*inputs, **options)
    else:
        if autocast.is_on():
            return autocast.call(lambda given: call(op, backend, given, options), op, inputs)
        restated = (table.specs.get(op) or table.spec(op)).check(*inputs, **options)
    if restated is not None:
        return restated.output(call(op, backend, restated.inputs, options))
    negated = False
    for x in inputs:
        if x is not None:
            if type(x) not in PLAIN:
                if is_sharded(x):
                    return _call_sharded(op, backend, inputs, options)
                if is_traceable_wrapper_subclass(x):
                    backend = _of_operators(op, backend, x)
            negated = negated or (not compiling and x.is_neg())
    if negated:  # kernels read memory, where a lazy sign is not applied
        inputs = each(torch.resolve_neg, inputs)
    variant = selection.choose(op, backend, inputs, options, compiling)
    try:
        return autograd.run(variant, inputs, options)
    except RuntimeError as error:
        raise_for_memory(error)
        raise


def is_sharded(x: Any) -> bool:
    """Whether `x` is a DTensor. Its module takes seconds to import, which a program that has one has done."""
    return type(x).__name__ == "DTensor"


def _of_operators(op: str, backend: str | None, x: Any) -> str:
    """The backend of a call on a tensor that holds others: PyTorch's operators alone know how to take it apart.

    Raises:
        UnsupportedError: the call asks for a level whose kernels read memory.
    """
    name = table.asked_for(op, backend)
    if name == "auto":
        return "torch"
    if name.partition(".")[0] in ("triton", "cuda", "xla"):
        raise UnsupportedError(
            f"{op}: {name} takes tensors that are memory of their own, got a {type(x).__name__}, which holds others; "
            "backend='torch' takes it where PyTorch does"
        )
    return name


def _call_sharded(op: str, backend: str | None, inputs: Inputs, options: dict[str, Any]) -> Any:
    """A call on DTensors whose arguments are checked."""
    from kernel_ladder.distributed import dtensor

    name = table.asked_for(op, backend)

    def run(local: Inputs) -> Any:
        return call(op, backend, local, options)

    def anew(other: str, inputs: Inputs, options: dict[str, Any]) -> Any:
        return call(other, name if other == op else name.partition(".")[0], inputs, options)

    return dtensor.call(op, inputs, options, run, anew)


# Options are cache keys and kernel constants, so numbers of other libraries are converted to Python's. Other values
# and bools stay unchanged for the check to judge. Most calls pass Python's numbers and skip these functions.


def as_number(x: Any) -> Any:
    if isinstance(x, bool) or not isinstance(x, numbers.Real):
        return x
    try:
        return float(x)
    except OverflowError:  # an integer
        return x


def as_int(n: Any) -> Any:
    if type(n) is int or isinstance(n, bool) or not isinstance(n, numbers.Integral):
        return n
    return operator.index(n)


def as_ints(given: Any) -> Any:
    """One integer, or the integers of a list or tuple as a tuple."""
    if not isinstance(given, (tuple, list)):
        return as_int(given)
    for n in given:
        if type(n) is not int:
            return tuple(as_int(n) for n in given)
    return tuple(given)


# Arguments of PyTorch's functions that are accepted by name and refused, or resolved before a rung sees the call.


def no_out(op: str, out: Any) -> None:
    raise ValueError(
        f"{op}: argument `out` must be None, got {type(out).__name__}: the result is a tensor of its own; "
        "copy it with `out.copy_(...)`"
    )


def to_dtype(op: str, input: Any, dtype: Any) -> Any:
    """The input converted to `dtype`, as PyTorch does before it computes."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{op}: argument `dtype` must be a torch.dtype or None, got {type(dtype).__name__}")
    if dtype not in DTYPES:
        raise TypeError(f"{op}: argument `dtype` is {dtype_name(dtype)}; accepted are {dtype_names(DTYPES)} and None")
    return input.to(dtype) if isinstance(input, torch.Tensor) else input
