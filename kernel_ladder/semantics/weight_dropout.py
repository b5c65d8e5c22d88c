"""Dropout of attention weights: which weight an element of dropout's mask belongs to, and what takes it.

A weight is dropped where :func:`kernel_ladder.dropout` would drop it with the same seed in a tensor of the weights'
shape, (..., H, S_q, S_k). :mod:`kernel_ladder.semantics.philox` defines the mask by the row-major index there. Weights
are normalised before they are dropped, so that the log-sum-exp does not change. Hidden weights count too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from kernel_ladder.semantics import philox

#: Why a rung without it refuses a call.
REFUSAL = "it drops no weights; dropout_p is for torch.naive, compile.formula, triton.flash and cuda.flash"


def check(op: str, dropout_p: object, seed: object) -> None:
    """Raise unless `dropout_p` is a probability below one and, where it is not zero, `seed` an integer of 63 bits."""
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, int | float):
        raise TypeError(f"{op}: argument `dropout_p` must be a number, got {type(dropout_p).__name__}")
    if not 0 <= dropout_p < 1:  # NaN too
        raise ValueError(f"{op}: argument `dropout_p` must be at least 0 and less than 1, got {dropout_p}")
    philox.check(op, dropout_p, seed)


def factors(shape: tuple[int, ...], p: float, seed: int | torch.Tensor, device: torch.device) -> torch.Tensor:
    """What weights of this shape are multiplied by: 0 or 1 / (1 − p) each, in float32."""
    kept = (philox.words(math.prod(shape), seed, device) >= philox.threshold(p)).view(shape)
    return kept * torch.full((), philox.scale(p), device=device)


def refused_by(unsupported: Callable[..., str | None]) -> Callable[..., str | None]:
    """The `unsupported` of a rung that keeps all weights."""

    def refuses(*inputs: torch.Tensor | None, **options: Any) -> str | None:
        return REFUSAL if "dropout_p" in options else unsupported(*inputs, **options)

    return refuses
