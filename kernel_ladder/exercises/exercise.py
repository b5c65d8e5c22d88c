"""What an exercise is, as data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kernel_ladder.spec import Case

DIFFICULTIES = ("easy", "medium", "hard")

#: A right solution is slow from this multiple of the time of the table's rung on.
SLOW = 1.25


@dataclass(frozen=True)
class Mistake:
    """A wrong formula that students write, and what to tell who wrote it.

    ``formula(*inputs, **options)`` returns the wrong output in the inputs' dtype. Of an exercise with a backward pass
    it is ``formula(*inputs, grad, **options)`` and returns the wrong gradients by name, ``{"grad 0": …}``.
    """

    explanation: str
    formula: Callable[..., Any]


@dataclass(frozen=True)
class Exercise:
    """A rung of the table to write again.

    Attributes:
        name: names the file in ``sources/`` too.
        op: the operation.
        rung: the rung of the table that solves it.
        difficulty: one of `DIFFICULTIES`.
        teaches: the idea, in one phrase.
        formula: what the kernel computes.
        hints: told one at a time, each saying more than the one before.
        asks: whether a sample of the operation belongs to the exercise.
        timed: the id of a case of the operation's sweep.
        mistakes: those that the check recognises.
        backward: whether the gradients are checked too.
        capability: the least compute capability of a GPU that can run it.
        otherwise: told where a wrong result looks like nothing that is known.
        slow: what makes a right solution slow, told where it takes `SLOW` times as long as the table's rung.
        dtypes: checked where kernels are interpreted; compiled kernels of Triton have float32, float16 and bfloat16.
    """

    name: str
    op: str
    rung: str
    difficulty: str
    teaches: str
    formula: str
    hints: Sequence[str]
    asks: Callable[[Case], bool]
    timed: str
    mistakes: Sequence[Mistake] = ()
    backward: bool = False
    capability: tuple[int, int] = (0, 0)
    otherwise: str = "Compare a small case by hand: without a GPU you can print inside the kernel (printf in CUDA)."
    slow: str = ""
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.float16, torch.bfloat16)

    @property
    def level(self) -> str:
        """The level that it is written at: ``triton`` or ``cuda``."""
        return self.rung.partition(".")[0]
