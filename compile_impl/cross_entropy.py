"""Cross-entropy compiled: Inductor decomposes PyTorch's function and fuses softmax's reductions with the label's term."""

from compile_impl import register
from torch_ref.cross_entropy import builtin, naive

register("cross_entropy", builtin, formula=naive)
