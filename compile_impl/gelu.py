"""GELU compiled: Inductor decomposes ``F.gelu`` and fuses its operators into one kernel."""

from compile_impl import register
from torch_ref.gelu import builtin

register("gelu", builtin)
