"""What cross-entropy's levels agree on: where classes lie, the reductions, and labels that are checked on the host."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch.compiler import is_compiling

from kernel_ladder.spec import dtype_name
from kernel_ladder.tracing import PLAIN, shapes_only
from kernel_ladder.transforms import transforms_active

REDUCTIONS = ("none", "mean", "sum")


class LossOptions(NamedTuple):
    """A call's options."""

    ignore_index: int
    reduction: str
    label_smoothing: float
    z_loss: float

    @property
    def reduced(self) -> bool:
        return self.reduction != "none"


def class_dim(input: torch.Tensor) -> int:
    """The dimension of the classes: the second, or the only one of a vector."""
    return 1 if input.dim() > 1 else 0


def rows_of(input: torch.Tensor) -> torch.Tensor:
    """The logits as a view whose last dimension has the classes; the others are those of the labels."""
    return input if input.dim() <= 2 else input.movedim(1, -1)


def check_options(
    op: str,
    ignore_index: object,
    reduction: object,
    label_smoothing: object,
    z_loss: object,
    wide_loss: object,
    or_none: str = "",
) -> None:
    """Raise unless the options are ones that a loss takes. `or_none` is what a message adds of `ignore_index`."""
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        given = type(ignore_index).__name__
        raise TypeError(f"{op}: argument `ignore_index` must be an int{or_none}, got {given}")
    if reduction not in REDUCTIONS:
        given = repr(reduction) if isinstance(reduction, str) else type(reduction).__name__
        raise ValueError(f"{op}: argument `reduction` must be {' or '.join(map(repr, REDUCTIONS))}, got {given}")
    for name, value in (("label_smoothing", label_smoothing), ("z_loss", z_loss)):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{op}: argument `{name}` must be a number, got {type(value).__name__}")
    assert isinstance(label_smoothing, (int, float))
    assert isinstance(z_loss, (int, float))
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"{op}: argument `label_smoothing` must be from 0 to 1, got {label_smoothing}")
    if not 0 <= z_loss < math.inf:
        raise ValueError(f"{op}: argument `z_loss` must be at least 0 and finite, got {z_loss}")
    if type(wide_loss) is not bool:
        raise TypeError(f"{op}: argument `wide_loss` must be a bool, got {type(wide_loss).__name__}")


def check_labels(
    op: str, input: torch.Tensor, target: object, rows: tuple[int, ...], classes: int, ignore_index: int
) -> None:
    """Raise unless `target` has a label for each of the `rows`.

    In the host's memory the labels themselves are checked. A GPU's are not read: that would wait for it.
    """
    if not isinstance(target, torch.Tensor):
        raise TypeError(f"{op}: argument `target` must be a torch.Tensor, got {type(target).__name__}")
    if target.dtype != torch.int64:
        hint = "; probabilities of classes are not taken" if target.is_floating_point() else ""
        raise TypeError(f"{op}: argument `target` has dtype {dtype_name(target.dtype)}; accepted is int64{hint}")
    if target.device != input.device:
        raise ValueError(
            f"{op}: arguments `input` and `target` must be on the same device, got {input.device} and {target.device}"
        )
    if target.shape != rows:
        raise ValueError(
            f"{op}: argument `target` must have shape {tuple(rows)}, a label for each row of `input` of shape "
            f"{tuple(input.shape)}, got {tuple(target.shape)}"
        )
    if type(target) not in PLAIN or target.device.type != "cpu" or is_compiling():
        return
    if shapes_only() or transforms_active():
        return
    wrong = target[((target < 0) | (target >= classes)) & (target != ignore_index)]
    if wrong.numel():
        raise IndexError(
            f"{op}: argument `target` must have classes from 0 to {classes - 1}, or {ignore_index} in rows to ignore, "
            f"got {wrong[0].item()}"
        )
