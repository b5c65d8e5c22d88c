"""The public functions: PyTorch's own signatures, plus ``backend``."""

from kernel_ladder.ops.elementwise import add, bias_gelu, dropout, gelu, rope, swiglu
from kernel_ladder.ops.losses import cross_entropy, linear_cross_entropy
from kernel_ladder.ops.products import linear, matmul
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
    "matmul",
    "rms_norm",
    "rope",
    "softmax",
    "sum",
    "swiglu",
]
