"""Dropout compiled: Inductor fuses Philox's ten rounds, in 64-bit arithmetic, with the multiplication.

``F.dropout`` draws another mask, so a user of this one would write the formula.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from compile_impl import register
from kernel_ladder.semantics import philox
from torch_ref.dropout import naive


def _seeded(input: torch.Tensor, seed: torch.Tensor, *, p: float) -> torch.Tensor:
    return naive(input, p=p, seed=seed)


def _with_seed(run: Callable) -> Callable:
    """Pass the seed as a tensor: an integer would be a compile-time constant, and each seed would recompile."""

    def forward(input: torch.Tensor, *, p: float, seed: int) -> tuple[torch.Tensor, tuple]:
        return run(input, philox.seed_tensor(seed, input.device), p=p)

    return forward


register("dropout", _seeded, calling=_with_seed)
