"""Rotary position embedding compiled: Inductor fuses the naive formula's kernels into one a pass."""

from compile_impl import register
from torch_ref.rope import naive

register("rope", naive)
