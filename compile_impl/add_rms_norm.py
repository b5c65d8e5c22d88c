"""Residual sum and RMSNorm compiled: Inductor fuses both into one kernel."""

from compile_impl import compiled
from kernel_ladder.table import register
from torch_ref.add_rms_norm import naive

register("add_rms_norm", "compile.default", forward=compiled(naive))
