"""Which calls of linear_cross_entropy ``backend="auto"`` gives to Triton."""

from __future__ import annotations

from kernel_ladder import gpu
from kernel_ladder.selection.matmul import is_hopper
from kernel_ladder.spec import Inputs, Options
from kernel_ladder.tracing import concrete

#: Logits from which on the chunks are worth their launches on Hopper.
LEAST = 2**26
#: Bytes of memory that PyTorch's calls hold at once for each logit: it and its logarithm of a softmax, in float32.
BYTES_OF_LOGIT = 8
#: The share of a GPU's memory that those may take where no times are known, by the size of a dtype in bytes. In float32
#: the chunks only avoid a call that hardly fits: gradients take half as much again.
SHARES = {2: 1 / 8, 4: 1 / 2}


def chunked_where_large(inputs: Inputs, options: Options) -> tuple[str, ...]:
    """Prefers ``triton.chunked`` for many 16-bit logits on Hopper, and where PyTorch's calls would fill the memory."""
    input, weight, target = inputs[:3]
    assert input is not None
    assert weight is not None
    assert target is not None
    if not input.is_cuda or input.itemsize not in SHARES:
        return ()
    logits, device = concrete(target.numel()) * concrete(weight.shape[0]), input.get_device()
    fast = input.itemsize == 2 and logits >= LEAST and is_hopper(device)
    if fast or BYTES_OF_LOGIT * logits > SHARES[input.itemsize] * gpu.of(device).memory:
        return ("triton.chunked",)
    return ()


RULES = {("linear_cross_entropy", "auto"): chunked_where_large}
