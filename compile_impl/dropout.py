"""Dropout compiled: Inductor fuses Philox's ten rounds, in 64-bit arithmetic, with the multiplication."""

from __future__ import annotations

import torch

from compile_impl import compiled
from kernel_ladder.semantics import philox
from kernel_ladder.table import register
from torch_ref.dropout import naive


def _seeded(input: torch.Tensor, seed: torch.Tensor, *, p: float) -> torch.Tensor:
    return naive(input, p=p, seed=seed)


_run = compiled(_seeded)


def forward(input: torch.Tensor, *, p: float, seed: int) -> tuple[torch.Tensor, tuple]:
    """Pass the seed as a tensor: an integer would be a compile-time constant, and each seed would recompile."""
    return _run(input, philox.seed_tensor(seed, input.device), p=p)


register("dropout", "compile.default", forward=forward)
