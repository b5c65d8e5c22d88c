"""GELU compiled: Inductor fuses the naive formula's eight kernels into one."""

from compile_impl import compiled
from kernel_ladder.table import register
from torch_ref.gelu import naive

register("gelu", "compile.default", forward=compiled(naive))
