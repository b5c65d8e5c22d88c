"""SwiGLU's gate compiled: Inductor fuses the naive formula's three kernels into one."""

from compile_impl import compiled
from kernel_ladder.table import register
from torch_ref.swiglu import naive

register("swiglu", "compile.default", forward=compiled(naive))
