"""What the CUDA variants of the normalisations share: which rows they hold, and how operands are handed over."""

from __future__ import annotations

import math

import torch

from cuda_impl import unsupported, wants_gradient
from cuda_impl.built_for import is_roomy, without_clusters
from kernel_ladder import gpu

#: Threads of the largest block, and vectors of 16 bytes in the longest row that a block holds: csrc/reduce/rows.cuh.
BLOCK_THREADS = 512
MAX_BLOCK_CHUNKS = BLOCK_THREADS * 4
#: Slots of a thread in the shared memory of the backward pass: csrc/norm/backward.cuh. Of rows that a thread has two
#: vectors of, and of longer ones, whose input and gradient are there two or three times and whose weight once.
HELD_SLOTS, SLOTS, ROOMY_SLOTS = 16, 20, 28
#: What the threads of a row leave for each other.
REDUCTION_BYTES = 1024


@gpu.cached
def max_cluster_chunks(device: int) -> int:
    """Vectors of 16 bytes in the longest row that a cluster holds.

    Of 16 blocks, or of 8 on GPUs of which no larger clusters are promised.
    """
    return (8 if gpu.of(device).capability >= (12, 0) else 16) * MAX_BLOCK_CHUNKS


def _threads(chunks: int, vectors: int) -> int:
    """Threads that share a row, of so many vectors at most: ``row_threads`` in csrc/reduce/rows.cuh."""
    threads = 4
    while threads < BLOCK_THREADS and threads * vectors < chunks:
        threads *= 2
    return threads


def backward_bytes(chunks: int, roomy: bool) -> int:
    """Shared memory that a block of the backward pass needs for one row, whatever its layout."""
    spread = _threads(chunks, 4) * (ROOMY_SLOTS if roomy else SLOTS)
    held = _threads(chunks, 2) * HELD_SLOTS if chunks <= BLOCK_THREADS * 2 else 0
    return max(spread, held) * 16 + REDUCTION_BYTES


@gpu.cached
def _small(device: int) -> int | None:
    """Shared memory of a block, where there are rows whose backward pass needs more; None where it holds them all."""
    limit = gpu.of(device).shared_per_block
    return None if limit >= backward_bytes(MAX_BLOCK_CHUNKS, is_roomy(device)) else limit


def row_length(input: torch.Tensor, dims: int) -> int:
    return input.shape[-1] if dims == 1 else math.prod(input.shape[-dims:])


def too_long(step: str, length: int, input: torch.Tensor, *others: torch.Tensor | None) -> str | None:
    """Why a step of the climb cannot take rows of `length` elements, or None.

    `others` are the further inputs: of a call that wants the gradient of any, the backward pass must fit as well.
    """
    if (reason := unsupported(input)) is not None or step in ("naive", "block"):
        return reason
    device, in_a_block = input.get_device(), step == "registers"
    if not in_a_block and (reason := without_clusters(device)) is not None:
        return reason
    longest = (MAX_BLOCK_CHUNKS if in_a_block else max_cluster_chunks(device)) * 16 // input.element_size()
    if length > longest:
        holder = "a block" if in_a_block else "a cluster"
        return f"rows of {length} elements do not fit in the registers of {holder} ({longest})"
    if (limit := _small(device)) is not None and wants_gradient(input, *others):
        needed = backward_bytes(-(-length * input.element_size() // 16), is_roomy(device))
        if needed > limit:
            return f"the backward pass needs {needed} bytes of shared memory a block; this GPU has {limit}"
    return None


def as_parameter(x: torch.Tensor | None) -> torch.Tensor | None:
    """Weight or bias as one dense row."""
    if x is None or (x.dim() == 1 and x.is_contiguous()):
        return x
    return x.reshape(-1).contiguous()


def empty_stats(input: torch.Tensor, per_row: int, keep: bool) -> torch.Tensor:
    """For a fake: what a forward pass keeps of its rows, nothing where there will be no backward pass."""
    return input.new_empty((math.prod(input.shape[:-1]) if keep else 0, per_row), dtype=torch.float32)


def empty_if(needed: bool, like: torch.Tensor, length: int) -> torch.Tensor:
    """For a fake: the gradient of a parameter, empty where it is not wanted."""
    return like.new_empty((length if needed else 0,))
