"""Softmax in CUDA C++: ``csrc/softmax``."""

from __future__ import annotations

import itertools

import torch

from cuda_impl import climb, fake_like, unsupported
from cuda_impl.built_for import without_clusters
from cuda_impl.norms import MAX_BLOCK_CHUNKS, max_cluster_chunks
from kernel_ladder import gpu
from kernel_ladder.table import register
from kernel_ladder.tracing import address, wants_gradient

#: Bytes of a vector, in which the kernels count the length of a row.
CHUNK = 16
#: Elements of the longest row of csrc/softmax/multirow.cu, which a warp holds, and of cluster_two_pass.cu.
MAX_WARP_LENGTH = 1024
MAX_TWO_PASS_LENGTH = 2**30


@gpu.cached
def _shared_bytes(device: int) -> int:
    """Shared memory that one block may ask for, less what the reductions need."""
    return gpu.of(device).shared_per_block - 1024


def _length(input: torch.Tensor, dim: int) -> int:
    return input.shape[dim] if input.dim() else 1


def _shared_unsupported(input: torch.Tensor, *, dim: int) -> str | None:
    if (reason := unsupported(input)) is not None:
        return reason
    # The backward pass keeps two rows: output and gradient.
    length, rows = _length(input, dim), 2 if wants_gradient(input) else 1
    row_bytes = rows * -(-length * input.element_size() // CHUNK) * CHUNK
    if row_bytes > (limit := _shared_bytes(input.get_device())):
        kept = "output and gradient take" if rows == 2 else "they take"
        return f"rows of {length} elements do not fit in shared memory ({kept} {row_bytes} of {limit} bytes)"
    return None


def _registers_unsupported(input: torch.Tensor, *, dim: int) -> str | None:
    if (reason := unsupported(input)) is not None:
        return reason
    longest = MAX_BLOCK_CHUNKS * CHUNK // input.element_size()
    length = _length(input, dim)
    return f"rows of {length} elements do not fit in the registers of a block ({longest})" if length > longest else None


def _multirow_unsupported(input: torch.Tensor, *, dim: int) -> str | None:
    if (reason := unsupported(input)) is not None:
        return reason
    length = _length(input, dim)
    if length > MAX_WARP_LENGTH:
        return f"a warp holds rows of at most {MAX_WARP_LENGTH} elements, got {length}"
    if not _has_even_rows(input, dim):
        return "takes rows at one stride, of the input and of the output, that consist of aligned vectors of 16 bytes"
    return None


def _has_even_rows(input: torch.Tensor, dim: int) -> bool:
    """Whether rows of the input, and those of the output that is allocated for it, are aligned vectors at one stride.

    The output has the strides of a dense input, and is row-major otherwise (DenseLike in csrc/core/layout.cpp).
    """
    sizes, vector = input.shape, CHUNK // input.element_size()
    if not sizes or sizes[dim] % vector or address(input) % CHUNK:
        return False
    strides = input.stride()
    if strides[dim] != 1:
        return False
    last = dim in (-1, len(sizes) - 1) or all(size == 1 for size in sizes[dim % len(sizes) + 1 :])
    if last and input.is_contiguous():  # the common case
        return True
    rows = [(strides[d], sizes[d]) for d in range(len(sizes)) if d != dim % len(sizes) and sizes[d] != 1]
    expected, dense = sizes[dim], True
    for stride, size in sorted(rows):
        dense = dense and stride == expected
        expected *= size
    if dense or not last:
        return dense
    merge = all(outer == inner * size for (outer, _), (inner, size) in itertools.pairwise(rows))
    return merge and (not rows or rows[-1][0] % vector == 0)


@gpu.cached
def _cluster_length(device: int, element_size: int) -> int:
    """Elements of the longest row that the registers of a cluster hold."""
    return max_cluster_chunks(device) * CHUNK // element_size


def _cluster_unsupported(input: torch.Tensor, *, dim: int) -> str | None:
    if (reason := unsupported(input)) is not None:
        return reason
    device, length = input.get_device(), _length(input, dim)
    if (reason := without_clusters(device)) is not None:
        return reason
    if length <= MAX_BLOCK_CHUNKS * CHUNK // input.element_size():
        return f"one block holds rows of {length} elements; use cuda.registers"
    longest = _cluster_length(device, input.element_size())
    return (
        None if length <= longest else f"rows of {length} elements do not fit in the registers of a cluster ({longest})"
    )


def _two_pass_unsupported(input: torch.Tensor, *, dim: int) -> str | None:
    if (reason := unsupported(input)) is not None:
        return reason
    device, length = input.get_device(), _length(input, dim)
    if (reason := without_clusters(device)) is not None:
        return reason
    if gpu.of(device).capability >= (12, 0):
        return "needs clusters of 16 blocks, which this GPU does not promise"
    if length <= _cluster_length(device, input.element_size()):
        return f"a cluster holds rows of {length} elements; use cuda.cluster or cuda.registers"
    if length > MAX_TWO_PASS_LENGTH:
        return f"rows of {length} elements are more than {MAX_TWO_PASS_LENGTH}"
    return None


_UNSUPPORTED = {
    "shared": _shared_unsupported,
    "registers": _registers_unsupported,
    "multirow": _multirow_unsupported,
    "cluster": _cluster_unsupported,
    "cluster_two_pass": _two_pass_unsupported,
}

#: Rungs that share the backward kernel of another.
_BACKWARD_OF = {"multirow": "registers"}


def _register(name: str) -> None:
    ops = torch.ops.kernel_ladder
    run, run_backward = getattr(ops.softmax, name), getattr(ops.softmax_backward, _BACKWARD_OF.get(name, name))

    def forward(input: torch.Tensor, *, dim: int) -> tuple[torch.Tensor, tuple]:
        output = run(input, dim)
        return output, (output, dim)

    def backward(saved: tuple, grad: torch.Tensor, needs: tuple[bool, ...]) -> tuple[torch.Tensor]:
        output, dim = saved
        return (run_backward(grad, output, dim),)

    torch.library.register_fake(f"kernel_ladder::softmax.{name}", lambda input, dim: fake_like(input))
    if name not in _BACKWARD_OF:
        torch.library.register_fake(
            f"kernel_ladder::softmax_backward.{name}", lambda grad, output, dim: fake_like(output)
        )
    register(
        "softmax", f"cuda.{name}", forward=forward, backward=backward, unsupported=_UNSUPPORTED.get(name, unsupported)
    )


for _name in climb("softmax"):
    _register(_name)
