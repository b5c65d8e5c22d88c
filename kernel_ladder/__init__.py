"""Transformer operations, each at several levels (PyTorch, torch.compile, Triton, CUDA C++) behind one table."""

from kernel_ladder._version import __version__
from kernel_ladder.errors import BackendError, UnavailableError, UnsupportedError
from kernel_ladder.ops import (
    add,
    add_rms_norm,
    attention,
    attention_varlen,
    bias_dropout_add_layer_norm,
    bias_gelu,
    cross_entropy,
    dropout,
    gelu,
    layer_norm,
    linear,
    linear_cross_entropy,
    matmul,
    rms_norm,
    rope,
    softmax,
    sum,
    swiglu,
)
from kernel_ladder.selection import resolve
from kernel_ladder.table import LEVELS, OPS, backends, register, spec, use, variants

__all__ = [
    "LEVELS",
    "OPS",
    "BackendError",
    "UnavailableError",
    "UnsupportedError",
    "__version__",
    "add",
    "add_rms_norm",
    "attention",
    "attention_varlen",
    "backends",
    "bias_dropout_add_layer_norm",
    "bias_gelu",
    "cross_entropy",
    "dropout",
    "gelu",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "matmul",
    "register",
    "resolve",
    "rms_norm",
    "rope",
    "softmax",
    "spec",
    "sum",
    "swiglu",
    "use",
    "variants",
]
