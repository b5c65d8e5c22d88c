"""What the CUDA variants of the normalisations share: which rows they hold, and how operands are handed over."""

from __future__ import annotations

import functools
import math

import torch

from cuda_impl import unsupported

#: Vectors of 16 bytes in the longest row that a block, and a cluster of them, holds: csrc/rows.cuh, four a thread.
MAX_BLOCK_CHUNKS = 512 * 4
MAX_CLUSTER_CHUNKS = 16 * MAX_BLOCK_CHUNKS
#: Rows in the shared memory of a block in the backward pass: input and gradient of two, or of three from compute
#: capability 9.0 on, and the weight: csrc/norm_backward.cuh.
BACKWARD_ROWS, BACKWARD_ROWS_HOPPER = 5, 7


@functools.cache
def _without_registers(device: int) -> str | None:
    """Why a GPU cannot run the variants that keep rows in registers, or None."""
    properties = torch.cuda.get_device_properties(device)
    if properties.major < 8:
        return "rows in registers need compute capability 8.0 or later (cp.async)"
    rows = BACKWARD_ROWS if properties.major < 9 else BACKWARD_ROWS_HOPPER
    needed = rows * MAX_BLOCK_CHUNKS * 16 + 1024  # and what the threads of a row leave for each other
    if (limit := properties.shared_memory_per_block_optin) < needed:
        return f"the backward pass needs {needed} bytes of shared memory a block; this GPU has {limit}"
    return None


@functools.cache
def _without_clusters(device: int) -> str | None:
    if torch.cuda.get_device_capability(device) < (9, 0):
        return "thread-block clusters need compute capability 9.0 or later"
    return _without_registers(device)


def row_length(input: torch.Tensor, dims: int) -> int:
    return input.shape[-1] if dims == 1 else math.prod(input.shape[-dims:])


def too_long(input: torch.Tensor, length: int, step: str) -> str | None:
    """Why a step of the climb cannot take rows of `length` elements, or None."""
    if (reason := unsupported(input)) is not None or step in ("naive", "block"):
        return reason
    in_a_block = step == "registers"
    reason = (_without_registers if in_a_block else _without_clusters)(input.get_device())
    if reason is not None:
        return reason
    longest = (MAX_BLOCK_CHUNKS if in_a_block else MAX_CLUSTER_CHUNKS) * 16 // input.element_size()
    if length > longest:
        holder = "a block" if in_a_block else "a cluster"
        return f"rows of {length} elements do not fit in the registers of {holder} ({longest})"
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
