"""What the CUDA rungs of the normalisations share: which rows each takes, and how operands are handed over.

``naive`` and ``block`` take any rows. ``registers`` takes rows that one block holds, ``cluster`` those that one block
does not hold. ``smem_pipeline`` and ``persistent_cluster`` take 16-bit rows of whole 16-byte vectors that lie evenly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from cuda_impl import unsupported
from cuda_impl.built_for import is_roomy, without_clusters
from kernel_ladder import gpu
from kernel_ladder.semantics.norms import eps_or_default
from kernel_ladder.spec import as_tuple, converted, dtype_name, mixed
from kernel_ladder.tracing import address, wants_gradient

#: Threads of the largest block, and 16-byte vectors of the longest row that a block holds: csrc/reduce/rows.cuh.
BLOCK_THREADS = 512
MAX_BLOCK_CHUNKS = BLOCK_THREADS * 4
#: The same of a block whose threads hold 8 vectors each: rows of whole vectors, one operand. csrc/norm/registers.cuh.
WIDE_BLOCK_CHUNKS = BLOCK_THREADS * 8
#: Vectors of the rows that `persistent_cluster` takes: more than the first, at most the second, and for all but the
#: longest the shared memory of a block in bytes. csrc/norm/persistent_cluster.cuh.
PERSISTENT_CHUNKS = (8192, 16384)
PERSISTENT_BYTES = 128 * 1024
LONGEST_PERSISTENT_BYTES = 96 * 1024
#: Staged vectors of a thread in the shared memory of the backward pass: csrc/norm/backward.cuh. For rows of which a
#: thread has two vectors; for longer ones, with the weight and two stages of the others, or three.
STAGED_IN_REGISTERS = 16
STAGED = 20
STAGED_IF_ROOMY = 28
#: Shared memory for reductions.
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
    spread = _threads(chunks, 4) * (STAGED_IF_ROOMY if roomy else STAGED)
    held = _threads(chunks, 2) * STAGED_IN_REGISTERS if chunks <= BLOCK_THREADS * 2 else 0
    return max(spread, held) * 16 + REDUCTION_BYTES


@gpu.cached
def _small(device: int) -> int | None:
    """Shared memory of a block, where there are rows whose backward pass needs more; None where it holds them all."""
    limit = gpu.of(device).shared_per_block
    return None if limit >= backward_bytes(MAX_BLOCK_CHUNKS, is_roomy(device)) else limit


def row_length(input: torch.Tensor, dims: int) -> int:
    return input.shape[-1] if dims == 1 else math.prod(input.shape[-dims:])


def _vectorized(x: torch.Tensor) -> bool:
    """Whether rows consist of whole 16-byte vectors: ``Rows::vectors`` in csrc/reduce/row_access.cuh."""
    vector, length = 16 // x.element_size(), x.shape[-1]
    if length % vector or address(x) % 16 or (x.stride(-1) != 1 and length != 1):
        return False
    return all(stride % vector == 0 for size, stride in zip(x.shape[:-1], x.stride(), strict=False) if size != 1)


def _evenly_spaced(x: torch.Tensor) -> bool:
    """Whether rows, in row-major order, all lie one stride apart."""
    expected = None
    for size, stride in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if size == 1:
            continue
        if expected is not None and stride != expected:
            return False
        expected = stride * size
    return True


def _parameters_vectorized(*parameters: torch.Tensor | None) -> bool:
    return all(x is None or not x.is_contiguous() or address(x) % 16 == 0 for x in parameters)  # others are copied


def _irregular(
    operands: tuple[torch.Tensor, ...], dims: int, parameters: tuple[torch.Tensor | None, ...]
) -> str | None:
    """Why operands do not suit a rung that takes 16-bit rows of whole vectors, or None."""
    if operands[0].element_size() != 2:
        return "takes float16 and bfloat16"
    if dims > 1:
        if not all(x.is_contiguous() for x in operands):
            return "takes rows of several dimensions where `input` is contiguous"
        operands = tuple(x.flatten(-dims) for x in operands)
    if not all(_vectorized(x) and _evenly_spaced(x) for x in operands) or not _parameters_vectorized(*parameters):
        return "takes rows of whole 16-byte vectors that lie evenly apart"
    return None


def _in_one_block(
    operands: tuple[torch.Tensor, ...], dims: int, parameters: tuple[torch.Tensor | None, ...], widened: bool
) -> int:
    """Vectors of the longest row that `registers` takes: one operand of whole vectors may be twice as long."""
    (input, *residual) = operands
    if widened or residual or (dims > 1 and not input.is_contiguous()) or not _parameters_vectorized(*parameters):
        return MAX_BLOCK_CHUNKS
    return WIDE_BLOCK_CHUNKS if _vectorized(input.flatten(-dims) if dims > 1 else input) else MAX_BLOCK_CHUNKS


def _too_long(length: int, longest: int, holder: str) -> str:
    return f"rows of {length} elements do not fit in {holder} ({longest})"


def _forward_unsupported(
    rung: str, operands: tuple[torch.Tensor, ...], dims: int, parameters: tuple[torch.Tensor | None, ...], widened: bool
) -> str | None:
    """Why the forward kernels of a rung from `registers` on do not take the rows of `operands`, or None.

    `widened`: the rows are converted to float32 first.
    """
    input = operands[0]
    if widened and rung not in ("registers", "cluster"):
        return f"takes parameters of the input's dtype, got float32 beside {dtype_name(input.dtype)}"
    device, length, vector = input.get_device(), row_length(input, dims), 4 if widened else 16 // input.element_size()
    chunks = -(-length // vector)
    if rung == "registers":
        short = chunks <= MAX_BLOCK_CHUNKS
        longest = MAX_BLOCK_CHUNKS if short else _in_one_block(operands, dims, parameters, widened)
        return _too_long(length, longest * vector, "the registers of a block") if chunks > longest else None
    if rung == "smem_pipeline" and (reason := _irregular(operands, dims, parameters)) is not None:
        return reason
    if rung == "smem_pipeline" and len(operands) == 1 and chunks > MAX_BLOCK_CHUNKS:
        return _too_long(length, MAX_BLOCK_CHUNKS * vector, "the shared memory of a block")
    if rung == "smem_pipeline" and chunks <= MAX_BLOCK_CHUNKS:
        return None
    if (reason := without_clusters(device)) is not None:
        return reason
    if chunks > max_cluster_chunks(device):
        return _too_long(length, max_cluster_chunks(device) * vector, "a cluster")
    if rung == "cluster" and chunks <= _in_one_block(operands, dims, parameters, widened):
        return f"rows of {length} elements fit in a block; cuda.registers takes them"
    if rung == "persistent_cluster":
        least, most = PERSISTENT_CHUNKS
        if (reason := _irregular(operands, dims, parameters)) is not None:
            return reason
        if not least < chunks <= most:
            return f"takes rows of more than {least * vector} and at most {most * vector} elements, got {length}"
        needed = (LONGEST_PERSISTENT_BYTES if chunks == most else PERSISTENT_BYTES) + REDUCTION_BYTES
        if needed > (limit := gpu.of(device).shared_per_block):
            return f"needs {needed} bytes of shared memory a block; this GPU has {limit}"
    return None


def _backward_unsupported(device: int, length: int, element_size: int) -> str | None:
    """Why the backward kernels that all rungs from `registers` on share do not take rows like these, or None."""
    chunks = -(-length * element_size // 16)
    if chunks > MAX_BLOCK_CHUNKS and (reason := without_clusters(device)) is not None:
        return f"the backward pass of rows of {length} elements: {reason}"
    if (limit := _small(device)) is not None:
        needed = backward_bytes(chunks, is_roomy(device))
        if needed > limit:
            return f"the backward pass needs {needed} bytes of shared memory a block; this GPU has {limit}"
    return None


def unsupported_rows(
    rung: str, operands: tuple[torch.Tensor, ...], dims: int, *parameters: torch.Tensor | None
) -> str | None:
    """Why a rung cannot take rows, the last `dims` dimensions of each of `operands`, or None.

    Of a call that wants the gradient of any operand or parameter, the backward pass must fit as well.
    """
    if (reason := unsupported(operands[0])) is not None:
        return reason
    if rung in ("naive", "block"):
        return None
    input, widened = operands[0], mixed(operands[0], *parameters)
    if (reason := _forward_unsupported(rung, operands, dims, parameters, widened)) is not None:
        return reason
    if not wants_gradient(*operands, *parameters):
        return None
    return _backward_unsupported(input.get_device(), row_length(input, dims), 4 if widened else input.element_size())


def widening(
    normalise: Callable[..., tuple[Any, tuple]], backward: Callable[..., tuple[torch.Tensor | None, ...]]
) -> tuple[Callable[..., tuple[Any, tuple]], Callable[..., tuple[torch.Tensor | None, ...]]]:
    """A rung's two passes, made to take float32 parameters beside 16-bit rows.

    The kernels take one dtype. Such rows are converted to float32 before a pass and rounded after it, which costs a
    read and a write of each.
    """

    def widened(keep: bool, *inputs: torch.Tensor | None, eps: float | None, **options: Any) -> tuple[Any, tuple]:
        input, *others = inputs
        assert input is not None
        if not mixed(input, *others):
            output, saved = normalise(keep, *inputs, eps=eps, **options)
            return output, (None, *saved)
        dtypes = tuple(None if x is None else x.dtype for x in inputs)
        eps = eps_or_default(eps, input.dtype)
        output, saved = normalise(keep, *converted(inputs, torch.float32), eps=eps, **options)
        narrow = tuple(x.to(input.dtype) for x in as_tuple(output))
        return narrow if isinstance(output, tuple) else narrow[0], (dtypes, *saved)

    def narrowed(
        saved: tuple, grads: torch.Tensor | tuple[torch.Tensor, ...], needs: tuple[bool, ...]
    ) -> tuple[torch.Tensor | None, ...]:
        dtypes, *others = saved
        if dtypes is None:
            return backward(tuple(others), grads, needs)
        wide = converted(as_tuple(grads), torch.float32)
        found = backward(tuple(others), wide if isinstance(grads, tuple) else wide[0], needs)
        return tuple(None if x is None else x.to(dtype) for x, dtype in zip(found, dtypes, strict=False))

    return widened, narrowed


def backward_of(rung: str) -> str:
    """The overload of the backward operator that a rung uses: all rungs from `registers` on share one."""
    return rung if rung in ("naive", "block") else "registers"


def empty_stats(input: torch.Tensor, per_row: int, keep: bool) -> torch.Tensor:
    """For a fake: what a forward pass keeps of its rows, nothing where there will be no backward pass."""
    return input.new_empty((math.prod(input.shape[:-1]) if keep else 0, per_row), dtype=torch.float32)


def empty_if(needed: bool, like: torch.Tensor, length: int) -> torch.Tensor:
    """For a fake: the gradient of a parameter, empty where it is not wanted."""
    return like.new_empty((length if needed else 0,))
