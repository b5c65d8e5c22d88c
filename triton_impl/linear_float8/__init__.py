"""Linear layer of float8 operands in Triton: the ladder, in the order of its rungs.

tiled       the tiles of matmul's `tiled` on the float8 tensor cores, with scales in the epilogue; takes everything
persistent  matmul's persistent loop: the next tile's loads overlap this tile's store; takes what descriptors take

Shared openly: rasterization, the loop over k and the cost model of ``matmul/tiles.py``, descriptors of matmul's
`persistent`, and the dot of ``common/dot.py``, which promotes sums to float32. Both rungs share the epilogue.
"""

from __future__ import annotations

from kernel_ladder.semantics.float8 import refuse_gradient
from triton_impl import register
from triton_impl.linear_float8 import persistent, tiled

OP = "linear_float8"

for _name, _rung in (("tiled", tiled), ("persistent", persistent)):
    register(
        OP,
        f"triton.{_name}",
        forward=_rung.linear_float8,
        backward=refuse_gradient(OP),
        unsupported=_rung.unsupported,
    )
