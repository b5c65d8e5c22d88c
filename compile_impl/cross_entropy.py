"""Cross-entropy compiled: Inductor decomposes PyTorch's function, and fuses the reductions of a row."""

from compile_impl import register
from torch_ref.cross_entropy import builtin

register("cross_entropy", builtin)
