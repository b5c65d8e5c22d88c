"""Results of several ranks against float64 on one: a wrong one gets no time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernel_ladder.testing.deviation import Standard


def hold(
    names: Sequence[str],
    found: Sequence[torch.Tensor],
    exact: Sequence[torch.Tensor],
    naive: Sequence[torch.Tensor],
    grad: torch.Tensor | None = None,
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
