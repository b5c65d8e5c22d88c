"""Attention compiled: Inductor fuses scale, mask and softmax between two matrix products.

Where its pattern matcher recognises the formula, it calls PyTorch's own fused kernel instead.
"""

from compile_impl import ROUNDED, compiled
from kernel_ladder.table import register
from torch_ref.attention import naive

register("attention", "compile.default", forward=compiled(naive, options=ROUNDED))
