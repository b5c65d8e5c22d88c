"""Sum in Triton: the ladder, in the order of its rungs.

naive      one program per contiguous row
two_stage  tiles along rows or down columns, whichever way the memory lies; a long sum is split over programs
"""

from __future__ import annotations

from triton_impl import register
from triton_impl.sum import naive, two_stage

register("sum", "triton.naive", forward=naive.sum, backward=naive.sum_backward, unsupported=naive.unsupported)
register(
    "sum",
    "triton.two_stage",
    forward=two_stage.sum,
    backward=two_stage.sum_backward,
    unsupported=two_stage.unsupported,
)
