"""Attention of packed sequences compiled: Inductor fuses mask and softmax between two products of all packed rows.

PyTorch has no public function of it, so a user would write the formula.
"""

from compile_impl import ROUNDED, register
from torch_ref.attention_varlen import naive

register("attention_varlen", naive, settings={"options": ROUNDED})
