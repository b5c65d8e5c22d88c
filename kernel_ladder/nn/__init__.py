"""Modules of ``torch.nn`` whose work this package's kernels do.

Constructor arguments and names in the ``state_dict`` are PyTorch's, so checkpoints of either load into the other. Each
takes ``backend=`` besides, which is checked when it is set, and which defaults to what the call would choose
(:func:`kernel_ladder.use`). Imported on demand: ``import kernel_ladder.nn``.
"""

from kernel_ladder.nn.attention import GroupedQueryAttention, MultiheadAttention
from kernel_ladder.nn.cache import KVCache
from kernel_ladder.nn.cross_entropy import CrossEntropy
from kernel_ladder.nn.dropout import Dropout
from kernel_ladder.nn.linear import GELU, Linear
from kernel_ladder.nn.mlp import GeluMLP, SwigluMLP
from kernel_ladder.nn.norms import LayerNorm, RMSNorm
from kernel_ladder.nn.paged_cache import PagedKVCache, Places

__all__ = [
    "GELU",
    "CrossEntropy",
    "Dropout",
    "GeluMLP",
    "GroupedQueryAttention",
    "KVCache",
    "LayerNorm",
    "Linear",
    "MultiheadAttention",
    "PagedKVCache",
    "Places",
    "RMSNorm",
    "SwigluMLP",
]
