"""Shared by the normalisations: argument checks, the dtype of computation, and rows as views."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch

from kernel_ladder.spec import DTYPES, check_tensors


def _all_ints(shape: tuple[object, ...]) -> bool:
    for n in shape:  # noqa: SIM110 - every call runs this, and a generator takes twice as long
        if type(n) is not int:
            return False
    return True


_PARAMETERS = ("weight", "bias")


def check_normalized(
    op: str,
    input: torch.Tensor,
    normalized_shape: tuple[int, ...],
    eps: float | None,
    eps_optional: bool = True,
    **parameters: torch.Tensor | None,
) -> None:
    """Raise unless `normalized_shape` ends the input's shape and is the shape of each given parameter."""
    given: dict[str, Any] = {name: x for name, x in parameters.items() if x is not None}
    check_tensors(op, optional=_PARAMETERS, parameters=_PARAMETERS, input=input, **given)
    shape = normalized_shape
    if not isinstance(shape, tuple) or not _all_ints(shape):
        raise TypeError(f"{op}: argument `normalized_shape` must be a tuple or list of ints, got {normalized_shape!r}")
    if not shape or input.shape[-len(shape) :] != shape:
        raise ValueError(
            f"{op}: argument `normalized_shape` must be the last dimensions of `input`, at least one: "
            f"got {shape} for a shape of {tuple(input.shape)}"
        )
    for name, x in given.items():
        if x.shape != shape:
            raise ValueError(f"{op}: argument `{name}` must have the shape {shape} of a row, got {tuple(x.shape)}")
    check_eps(op, eps, eps_optional)


def check_eps(op: str, eps: float | None, optional: bool = True) -> None:
    """Raise unless `eps` is a finite number (of either sign, as in PyTorch), or None if it is `optional`."""
    if (eps is None and optional) or (type(eps) is float and -math.inf < eps < math.inf):
        return
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        absent = " or None" if optional else ""
        raise TypeError(f"{op}: argument `eps` must be a number{absent}, got {type(eps).__name__}")
    if not abs(eps) <= sys.float_info.max:
        raise ValueError(f"{op}: argument `eps` must be finite, got {eps}")


#: A table, because torch.promote_types is an operator and would be recorded among those of a formula.
_COMPUTATION = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
}


def computation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which `dtype` is computed: float32 for the 16-bit dtypes, else `dtype` itself."""
    return _COMPUTATION.get(dtype) or torch.promote_types(dtype, torch.float32)


def on_cpu_in_16_bits(input: torch.Tensor) -> bool:
    """Whether PyTorch computes on a CPU in 16 bits, where some of its kernels keep sums in them."""
    return input.device.type == "cpu" and input.dtype in (torch.float16, torch.bfloat16)


_EPS = {dtype: torch.finfo(computation_dtype(dtype)).eps for dtype in DTYPES}


def eps_or_default(eps: float | None, dtype: torch.dtype) -> float:
    """`eps`, or for None what PyTorch's rms_norm adds: the machine epsilon of the computation's dtype."""
    return _EPS[dtype] if eps is None else float(eps)


def as_rows(x: torch.Tensor, dims: int) -> torch.Tensor:
    """`x` with its last `dims` dimensions merged: a view if the strides allow one, else a copy."""
    return x if dims == 1 else x.flatten(-dims)


def as_parameter(x: torch.Tensor | None) -> torch.Tensor | None:
    """Weight or bias as one dense row: a view where its strides allow one, else a copy."""
    if x is None or (x.dim() == 1 and x.is_contiguous()):
        return x
    return x.reshape(-1).contiguous()


def forwards(normalise: Callable[..., tuple[Any, tuple]]) -> dict[str, Callable[..., Any]]:
    """A rung's `forward` and `inference`, both made from ``normalise(keep, *inputs, **options)``.

    `normalise` returns what `forward` returns. If `keep` is False, it need not write what only a backward reads.
    """

    def forward(*inputs: torch.Tensor | None, **options: Any) -> tuple[Any, tuple]:
        return normalise(True, *inputs, **options)

    def inference(*inputs: torch.Tensor | None, **options: Any) -> Any:
        return normalise(False, *inputs, **options)[0]

    return {"forward": forward, "inference": inference}
