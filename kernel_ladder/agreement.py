"""Measure a variant's error against float64, and hold it to the bound that the naive formula sets.

A variant agrees when, for the output and for every gradient, both in the largest deviation and in the norm::

    error(variant) <= 2 * error(naive formula in the same dtype) + 2 ulp

and NaN and infinity stand exactly where the oracle has them. There is no tolerance to type by hand.
Where the naive formula can't set the bound, the spec's ``yardstick`` stands in for it: a formula as plain, that fits in
memory at any size and sums in no cleverer order than a kernel may (matmul's long sums, which PyTorch adds pairwise).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernel_ladder.spec import Inputs, Options, Output, Spec, as_leaves, as_tuple, converted, has_gradient

#: An implementation under test: inputs to output, differentiable where gradients are to be checked.
Implementation = Callable[..., Output]
#: Outputs and gradients, by name: ``{"output": …, "grad 0": …}``; of several outputs the others are ``"output 1"``, ….
Results = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Deviation:
    """The error of one tensor: largest deviation and norm, each with its bound."""

    name: str
    error: float
    bound: float
    norm_error: float
    norm_bound: float
    reason: str | None = None  # what is wrong beside the numbers: shape, dtype, misplaced NaN

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


@dataclass(frozen=True)
class Agreement:
    """The deviations of an output and its gradients from the oracle."""

    deviations: tuple[Deviation, ...]

    @property
    def agrees(self) -> bool:
        return all(d.agrees for d in self.deviations)

    @property
    def worst(self) -> Deviation:
        """The deviation that uses most of its bound."""
        return max(
            self.deviations,
            key=lambda d: (not d.agrees, max(d.error / (d.bound or 1), d.norm_error / (d.norm_bound or 1))),
        )

    def __str__(self) -> str:
        return "; ".join(str(d) for d in self.deviations)


def evaluate(run: Implementation, inputs: Inputs, options: Options, grad: Output | None) -> Results:
    """Output of `run`, and the gradient of every input where `grad`, the gradient of the output, is given."""
    if grad is None:
        with torch.no_grad():
            return named(as_tuple(run(*inputs, **options)))
    leaves = as_leaves(inputs)
    outputs = as_tuple(run(*leaves, **options))
    wanted = {f"grad {i}": leaf for i, leaf in enumerate(leaves) if has_gradient(leaf)}
    grads = torch.autograd.grad(outputs, list(wanted.values()), as_tuple(grad))
    return {**named(tuple(x.detach() for x in outputs)), **dict(zip(wanted, grads, strict=True))}


def named(outputs: tuple[torch.Tensor, ...]) -> Results:
    """Outputs by name."""
    return {f"output {i}" if i else "output": x for i, x in enumerate(outputs)}


def oracle(spec: Spec, inputs: Inputs, options: Options, grad: Output | None) -> Results:
    """Output and gradients in float64."""
    return _by_parts(spec, spec.oracle or spec.reference, inputs, options, grad, torch.float64)


def _by_parts(
    spec: Spec, run: Implementation, inputs: Inputs, options: Options, grad: Output | None, dtype: torch.dtype
) -> Results:
    """:func:`evaluate` in `dtype`, one independent part at a time where the spec can split the case."""
    whole: Results = {}
    shapes = dict(enumerate(spec.output_shapes(inputs, options)))
    for input_index, output_index in [] if spec.parts is None else spec.parts(inputs):
        part = converted(tuple(x[i] for x, i in zip(inputs, input_index, strict=True)), dtype)
        part_grad = None if grad is None else tuple(g[output_index].to(dtype) for g in as_tuple(grad))
        for name, value in evaluate(run, part, options, part_grad).items():
            of, _, number = name.partition(" ")
            place = int(number or 0)
            index = output_index if of == "output" else input_index[place]
            if name not in whole:
                shape = shapes[place] if of == "output" else inputs[place].shape
                whole[name] = torch.zeros(shape, dtype=value.dtype, device=inputs[0].device)
            whole[name][index] += value  # parts may share an input: its gradient is their sum
    if whole:
        return whole
    return evaluate(run, converted(inputs, dtype), options, _to(grad, dtype))


def _to(grad: Output | None, dtype: torch.dtype) -> Output | None:
    if grad is None:
        return None
    return tuple(g.to(dtype) for g in grad) if isinstance(grad, tuple) else grad.to(dtype)


def _rounded(spec: Spec, inputs: Inputs, options: Options, grad: Output | None) -> Results:
    """The yardstick's results in the inputs' own dtype: as one call, as users make it, where memory allows.

    By parts the same formula takes other kernels of PyTorch's, which can err half as much.
    """
    formula = spec.yardstick or spec.reference
    try:
        return evaluate(formula, inputs, options, grad)
    except torch.OutOfMemoryError:
        if spec.parts is None:
            raise
    return _by_parts(spec, formula, inputs, options, grad, inputs[0].dtype)


def baseline(spec: Spec, inputs: Inputs, options: Options, grad: Output | None, exact: Results) -> Results:
    """The results of the naive formula (or the spec's yardstick) in the inputs' own dtype, whose error sets the bound.

    In float64 the oracle is the naive formula, and so would set no bound: there, the error that the formula makes in
    float32, scaled by the ratio of the two units in the last place, stands in.
    """
    if inputs[0].dtype != torch.float64:
        return _rounded(spec, inputs, options, grad)
    ratio = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    inputs, grad = converted(inputs, torch.float32), _to(grad, torch.float32)
    rounded = _rounded(spec, inputs, options, grad)
    oracle32 = oracle(spec, inputs, options, grad)
    return {name: exact[name] + ratio * (rounded[name].double() - oracle32[name]) for name in exact}


def compare(
    name: str,
    actual: torch.Tensor,
    exact: torch.Tensor,
    naive: torch.Tensor | None,
    grad: Output | None = None,
) -> Deviation:
    """Hold `actual` to the bound that `naive`, the naive formula's result in the same dtype, sets around `exact`.

    Of a gradient, `grad` is the gradient of the output that it was made from. A formula that subtracts values of that
    size (softmax's does) leaves their rounding behind even where the difference vanishes, so two ulp of the largest
    are allowed, in the precision of the arithmetic: float32, or float64 for float64.
    """

    def wrong(reason: str) -> Deviation:
        return Deviation(name, torch.inf, 0.0, torch.inf, 0.0, reason)

    if actual.shape != exact.shape:
        return wrong(f"shape {tuple(actual.shape)} where {tuple(exact.shape)} is expected")
    if naive is not None and actual.dtype != naive.dtype:
        return wrong(f"dtype {actual.dtype} where {naive.dtype} is expected")
    if actual.numel() == 0:
        return Deviation(name, 0.0, 0.0, 0.0, 0.0)
    if actual.dtype != torch.float64:
        # What the dtype cannot hold becomes infinity there, in any implementation.
        exact = torch.where(exact.abs() > _largest(actual.dtype), exact.sign() * torch.inf, exact)
    value = actual.double()
    same_special = (value.isnan() == exact.isnan()) & (value.isposinf() == exact.isposinf())
    same_special &= value.isneginf() == exact.isneginf()
    if not same_special.all():
        where = (~same_special).nonzero()[0].tolist()
        got, want = value[tuple(where)].item(), exact[tuple(where)].item()
        count = int((~same_special).sum())
        return wrong(
            f"{count} elements differ in NaN or infinity, the first at {where}: {got} where {want} is expected"
        )
    finite = exact.isfinite()
    if not finite.any():
        return Deviation(name, 0.0, 0.0, 0.0, 0.0)
    exact = exact[finite]
    error, norm_error = _errors(value[finite] - exact)
    ulp = torch.finfo(actual.dtype).eps
    factor = 3 if actual.dtype == torch.float64 else 2  # there the oracle errs as much as the naive formula does
    bound, norm_bound = factor * ulp * exact.abs().max().item(), factor * ulp * exact.norm().item()
    # One denormal step, for results that round to the smallest numbers of the dtype.
    bound += torch.finfo(actual.dtype).smallest_normal * ulp
    norm_bound += torch.finfo(actual.dtype).smallest_normal * ulp * exact.numel() ** 0.5
    if grad is not None:
        given = max((_largest_finite(g) for g in as_tuple(grad)), default=0.0)
        working_ulp = torch.finfo(torch.promote_types(actual.dtype, torch.float32)).eps
        bound += factor * working_ulp * given
        norm_bound += factor * working_ulp * given * exact.numel() ** 0.5
    if naive is not None:
        naive_deviation = naive.double()[finite] - exact
        # Where the naive formula overflows, it sets no bound.
        naive_error, naive_norm = _errors(naive_deviation[naive_deviation.isfinite()])
        bound, norm_bound = bound + factor * naive_error, norm_bound + factor * naive_norm
    return Deviation(name, error, bound, norm_error, norm_bound)


def _largest(dtype: torch.dtype) -> float:
    """The largest float64 that rounds to a finite number of `dtype`: half a step past its maximum."""
    info = torch.finfo(dtype)
    return info.max * (1 + info.eps / 4)


def _largest_finite(x: torch.Tensor) -> float:
    finite = x[x.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0


def _errors(deviation: torch.Tensor) -> tuple[float, float]:
    if deviation.numel() == 0:
        return 0.0, 0.0
    return deviation.abs().max().item(), deviation.norm().item()


def agreement(
    spec: Spec,
    run: Implementation,
    inputs: Inputs,
    options: Options,
    grad: Output | None = None,
    *,
    exact: Results | None = None,
    naive: Results | None = None,
) -> Agreement:
    """The agreement of an implementation with the oracle on these inputs, with gradients where `grad` is given.

    Results of :func:`oracle` and :func:`baseline` can be passed in, to be shared by variants.
    """
    exact = oracle(spec, inputs, options, grad) if exact is None else exact
    naive = baseline(spec, inputs, options, grad, exact) if naive is None else naive
    actual = evaluate(run, inputs, options, grad)
    return Agreement(
        tuple(
            compare(name, actual[name], exact[name], naive.get(name), grad if name.startswith("grad") else None)
            for name in exact
        )
    )
