"""What cross-entropy's levels agree on: where classes lie, the reductions, and labels that are checked on the host."""

from __future__ import annotations

import torch
from torch.compiler import is_compiling

from kernel_ladder.tracing import PLAIN, shapes_only
from kernel_ladder.transforms import transforms_active

REDUCTIONS = ("none", "mean", "sum")


def class_dim(input: torch.Tensor) -> int:
    """The dimension of the classes: the second, or the only one of a vector."""
    return 1 if input.dim() > 1 else 0


def rows_of(input: torch.Tensor) -> torch.Tensor:
    """The logits as a view whose last dimension has the classes; the others are those of the labels."""
    return input if input.dim() <= 2 else input.movedim(1, -1)


def check_labels(target: torch.Tensor, classes: int, ignore_index: int) -> None:
    """Raise where a label in the host's memory is no class. A GPU's labels are not read: that would wait for it."""
    if type(target) not in PLAIN or target.device.type != "cpu" or is_compiling():
        return
    if shapes_only() or transforms_active():
        return
    wrong = target[((target < 0) | (target >= classes)) & (target != ignore_index)]
    if wrong.numel():
        raise IndexError(
            f"cross_entropy: argument `target` must have classes from 0 to {classes - 1}, or {ignore_index} in rows "
            f"to ignore, got {wrong[0].item()}"
        )
