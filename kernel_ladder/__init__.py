"""Transformer operations, each at several levels (PyTorch, torch.compile, XLA, Triton, CUDA C++) behind one table."""

from kernel_ladder import ops as _ops
from kernel_ladder._version import __version__
from kernel_ladder.errors import BackendError, UnavailableError, UnsupportedError
from kernel_ladder.ops import *  # noqa: F403  every operation
from kernel_ladder.selection import resolve
from kernel_ladder.semantics.float8 import quantize_float8
from kernel_ladder.table import LEVELS, OPS, backends, register, spec, use, variants

__all__ = [
    "LEVELS",
    "OPS",
    "BackendError",
    "UnavailableError",
    "UnsupportedError",
    "__version__",
    "backends",
    "quantize_float8",
    "register",
    "resolve",
    "spec",
    "use",
    "variants",
]
__all__ += _ops.__all__
