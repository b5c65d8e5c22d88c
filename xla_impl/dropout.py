"""Dropout in JAX, with the mask of every level: Philox in 32-bit words."""

from __future__ import annotations

from typing import Any

import torch

from kernel_ladder.semantics import philox
from xla_impl import register
from xla_impl.formulas import kept


def formula(jax: Any, input: Any, *, p: float, seed: int) -> Any:
    mask = kept(jax, input.shape, seed, p)
    return input * mask.astype(input.dtype) * jax.numpy.asarray(philox.scale(p), input.dtype)


def too_long(input: torch.Tensor, *others: torch.Tensor | None, **options: Any) -> str | None:
    """Element numbers are 32-bit words here."""
    return None if input.numel() < 2**32 else f"takes fewer than 2^32 elements, got {input.numel()}"


register("dropout", formula, refuses=too_long)
