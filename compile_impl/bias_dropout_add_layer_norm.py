"""Bias, dropout, residual sum and LayerNorm compiled: Inductor fuses them all, Philox in 64-bit arithmetic included.

``F.dropout`` draws another mask, so a user of this one would write the formula.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from compile_impl import register
from kernel_ladder.semantics import philox
from torch_ref.bias_dropout_add_layer_norm import naive


def _seeded(
    input: torch.Tensor, seed: torch.Tensor, *others: torch.Tensor | None, p: float, eps: float
) -> torch.Tensor:
    return naive(input, *others, p=p, seed=seed, eps=eps)


def _with_seed(run: Callable) -> Callable:
    """Pass the seed as a tensor: an integer would be a compile-time constant, and each seed would recompile."""

    def forward(
        input: torch.Tensor, *others: torch.Tensor | None, seed: int, **options: Any
    ) -> tuple[torch.Tensor, tuple]:
        return run(input, philox.seed_tensor(seed, input.device), *others, **options)

    return forward


register("bias_dropout_add_layer_norm", _seeded, calling=_with_seed)
