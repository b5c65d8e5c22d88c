"""Dropout compiled: Inductor fuses the ten rounds of Philox, in 64-bit arithmetic, into the kernel that multiplies."""

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
    """The seed goes in as a tensor: an integer would be compiled in, and every seed would be compiled anew."""
    return _run(input, philox.seed_tensor(seed, input.device), p=p)


register("dropout", "compile.default", forward=forward)
