"""Softmax in CUDA C++: ``csrc/softmax/softmax.cu``."""

from __future__ import annotations

import torch

from cuda_impl import climb, fake_like, unsupported, wants_gradient
from cuda_impl.built_for import without_clusters
from cuda_impl.norms import max_cluster_chunks
from kernel_ladder import gpu
from kernel_ladder.table import register


@gpu.cached
def _shared_bytes(device: int) -> int:
    """Shared memory that one block may ask for, less what the reductions need."""
    return gpu.of(device).shared_per_block - 1024


def _length(input: torch.Tensor, dim: int) -> int:
    return input.shape[dim] if input.dim() else 1


def _fits_on_chip(input: torch.Tensor, *, dim: int) -> str | None:
    if (reason := unsupported(input)) is not None:
        return reason
    # The backward pass keeps two rows: output and gradient. Vectors are of 16 bytes.
    length, rows = _length(input, dim), 2 if wants_gradient(input) else 1
    row_bytes = rows * -(-length * input.element_size() // 16) * 16
    if row_bytes > (limit := _shared_bytes(input.get_device())):
        kept = "output and gradient take" if rows == 2 else "they take"
        return f"rows of {length} elements do not fit in shared memory ({kept} {row_bytes} of {limit} bytes)"
    return None


#: Vectors of 16 bytes in the longest row that a block holds (csrc/reduce/rows.cuh), and elements of the longest that a cluster
#: goes through (csrc/softmax/softmax.cu).
MAX_BLOCK_CHUNKS = 512 * 4
MAX_CLUSTER_LENGTH = 2**30


@gpu.cached
def _longest(device: int, element_size: int) -> int:
    """Elements of the longest row that a cluster takes: longer ones than it holds are for the largest clusters."""
    of_registers = max_cluster_chunks(device) * 16 // element_size
    return MAX_CLUSTER_LENGTH if gpu.of(device).capability < (12, 0) else of_registers


def _fits_in_a_block(input: torch.Tensor, *, dim: int) -> str | None:
    if (reason := unsupported(input)) is not None:
        return reason
    longest = MAX_BLOCK_CHUNKS * 16 // input.element_size()
    length = _length(input, dim)
    return f"rows of {length} elements do not fit in the registers of a block ({longest})" if length > longest else None


def _needs_clusters(input: torch.Tensor, *, dim: int) -> str | None:
    if (reason := unsupported(input)) is not None:
        return reason
    device, length = input.get_device(), _length(input, dim)
    if (reason := without_clusters(device)) is not None:
        return reason
    longest = _longest(device, input.element_size())
    return None if length <= longest else f"rows of {length} elements are more than {longest}"


_UNSUPPORTED = {"shared": _fits_on_chip, "registers": _fits_in_a_block, "cluster": _needs_clusters}


def _register(name: str) -> None:
    ops = torch.ops.kernel_ladder
    run, run_backward = getattr(ops.softmax, name), getattr(ops.softmax_backward, name)

    def forward(input: torch.Tensor, *, dim: int) -> tuple[torch.Tensor, tuple]:
        output = run(input, dim)
        return output, (output, dim)

    def backward(saved: tuple, grad: torch.Tensor, needs: tuple[bool, ...]) -> tuple[torch.Tensor]:
        output, dim = saved
        return (run_backward(grad, output, dim),)

    torch.library.register_fake(f"kernel_ladder::softmax.{name}", lambda input, dim: fake_like(input))
    torch.library.register_fake(f"kernel_ladder::softmax_backward.{name}", lambda grad, output, dim: fake_like(output))
    register(
        "softmax", f"cuda.{name}", forward=forward, backward=backward, unsupported=_UNSUPPORTED.get(name, unsupported)
    )


for _name in climb("softmax"):
    _register(_name)
