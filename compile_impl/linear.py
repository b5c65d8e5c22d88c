"""A linear layer compiled: PyTorch's matrix product, then one kernel for bias and activation."""

from compile_impl import register
from torch_ref.linear import builtin

register("linear", builtin)
