"""Attention of packed sequences compiled: Inductor fuses mask and softmax between two products of all packed rows."""

from compile_impl import ROUNDED, compiled
from kernel_ladder.table import register
from torch_ref.attention_varlen import naive

register("attention_varlen", "compile.default", forward=compiled(naive, options=ROUNDED))
