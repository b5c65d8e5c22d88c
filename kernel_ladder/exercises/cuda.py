"""What a CUDA exercise's file calls: a kernel from its source, run on the GPU, or emulated where there is none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kernel_ladder.exercises import emulator

Sizes = int | Sequence[int]


class CudaKernel:
    """A kernel in CUDA C++.

    Args:
        source: the source, with the kernel as ``extern "C" __global__ void name(…)``.
        name: the kernel's name.
    """

    def __init__(self, source: str, name: str) -> None:
        self._source, self._name = source, name
        self._on_gpu: Any = None
        self._on_cpu: Any = None

    def __call__(self, grid: Sizes, block: Sizes, *args: torch.Tensor | int | float) -> None:
        """Launch it: `grid` blocks of `block` threads, each an int or up to three of them.

        Tensors are passed as pointers to their first element, int as int and float as double.

        Raises:
            ValueError: a size that no GPU takes.
            emulator.CompileError, emulator.Deadlock: without a GPU.
        """
        blocks, threads = _three("grid", grid), _three("block", block)
        if threads[0] * threads[1] * threads[2] > emulator.MOST_THREADS:
            raise ValueError(f"argument `block` must be at most {emulator.MOST_THREADS} threads, got {tuple(threads)}")
        if any(isinstance(x, torch.Tensor) and x.is_cuda for x in args):
            if self._on_gpu is None:
                self._on_gpu = torch.cuda._compile_kernel(self._source, self._name)
            self._on_gpu(grid=tuple(blocks), block=tuple(threads), args=list(args))
            return
        if self._on_cpu is None:
            self._on_cpu = emulator.build(self._source, self._name)
        emulator.launch(self._on_cpu, blocks, threads, args)


def _three(what: str, sizes: Sizes) -> list[int]:
    found = [sizes] if isinstance(sizes, int) else [*sizes]
    if not 1 <= len(found) <= 3 or any(size < 1 for size in found):
        raise ValueError(f"argument `{what}` must be one to three positive ints, got {sizes}")
    return [*found, 1, 1][:3]
