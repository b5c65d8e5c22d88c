"""SwiGLU's gate compiled: Inductor fuses ``F.silu`` and the product into one kernel."""

from compile_impl import register
from torch_ref.swiglu import builtin

register("swiglu", builtin)
