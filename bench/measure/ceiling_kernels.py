"""Kernels that measure one limit of the machine each: read, write, copy, multiply-add, empty launch.

Tensors are flat float32 of a multiple of `BLOCK` elements; program p of n takes the blocks p, p + n, p + 2n, …
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triton_impl.runtime.aot import entry

#: 2048 elements over 4 warps are four 16-byte loads per thread, all in flight at the same time.
BLOCK = 2048
#: Resident programs per multiprocessor: 8 of 128 threads keep 8 MB of loads in flight on a large GPU.
PROGRAMS = 8
#: Elements per program: eight per thread.
CHAIN_BLOCK = 1024
#: Multiply-adds per thread and loop iteration: enough to make the loop's own instructions negligible.
UNROLLED = 32


@triton.jit
def _read_kernel(out_ptr, x_ptr, blocks, passes, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for turn in range(passes):
        # Each pass reads other blocks and bypasses the L1, so that repeated reads come from the L2.
        for block in range((program + turn) % programs, blocks, programs):
            total += tl.load(x_ptr + block * BLOCK + lanes, cache_modifier=".cg")
    tl.store(out_ptr + program, tl.sum(total, 0))


@triton.jit
def _write_kernel(y_ptr, blocks, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    ones = tl.full((BLOCK,), 1.0, tl.float32)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        tl.store(y_ptr + block * BLOCK + lanes, ones)


@triton.jit
def _copy_kernel(y_ptr, x_ptr, blocks, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        tl.store(y_ptr + block * BLOCK + lanes, tl.load(x_ptr + block * BLOCK + lanes))


@triton.jit
def _multiply_add_kernel(out_ptr, turns, BLOCK: tl.constexpr, UNROLLED: tl.constexpr):
    # Eight independent chains per thread and 1024 threads per multiprocessor hide the latency. Values stay finite.
    x = tl.arange(0, BLOCK).to(out_ptr.dtype.element_ty)
    half = tl.full((BLOCK,), 0.5, out_ptr.dtype.element_ty)
    for _turn in range(turns):
        for _step in tl.static_range(UNROLLED):
            x = tl.fma(x, half, half)
    tl.store(out_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), x)


@triton.jit
def _empty_kernel(unused):
    pass


def _grid(x: torch.Tensor) -> tuple[int]:
    return (min(x.numel() // BLOCK, PROGRAMS * torch.cuda.get_device_properties(x.device).multi_processor_count),)


def read(x: torch.Tensor, passes: int = 1) -> torch.Tensor:
    """Sum the blocks of `x`, `passes` times: one value per program. Shape of `x`: (count,)."""
    (programs,) = _grid(x)
    out = x.new_empty(programs)
    _read_kernel[(programs,)](out, x, x.numel() // BLOCK, passes, BLOCK)
    return out


def write(y: torch.Tensor) -> torch.Tensor:
    """Fill `y` with ones. Shape: (count,)."""
    _write_kernel[_grid(y)](y, y.numel() // BLOCK, BLOCK)
    return y


def copy(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Copy `x` to `y`. Shapes: (count,)."""
    _copy_kernel[_grid(y)](y, x, y.numel() // BLOCK, BLOCK)
    return y


def chain_length(device: torch.device) -> int:
    """How many elements fill a device's multiprocessors in :func:`multiply_add`."""
    return PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count * CHAIN_BLOCK


def multiply_add(out: torch.Tensor, turns: int) -> torch.Tensor:
    """``x = x / 2 + 1/2``, `UNROLLED` · `turns` times for each element of `out`, in registers.

    Shape of `out`: (count,), a multiple of `CHAIN_BLOCK`; float32 or float64.
    """
    _multiply_add_kernel[(out.numel() // CHAIN_BLOCK,)](out, turns, CHAIN_BLOCK, UNROLLED)
    return out


def empty() -> None:
    """Launch one program that does nothing."""
    _empty_kernel[(1,)](0)


AOT = [
    entry(_read_kernel, "fp32", {"BLOCK": BLOCK}),
    entry(_write_kernel, "fp32", {"BLOCK": BLOCK}),
    entry(_copy_kernel, "fp32", {"BLOCK": BLOCK}),
    entry(_multiply_add_kernel, "fp32", {"BLOCK": CHAIN_BLOCK, "UNROLLED": UNROLLED}),
    entry(_multiply_add_kernel, "fp64", {"BLOCK": CHAIN_BLOCK, "UNROLLED": UNROLLED}),
]
