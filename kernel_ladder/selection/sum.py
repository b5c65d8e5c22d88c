"""Which level of sum ``backend="auto"`` takes on a GPU."""

from __future__ import annotations

import torch

from kernel_ladder.semantics.reduction import reduced_dims
from kernel_ladder.spec import Inputs, Options
from kernel_ladder.tracing import concrete

#: Elements of a row between which Triton's kernel is ahead: 0.92 of the time at 1,536 elements, 0.76 at 5,120 and
#: 11,008; 1.18 at 1,000, and as long from 16,384 on (H200). A block of `cuda.two_stage` holds a row or two then, and
#: starts and ends with its memory idle.
ROW = (1024, 16384)


def automatic(inputs: Inputs, options: Options) -> tuple[str, ...]:
    """Prefers ``triton.two_stage`` for dense 16-bit rows of 1025 to 16383 elements."""
    (x,) = inputs
    assert x is not None
    if not x.is_cuda or x.dtype is torch.float32 or x.dim() < 2:
        return ()
    last = x.dim() - 1
    least, most = ROW
    rows = tuple(reduced_dims(options["dim"], x.dim())) == (last,) and concrete(x.stride(last)) == 1
    return ("triton.two_stage",) if rows and least < concrete(x.shape[last]) < most else ()


RULES = {("sum", "auto"): automatic}
