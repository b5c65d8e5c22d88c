"""Residual sum and RMSNorm compiled: Inductor fuses both into one kernel."""

from compile_impl import register
from torch_ref.add_rms_norm import builtin

register("add_rms_norm", builtin)
