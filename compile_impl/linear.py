"""A linear layer compiled: PyTorch's matrix product, then one kernel for bias and activation."""

from compile_impl import compiled
from kernel_ladder.table import register
from torch_ref.linear import with_rounded_product

register("linear", "compile.default", forward=compiled(with_rounded_product))
