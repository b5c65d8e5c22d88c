"""Dropout in JAX, with the mask of every level: Philox in 32-bit words."""

from __future__ import annotations

from typing import Any

import torch

from xla_impl.formulas import dropped
from xla_impl.rung import register


def formula(jax: Any, input: Any, *, p: float, seed: Any) -> Any:
    return dropped(jax, input, seed, p)


def unsupported(input: torch.Tensor, *others: torch.Tensor | None, **options: Any) -> str | None:
    """Element numbers are 32-bit words here."""
    return None if input.numel() < 2**32 else f"takes fewer than 2^32 elements, got {input.numel()}"


register("dropout", formula, also_unsupported=unsupported, self_adjoint=True)
