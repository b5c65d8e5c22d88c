"""A linear layer compiled: PyTorch's product, and one kernel for the bias and the activation after it."""

from compile_impl import compiled
from kernel_ladder.table import register
from torch_ref.linear import with_rounded_product

register("linear", "compile.default", forward=compiled(with_rounded_product))
