"""Softmax compiled: Inductor fuses the naive formula's five passes into one or two kernels, depending on row length."""

from compile_impl import compiled
from kernel_ladder.table import register
from torch_ref.softmax import naive

register("softmax", "compile.default", forward=compiled(naive))
