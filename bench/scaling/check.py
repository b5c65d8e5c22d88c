"""Results of several ranks against float64 on one: a wrong one gets no time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from kernel_ladder.testing.deviation import Standard

Tensors = Sequence[torch.Tensor]


def hold(
    names: Sequence[str], found: Tensors, exact: Tensors, naive: Tensors, grad: torch.Tensor | None = None
) -> str | None:
    """The first fault, or None: each error is within twice that of `naive`, in its dtype, plus two ulp.

    `grad` is the gradient of the output, from which all but the first were computed.
    """
    for i, (name, x, of_exact, of_naive) in enumerate(zip(names, found, exact, naive, strict=True)):
        standard = Standard(of_exact, of_naive, of_naive.dtype, None if i == 0 else grad)
        deviation = standard.deviation(name, x)
        if not deviation.agrees:
            return str(deviation)
    return None


def _relative(tensors: Tensors, exact: Tensors) -> list[float]:
    """The norm of each tensor's deviation over that of the exact one."""
    norm = torch.linalg.vector_norm
    return [(norm(x.double() - y) / norm(y)).item() for x, y in zip(tensors, exact, strict=True)]


#: How far the worst element of a tensor may lie beyond the formula's worst, which is chance: of what is wrong it is
#: as large as the element itself, hundreds of roundings in 16 bits.
WORST = 8


def hold_model(names: Sequence[str], found: Tensors, exact: Tensors, naive: Tensors) -> str | None:
    """A fault, or None: the root mean square of relative errors is within twice that of `naive`, plus two ulp.

    Through the layers of a model, one element's error, or a short vector's, is chance; the mean over all is not. A
    single element may deviate by :data:`WORST` times what the worst of its tensor does in `naive`.
    """
    ours, theirs = _relative(found, exact), _relative(naive, exact)
    error, standard = (math.sqrt(sum(e * e for e in errors) / len(errors)) for errors in (ours, theirs))
    eps = torch.finfo(naive[0].dtype).eps
    bound = 2 * standard + 2 * eps
    if not error <= bound:  # also with NaN
        worst = max(range(len(ours)), key=lambda i: math.inf if math.isnan(ours[i]) else ours[i])
        return f"relative error {error:.3e} (bound {bound:.3e}), the largest {ours[worst]:.3e} of {names[worst]}"
    for name, x, y, of_naive in zip(names, found, exact, naive, strict=True):
        most = WORST * (of_naive.double() - y).abs().max() + 2 * eps * y.abs().max()
        if (deviation := (x.double() - y).abs().max()) > most:
            return f"an element of {name} deviates by {deviation:.3e} (bound {most:.3e})"
    return None
