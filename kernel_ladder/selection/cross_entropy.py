"""Which level of cross_entropy ``backend="auto"`` takes on a GPU."""

from __future__ import annotations

from kernel_ladder.semantics.cross_entropy import class_dim
from kernel_ladder.spec import Inputs, Options
from kernel_ladder.tracing import concrete

#: Numbers of classes between which Triton's kernel is ahead in 16 bits without smoothing: 0.94 of the time at 32,000,
#: 0.96 at 50,257 of many rows; 1.24 at 5,120, 0.99 at 11,008 and 1.04 at 128,256 (H200).
CLASSES = (16384, 65536)


def automatic(inputs: Inputs, options: Options) -> tuple[str, ...]:
    """Prefers ``triton.online`` for 16,384 to 65,536 classes in 16 bits without smoothing."""
    x = inputs[0]
    assert x is not None
    if not x.is_cuda or x.element_size() != 2 or options["label_smoothing"]:
        return ()
    place = class_dim(x)
    least, most = CLASSES
    rows = concrete(x.stride(place)) == 1
    return ("triton.online",) if rows and least <= concrete(x.shape[place]) <= most else ()


RULES = {("cross_entropy", "auto"): automatic}
