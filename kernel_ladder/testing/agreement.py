"""Measure a rung's error against float64, and check it against the bound that the naive formula sets.

A rung agrees if, for the output and every gradient, in the largest deviation and in the norm::

    error(rung) <= 2 * error(naive formula in the same dtype) + 2 ulp

and NaN and infinity are exactly where the oracle has them. No tolerance is typed by hand.
If the naive formula cannot set the bound, the spec's ``yardstick`` does. It is as plain, fits in memory at any size,
and sums in no better order than a kernel may. (PyTorch adds matmul's long sums pairwise.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernel_ladder.spec import Inputs, Options, Output, Spec, as_leaves, as_tuple, converted, has_gradient
from kernel_ladder.testing.deviation import Deviation, Standard

#: An implementation under test: inputs to output, differentiable if gradients are checked.
Implementation = Callable[..., Output]
#: Outputs and gradients by name: ``{"output": …, "grad 0": …}``. Further outputs are ``"output 1"``, ….
Results = dict[str, torch.Tensor]
#: The standard of each output and gradient.
Standards = dict[str, Standard]


@dataclass(frozen=True)
class Agreement:
    """The deviations of an output and its gradients from the oracle."""

    deviations: tuple[Deviation, ...]

    @property
    def agrees(self) -> bool:
        return all(d.agrees for d in self.deviations)

    @property
    def worst(self) -> Deviation:
        """The deviation with the largest share of its bound."""
        return max(
            self.deviations,
            key=lambda d: (not d.agrees, max(d.error / (d.bound or 1), d.norm_error / (d.norm_bound or 1))),
        )

    def __str__(self) -> str:
        return "; ".join(str(d) for d in self.deviations)


def evaluate(run: Implementation, inputs: Inputs, options: Options, grad: Output | None) -> Results:
    """The output of `run`, and every input's gradient if `grad`, the gradient of the output, is given."""
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
    """:func:`evaluate` in `dtype`, one independent part at a time if the spec can split the case."""
    whole: Results = {}
    shapes = dict(enumerate(spec.output_shapes(inputs, options)))
    for input_index, output_index in [] if spec.parts is None else spec.parts(inputs, options):
        part = converted(tuple(x[i] for x, i in zip(inputs, input_index, strict=True)), dtype)
        part_grad = None if grad is None else tuple(g[output_index].to(dtype) for g in as_tuple(grad))
        for name, value in evaluate(run, part, options, part_grad).items():
            of, _, number = name.partition(" ")
            place = int(number or 0)
            index = output_index if of == "output" else input_index[place]
            if name not in whole:
                shape = shapes[place] if of == "output" else inputs[place].shape
                whole[name] = torch.zeros(shape, dtype=value.dtype, device=inputs[0].device)
            whole[name][index] += value  # parts may share an input, whose gradient is their sum
    if whole:
        return whole
    return evaluate(run, converted(inputs, dtype), options, _to(grad, dtype))


def _to(grad: Output | None, dtype: torch.dtype) -> Output | None:
    if grad is None:
        return None
    return tuple(g.to(dtype) for g in grad) if isinstance(grad, tuple) else grad.to(dtype)


def _rounded(spec: Spec, inputs: Inputs, options: Options, grad: Output | None) -> Results:
    """The yardstick's results in the inputs' own dtype: in one call, as users make it, if memory allows.

    In parts, the same formula uses other kernels of PyTorch, whose error can be half as large.
    """
    formula = spec.yardstick or spec.reference
    try:
        return evaluate(formula, inputs, options, grad)
    except torch.OutOfMemoryError:
        if spec.parts is None:
            raise
    return _by_parts(spec, formula, inputs, options, grad, inputs[0].dtype)


def baseline(spec: Spec, inputs: Inputs, options: Options, grad: Output | None, exact: Results) -> Results:
    """The naive formula's (or yardstick's) results in the inputs' own dtype, whose error sets the bound.

    In float64 the oracle is the naive formula itself, and its error would be zero. There, the formula's float32 error
    is used, scaled by the ratio of the two units in the last place.
    """
    if inputs[0].dtype != torch.float64:
        return _rounded(spec, inputs, options, grad)
    ratio = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    inputs, grad = converted(inputs, torch.float32), _to(grad, torch.float32)
    rounded = _rounded(spec, inputs, options, grad)
    oracle32 = oracle(spec, inputs, options, grad)
    return {name: exact[name] + ratio * (rounded[name].double() - oracle32[name]) for name in exact}


def standards(spec: Spec, inputs: Inputs, options: Options, grad: Output | None) -> Standards:
    """The standards of every output, and of every gradient if `grad` is given. All rungs share them."""
    exact = oracle(spec, inputs, options, grad)
    naive = baseline(spec, inputs, options, grad, exact)
    return {
        name: Standard(exact[name], of_naive, of_naive.dtype, grad if name.startswith("grad") else None)
        for name, of_naive in naive.items()
    }


def held(results: Results, to: Standards) -> Agreement:
    """The agreement of outputs, gradients, or both."""
    return Agreement(tuple(to[name].deviation(name, value) for name, value in results.items()))


def agreement(
    spec: Spec,
    run: Implementation,
    inputs: Inputs,
    options: Options,
    grad: Output | None = None,
    *,
    to: Standards | None = None,
) -> Agreement:
    """The agreement of an implementation with the oracle on these inputs, with gradients if `grad` is given.

    The result of :func:`standards` can be passed as `to`, so that rungs share it.
    """
    to = standards(spec, inputs, options, grad) if to is None else to
    return held(evaluate(run, inputs, options, grad), to)
