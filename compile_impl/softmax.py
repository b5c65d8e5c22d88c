"""Softmax compiled: Inductor decomposes ``torch.softmax`` into one or two kernels, depending on row length."""

from compile_impl import register
from torch_ref.softmax import builtin

register("softmax", builtin)
