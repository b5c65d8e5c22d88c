"""Which rung of linear_float8 ``backend="triton"`` stands for."""

from __future__ import annotations

from kernel_ladder.spec import Inputs, Options
from kernel_ladder.tracing import concrete, product_of

#: Rows, or outputs, for which `tiled` has tiles of their own: as in ``triton_impl/linear_float8/tiled.py``.
THIN = 64


def tiled_where_thin(inputs: Inputs, options: Options) -> tuple[str, ...]:
    """Prefers ``triton.tiled`` for few rows or few outputs. `persistent` pads them to 64."""
    input, weight = inputs[:2]
    assert input is not None
    assert weight is not None
    rows = product_of(input.shape[:-1])
    return ("triton.tiled",) if min(rows, concrete(weight.shape[0])) <= THIN else ()


RULES = {("linear_float8", "triton"): tiled_where_thin}
