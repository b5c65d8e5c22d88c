"""Sum compiled: Inductor widens and rounds in the kernel that sums, and splits a long sum in two."""

from compile_impl import compiled
from kernel_ladder.table import register
from torch_ref.sum import naive

register("sum", "compile.default", forward=compiled(naive))
