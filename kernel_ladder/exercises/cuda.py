"""What a CUDA exercise's file calls: a kernel from its source, run on the GPU, or emulated where there is none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kernel_ladder.exercises import emulator

Sizes = int | Sequence[int]

#: Barriers and copies of a pipeline, for a GPU of compute capability 9.0 or later. The emulator has its own.
#: PTX ISA, "mbarrier" and "cp.async.bulk".
PIPELINE = r"""
struct Barrier { unsigned long long state; };
__device__ inline unsigned in_shared(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ inline void barrier_init(Barrier* b, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(in_shared(b)), "r"(arrivals) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ inline void barrier_arrive(Barrier* b) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(in_shared(b)) : "memory");
}
__device__ inline void barrier_expect(Barrier* b, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(in_shared(b)), "r"(bytes) : "memory");
}
__device__ inline void barrier_wait(Barrier* b, int parity) {
    int done = 0;
    while (!done) {
        asm volatile(
            "{\n.reg .pred done;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\nselp.u32 %0, 1, 0, done;\n}"
            : "=r"(done) : "r"(in_shared(b)), "r"(parity & 1) : "memory");
    }
}
__device__ inline void copy_async(void* to, const void* from, int bytes, Barrier* b) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        ::"r"(in_shared(to)), "l"(from), "r"(bytes), "r"(in_shared(b)) : "memory");
}
#line 1 "kernel"
"""


class CudaKernel:
    """A kernel in CUDA C++.

    Args:
        source: the source, with the kernel as ``extern "C" __global__ void name(…)``. A source that names ``Barrier``
            may call the functions of `PIPELINE`.
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
                before = PIPELINE if "Barrier" in self._source else ""
                self._on_gpu = torch.cuda._compile_kernel(before + self._source, self._name)
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
