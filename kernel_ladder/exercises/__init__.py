"""Exercises: rungs of the table with gaps to fill in, as ``python -m kernel_ladder exercise`` has them.

catalog    every exercise, in order
sources/   the solutions, with their gaps marked
exercise   the type of an exercise; elementwise, rows, matrices and on_cuda hold the data
cuda       a kernel in CUDA C++ from its source; emulator runs it where there is no GPU
template   a solution as the file that a student starts from
judge      a file's rungs held to float64 on every sample that the exercise asks for
guards     memory around every tensor that tells of a load or store outside of it
causes     from a wrong result to what probably made it
timing     the rung beside the ladder's

This module holds what a started file imports.
"""

from __future__ import annotations

import torch


def not_plain(*tensors: torch.Tensor, backward: bool = False) -> str | None:
    """Why a first kernel does not take these tensors, or None.

    It takes contiguous tensors of at most 32 bits an element. Without a `backward` it takes none where a gradient is
    wanted.
    """
    for x in tensors:
        if x.dtype == torch.float64:
            return "float64 is supported at the torch, compile and xla levels only"
        if not x.is_contiguous():
            return "takes contiguous tensors"
        if x.requires_grad and not backward and torch.is_grad_enabled():
            return "no backward: use another rung of the table where a gradient is wanted"
    return None
