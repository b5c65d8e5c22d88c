"""The operations on several GPUs: sharding rules for DTensor, ring attention, and products beside their communication.

Calls on DTensors need nothing of this package: every public function takes them.
"""

from kernel_ladder.distributed.packed import positions_packed, shard_packed, unshard_packed
from kernel_ladder.distributed.products import all_gather_matmul, matmul_reduce_scatter
from kernel_ladder.distributed.ring import ring_attention
from kernel_ladder.distributed.ring_varlen import ring_attention_varlen
from kernel_ladder.distributed.sequence import positions, shard_sequence, unshard_sequence

__all__ = [
    "all_gather_matmul",
    "matmul_reduce_scatter",
    "positions",
    "positions_packed",
    "ring_attention",
    "ring_attention_varlen",
    "shard_packed",
    "shard_sequence",
    "unshard_packed",
    "unshard_sequence",
]
