"""Which rung of bias_gelu a level's name stands for where the last rung is not the fastest."""

from __future__ import annotations

import torch

from kernel_ladder import gpu
from kernel_ladder.spec import Inputs, Options

#: Bytes of the input that a block of ``multirow`` covers: 256 threads, four vectors of 16 bytes each.
BLOCK_BYTES = 256 * 4 * 16
#: Blocks of ``multirow`` per SM below which its last wave leaves SMs idle.
FEW_BLOCKS = 32


@gpu.cached
def _few_bytes(device: int) -> int:
    return BLOCK_BYTES * FEW_BLOCKS * gpu.of(device).multiprocessors


def prefer_vectorized(inputs: Inputs, options: Options) -> tuple[str, ...]:
    """Prefers ``cuda.vectorized`` in float32, and where ``cuda.multirow`` has fewer than 32 blocks per SM.

    In 16 bits a thread of ``multirow`` spends fewer instructions per row, but it has a quarter as many blocks.
    """
    input = inputs[0]
    if not input.is_cuda:
        return ()
    if input.dtype is torch.float32 or input.numel() * input.element_size() < _few_bytes(input.get_device()):
        return ("cuda.vectorized",)
    return ()


RULES = {("bias_gelu", "cuda"): prefer_vectorized}
