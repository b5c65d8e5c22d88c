"""RMSNorm compiled: Inductor fuses the formula into one kernel a pass, and the weight's gradient into others."""

from compile_impl import compiled
from kernel_ladder.table import register
from torch_ref.rms_norm import naive

register("rms_norm", "compile.default", forward=compiled(naive))
