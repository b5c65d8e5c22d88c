"""Every exercise, in the order to do them in."""

from __future__ import annotations

import difflib

from kernel_ladder.errors import ExerciseError
from kernel_ladder.exercises import elementwise, matrices, on_cuda, rows
from kernel_ladder.exercises.exercise import Exercise

_ALL = (*elementwise.EXERCISES, *rows.EXERCISES, *matrices.EXERCISES, *on_cuda.EXERCISES)
_BY_NAME = {each.name: each for each in _ALL}

_ORDER = (
    "add",
    "gelu",
    "swiglu",
    "row_sum",
    "softmax",
    "rms_norm",
    "softmax_online",
    "add_rms_norm",
    "dropout",
    "matmul",
    "matmul_tiled",
    "rms_norm_backward",
    "flash_attention",
    "cuda_gelu",
    "cuda_gelu_vectorized",
    "cuda_row_sum",
    "cuda_matmul",
    "cuda_matmul_pipeline",
)

EXERCISES: tuple[Exercise, ...] = tuple(_BY_NAME[name] for name in _ORDER)


def named(name: str, argument: str = "name") -> Exercise:
    """An exercise by its name; `argument` names where that comes from in the message.

    Raises:
        ExerciseError: there is none of that name.
    """
    if name in _BY_NAME:
        return _BY_NAME[name]
    near = difflib.get_close_matches(name, _ORDER, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ExerciseError(f"argument `{argument}`: unknown exercise {name!r}; {hint}Exercises are {', '.join(_ORDER)}")
