"""Dropout whose mask is drawn in the kernel from a seed."""

from __future__ import annotations

import torch

from kernel_ladder import ops
from kernel_ladder.nn.arguments import only
from kernel_ladder.nn.backend import HasBackend
from kernel_ladder.ops.calls import as_number
from kernel_ladder.semantics import philox


@torch.compiler.disable
def draw_seed() -> int:
    """A seed from PyTorch's CPU generator, so ``torch.manual_seed`` and activation checkpoints repeat it."""
    return int(torch.randint(2**63 - 1, ()))


class Dropout(HasBackend, torch.nn.Dropout):
    """:class:`torch.nn.Dropout` by :func:`kernel_ladder.dropout`.

    Each call in training draws a new seed from PyTorch's CPU generator, outside of a graph that torch.compile makes.
    With ``fullgraph=True``, pass a seed of your own to each call.

    Args:
        p: the probability to drop an element, from 0 up to but not including 1.
        inplace: must be False; the result is a new tensor.
        backend: see :func:`kernel_ladder.use`; None leaves the choice to each call.
    """

    OPS = ("dropout",)

    def __init__(self, p: float = 0.5, inplace: bool = False, *, backend: str | None = None) -> None:
        only("Dropout", "inplace", inplace, False, "the result is a tensor of its own")
        p = as_number(p)
        philox.check("Dropout", p, seed=0)
        super().__init__(p, inplace)
        self.backend = backend

    def forward(self, input: torch.Tensor, seed: int | None = None) -> torch.Tensor:
        """Drop elements of `input` in training. `seed` gives the mask; None draws one."""
        if not self.training or self.p == 0:
            return input
        return ops.dropout(input, self.p, seed=draw_seed() if seed is None else seed, backend=self._backend)

    def extra_repr(self) -> str:
        return self._with_backend(super().extra_repr())
