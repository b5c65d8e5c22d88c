"""Softmax in CUDA C++: ``csrc/softmax.cu``."""

from __future__ import annotations

import functools

import torch

from cuda_impl import climb, fake_like, unsupported
from kernel_ladder.table import register


@functools.cache
def _shared_bytes(device: torch.device) -> int:
    """Shared memory that one block may ask for, less what the reductions need."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin - 1024


def _length(input: torch.Tensor, dim: int) -> int:
    return input.shape[dim] if input.dim() else 1


def _fits_on_chip(input: torch.Tensor, *, dim: int) -> str | None:
    if (reason := unsupported(input)) is not None:
        return reason
    # The backward pass keeps two rows: output and gradient.
    length = _length(input, dim)
    row_bytes = 2 * input.element_size() * length
    if row_bytes > (limit := _shared_bytes(input.device)):
        return (
            f"rows of {length} elements do not fit in shared memory "
            f"(output and gradient take {row_bytes} of {limit} bytes)"
        )
    return None


#: Vectors of 16 bytes in the longest row that a block holds (csrc/rows.cuh), and elements of the longest that a cluster
#: goes through (csrc/softmax.cu).
MAX_BLOCK_CHUNKS = 512 * 4
MAX_CLUSTER_LENGTH = 2**30


@functools.cache
def _has_clusters(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


def _fits_in_a_block(input: torch.Tensor, *, dim: int) -> str | None:
    if (reason := unsupported(input)) is not None:
        return reason
    longest = MAX_BLOCK_CHUNKS * 16 // input.element_size()
    length = _length(input, dim)
    return f"rows of {length} elements do not fit in the registers of a block ({longest})" if length > longest else None


def _needs_clusters(input: torch.Tensor, *, dim: int) -> str | None:
    if (reason := unsupported(input)) is not None:
        return reason
    if not _has_clusters(input.device):
        return "thread-block clusters need compute capability 9.0 or later"
    length = _length(input, dim)
    return None if length <= MAX_CLUSTER_LENGTH else f"rows of {length} elements are more than {MAX_CLUSTER_LENGTH}"


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
