"""The public functions: PyTorch's own signatures, plus ``backend``.

Every function checks its arguments before a level runs, and raises the same errors at every level:

Raises:
    TypeError: an argument of a wrong type or dtype.
    ValueError: a wrong shape or value, or tensors on different devices.
    IndexError: a dimension or a class out of range.
    BackendError: no backend of that name; the message lists those that are known.
    UnavailableError: the level cannot be used on this machine; the message has the reason.
    UnsupportedError: the rung, or every rung of the level, does not take these inputs; the message has the reason.
    torch.OutOfMemoryError: the result, or what the rung needs beside it, does not fit in memory.

Outputs are new tensors on the inputs' device. PyTorch's ``out`` must be None.
"""

from kernel_ladder.ops.elementwise import add, bias_gelu, dropout, gelu, rope, swiglu
from kernel_ladder.ops.losses import cross_entropy, linear_cross_entropy
from kernel_ladder.ops.products import linear, linear_float8, matmul
from kernel_ladder.ops.rows import add_rms_norm, bias_dropout_add_layer_norm, layer_norm, rms_norm, softmax, sum
from kernel_ladder.ops.sdpa import attention, attention_paged, attention_varlen

__all__ = [
    "add",
    "add_rms_norm",
    "attention",
    "attention_paged",
    "attention_varlen",
    "bias_dropout_add_layer_norm",
    "bias_gelu",
    "cross_entropy",
    "dropout",
    "gelu",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "linear_float8",
    "matmul",
    "rms_norm",
    "rope",
    "softmax",
    "sum",
    "swiglu",
]
