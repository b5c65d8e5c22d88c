"""The deviation of one tensor from the oracle's, and the bounds that the naive formula's deviation sets."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernel_ladder.spec import Output, as_tuple


@dataclass(frozen=True)
class Deviation:
    """The error of one tensor, as largest deviation and as norm, each with its bound."""

    name: str
    error: float
    bound: float
    norm_error: float
    norm_bound: float
    reason: str | None = None  # a fault other than size: shape, dtype, misplaced NaN

    @property
    def agrees(self) -> bool:
        return self.reason is None and self.error <= self.bound and self.norm_error <= self.norm_bound

    def __str__(self) -> str:
        if self.reason is not None:
            return f"{self.name}: {self.reason}"
        return (
            f"{self.name}: largest deviation {self.error:.3e} (bound {self.bound:.3e}), "
            f"norm {self.norm_error:.3e} (bound {self.norm_bound:.3e})"
        )


class Standard:
    """The oracle's tensor with its bounds, against which any number of rungs' tensors are checked.

    Args:
        exact: the oracle's result, in float64.
        naive: the naive formula's result in `dtype`, whose error sets the bounds. None allows two ulp of the largest.
        dtype: the dtype of the tensors that will be compared.
        grad: for a gradient, the gradient of the output that it was computed from. A formula that subtracts values of
            that size (softmax's does) keeps their rounding error even where the difference vanishes. So two ulp of the
            largest are allowed, in the precision of the arithmetic: float32, or float64 for float64.
    """

    def __init__(
        self, exact: torch.Tensor, naive: torch.Tensor | None, dtype: torch.dtype, grad: Output | None = None
    ) -> None:
        size, norm = _errors(exact)
        self.all_finite = size <= _largest(dtype)
        if not self.all_finite:
            # Values beyond the dtype's range become infinity in any implementation.
            exact = torch.where(exact.abs() > _largest(dtype), exact.sign() * torch.inf, exact)
        self.dtype, self.exact = dtype, exact
        self.bound = self.norm_bound = 0.0
        finite = self._finite(exact)
        if not finite.numel():
            return
        ulp = torch.finfo(dtype).eps
        factor = 3 if dtype == torch.float64 else 2  # in float64 the oracle errs as much as the naive formula
        if not self.all_finite:
            size, norm = _errors(finite)
        # One denormal step, for results that round to the smallest numbers of the dtype.
        step, root = torch.finfo(dtype).smallest_normal * ulp, finite.numel() ** 0.5
        self.bound, self.norm_bound = factor * ulp * size + step, factor * ulp * norm + step * root
        if grad is not None:
            given = max((_largest_finite(g) for g in as_tuple(grad)), default=0.0)
            working_ulp = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
            self.bound += factor * working_ulp * given
            self.norm_bound += factor * working_ulp * given * root
        if naive is not None:
            deviation = self._finite(naive.double()) - finite
            naive_error, naive_norm = _errors(deviation)
            if not naive_error < torch.inf:  # elements at which the naive formula overflows set no bound
                naive_error, naive_norm = _errors(deviation[deviation.isfinite()])
            self.bound, self.norm_bound = self.bound + factor * naive_error, self.norm_bound + factor * naive_norm

    def _finite(self, x: torch.Tensor) -> torch.Tensor:
        """The elements of `x` at which the oracle is finite."""
        return x if self.all_finite else x[self.exact.isfinite()]

    def deviation(self, name: str, actual: torch.Tensor) -> Deviation:
        """Check `actual` against the bounds. NaN and infinity must be exactly where the oracle has them."""

        def wrong(reason: str) -> Deviation:
            return Deviation(name, torch.inf, 0.0, torch.inf, 0.0, reason)

        if actual.shape != self.exact.shape:
            return wrong(f"shape {tuple(actual.shape)} where {tuple(self.exact.shape)} is expected")
        if actual.dtype != self.dtype:
            return wrong(f"dtype {actual.dtype} where {self.dtype} is expected")
        value = actual.double()
        error, norm_error = _errors(self._finite(value) - self._finite(self.exact))
        if not (self.all_finite and error < torch.inf):
            same = (value.isnan() == self.exact.isnan()) & (value.isposinf() == self.exact.isposinf())
            same &= value.isneginf() == self.exact.isneginf()
            if not same.all():
                where = (~same).nonzero()[0].tolist()
                got, want = value[tuple(where)].item(), self.exact[tuple(where)].item()
                return wrong(
                    f"{int((~same).sum())} elements differ in NaN or infinity, the first at {where}: "
                    f"{got} where {want} is expected"
                )
        return Deviation(name, error, self.bound, norm_error, self.norm_bound)


def compare(
    name: str,
    actual: torch.Tensor,
    exact: torch.Tensor,
    naive: torch.Tensor | None,
    grad: Output | None = None,
) -> Deviation:
    """Check `actual` against `exact`, within the bounds that `naive`, the naive formula's result, sets."""
    return Standard(exact, naive, actual.dtype if naive is None else naive.dtype, grad).deviation(name, actual)


def _largest(dtype: torch.dtype) -> float:
    """The largest float64 that rounds to a finite number of `dtype`: half a step beyond its maximum."""
    info = torch.finfo(dtype)
    return info.max * (1 + info.eps / 4)


def _largest_finite(x: torch.Tensor) -> float:
    largest = x.abs().max().item() if x.numel() else 0.0
    return largest if largest < torch.inf else _largest_finite(x[x.isfinite()])


def _errors(deviation: torch.Tensor) -> tuple[float, float]:
    """The largest absolute value and the norm; NaN if an element is NaN."""
    if deviation.numel() == 0:
        return 0.0, 0.0
    return torch.linalg.vector_norm(deviation, torch.inf).item(), torch.linalg.vector_norm(deviation).item()
