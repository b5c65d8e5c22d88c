"""Checks of the arguments of modules and caches: a message names the argument, what was given and what is accepted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kernel_ladder.ops.calls import as_int
from kernel_ladder.spec import DTYPES, dtype_name, dtype_names


def only(module: str, name: str, given: object, accepted: object, why: str) -> None:
    """Raise unless an argument has the one value that a module takes."""
    if given != accepted:
        raise ValueError(f"{module}: argument `{name}` must be {accepted!r}, got {given!r}: {why}")


def as_size(caller: str, name: str, given: Any, least: int = 1, optional: bool = False) -> Any:
    """A size as Python's int.

    Raises:
        TypeError: it is no int, nor None where it is `optional`. ValueError: it is below `least`.
    """
    if given is None and optional:
        return None
    size = as_int(given)
    if isinstance(size, bool) or not isinstance(size, (int, torch.SymInt)):
        or_none = " or None" if optional else ""
        raise TypeError(f"{caller}: argument `{name}` must be an int{or_none}, got {type(given).__name__}")
    if size < least:
        raise ValueError(f"{caller}: argument `{name}` must be {least} or more, got {size}")
    return size


def check_dtype(caller: str, dtype: Any) -> None:
    """Raise unless `dtype` is None, or one that an operation takes."""
    if dtype is None or dtype in DTYPES:
        return
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{caller}: argument `dtype` must be a torch.dtype or None, got {type(dtype).__name__}")
    accepted = dtype_names(DTYPES)
    raise TypeError(f"{caller}: argument `dtype` is {dtype_name(dtype)}; accepted are {accepted} and None")


def check_shape(caller: str, name: str, x: Any, dims: Mapping[str, int | None], more: str = "") -> None:
    """Raise unless a tensor has dimensions of these sizes, by their letters; None is any size.

    `more` is what a message adds to the shape. It is a constant: torch.compile would take a formatted size for one.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{caller}: argument `{name}` must be a torch.Tensor, got {type(x).__name__}")
    if x.dim() == len(dims):
        for size, given in zip(dims.values(), x.shape, strict=True):
            if size is not None and size != given:
                break
        else:
            return
    sizes = [letter if size is None else str(size) for letter, size in dims.items()]
    letters, accepted = (f"({', '.join(parts)}{',' * (len(parts) == 1)})" for parts in (list(dims), sizes))
    raise ValueError(f"{caller}: argument `{name}` must have shape {letters} = {accepted}{more}, got {tuple(x.shape)}")


def check_mask(caller: str, name: str, mask: Any) -> None:
    """Raise TypeError unless a mask is boolean, or of a floating-point dtype to be added to scores."""
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f"{caller}: argument `{name}` must be a torch.Tensor or None, got {type(mask).__name__}")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(
            f"{caller}: argument `{name}` has dtype {dtype_name(mask.dtype)}; accepted are bool and floating-point "
            "dtypes"
        )
