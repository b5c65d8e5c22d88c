"""The operations on several GPUs: sharding rules for DTensor, and ring attention over sequences too long for one GPU.

Calls on DTensors need nothing of this package: every public function takes them.
"""

from kernel_ladder.distributed.ring import ring_attention
from kernel_ladder.distributed.sequence import positions, shard_sequence, unshard_sequence

__all__ = ["positions", "ring_attention", "shard_sequence", "unshard_sequence"]
