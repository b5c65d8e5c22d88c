"""CUDA kernels on a CPU: a C++ compiler builds the kernel's own source, and its threads run as coroutines.

The blocks of a grid run one after the other. The threads of a block run in turn, each until it waits at a barrier. So a
missing barrier shows in every run. Asynchronous copies arrive at once in one launch, and in the next as late as
possible: only when every thread waits. So a stage that is read too early, or freed too early, shows in one of them.
Float arithmetic is the CPU's. Speed, races between blocks, and how loads meet memory are not modelled: they need a GPU.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

#: Threads of a block at most, as on a GPU.
MOST_THREADS = 1024

BEFORE = """
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <ucontext.h>
#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
struct dim3 { unsigned x, y, z; };
static dim3 gridDim, blockDim, blockIdx, threadIdx;
struct alignas(16) float4 { float x, y, z, w; };
template <typename A> A min(A a, A b) { return b < a ? b : a; }
template <typename A> A max(A a, A b) { return a < b ? b : a; }
template <typename A> A atomicAdd(A* at, A more) { A before = *at; *at = before + more; return before; }
#define printf(...) fprintf(stderr, __VA_ARGS__)
namespace emulator {
enum { READY, AT_BLOCK_BARRIER, AT_WARP_BARRIER, DONE };
static bool late, progress, crooked;
constexpr int MOST = 1024, STACK = 65536;
static ucontext_t host, contexts[MOST];
alignas(16) static char stacks[MOST][STACK];
static int states[MOST], current, turns[MOST];
static float shuffled[2][MOST];
static void wait(int kind) { states[current] = kind; swapcontext(&contexts[current], &host); }
static float from_lane(float value, int lane) {
    const int me = current, turn = turns[me]++ % 2;
    shuffled[turn][me] = value;
    wait(AT_WARP_BARRIER);
    return shuffled[turn][lane < 0 || lane > 31 ? me : me / 32 * 32 + lane];
}
}  // namespace emulator
static void __syncthreads() { emulator::wait(emulator::AT_BLOCK_BARRIER); }
static void __syncwarp(unsigned = 0xffffffffu) { emulator::wait(emulator::AT_WARP_BARRIER); }
static float __shfl_down_sync(unsigned, float v, int d) { return emulator::from_lane(v, emulator::current % 32 + d); }
static float __shfl_xor_sync(unsigned, float v, int m) { return emulator::from_lane(v, emulator::current % 32 ^ m); }
static float __shfl_sync(unsigned, float v, int lane) { return emulator::from_lane(v, lane); }
#define __expf expf
struct Barrier { int count, arrivals; long long bytes; int phase; };
namespace emulator {
struct Copy { void* to; const void* from; int bytes; Barrier* barrier; };
static Copy copies[4096];
static int waiting_copies;
static void told(Barrier* b) {
    progress = true;
    if (b->arrivals > 0 || b->bytes != 0) return;
    b->phase ^= 1;
    b->arrivals = b->count;
}
static bool deliver() {
    const int number = waiting_copies;
    for (int i = 0; i < number; ++i) {
        memcpy(copies[i].to, copies[i].from, copies[i].bytes);
        copies[i].barrier->bytes -= copies[i].bytes;
        told(copies[i].barrier);
    }
    waiting_copies = 0;
    return number > 0;
}
}  // namespace emulator
static void barrier_init(Barrier* b, int arrivals) { *b = {arrivals, arrivals, 0, 0}; }
static void barrier_arrive(Barrier* b) {
    --b->arrivals;
    emulator::told(b);
    emulator::wait(emulator::READY);
}
static void barrier_expect(Barrier* b, int bytes) {
    b->bytes += bytes;
    --b->arrivals;
    emulator::told(b);
}
static void barrier_wait(Barrier* b, int parity) {
    while (b->phase == (parity & 1)) emulator::wait(emulator::READY);
    emulator::progress = true;
}
static void copy_async(void* to, const void* from, int bytes, Barrier* b) {
    if (((uintptr_t)to | (uintptr_t)from | bytes) % 16) emulator::crooked = true;
    if (emulator::waiting_copies == 4096) emulator::deliver();
    emulator::copies[emulator::waiting_copies++] = {to, from, bytes, b};
    emulator::progress = true;
    if (!emulator::late) emulator::deliver();
}
#line 1 "kernel"
"""

AFTER = """
namespace emulator {
template <int... I> struct Indices {};
template <int N, int... I> struct Count : Count<N - 1, N - 1, I...> {};
template <int... I> struct Count<0, I...> { using type = Indices<I...>; };
template <typename... A, int... I> void call(void (*kernel)(A...), void** values, Indices<I...>) {
    kernel(*static_cast<A*>(values[I])...);
}
template <typename... A> void call(void (*kernel)(A...), void** values) {
    call(kernel, values, typename Count<sizeof...(A)>::type());
}
static void** values;
static void thread() { call(KERNEL, values); states[current] = DONE; progress = true; }
/// Those of `count` threads from `first` on that are not done go on if all of them wait at the same barrier.
static bool release(int first, int count, int barrier) {
    bool any = false;
    for (int i = first; i < first + count; ++i) {
        if (states[i] != barrier && states[i] != DONE) return false;
        any |= states[i] == barrier;
    }
    for (int i = first; i < first + count; ++i) {
        if (states[i] == barrier) states[i] = READY;
    }
    return any;
}
static bool run_block(int threads) {
    for (int i = 0; i < threads; ++i) {
        getcontext(&contexts[i]);
        contexts[i].uc_stack.ss_sp = stacks[i];
        contexts[i].uc_stack.ss_size = STACK;
        contexts[i].uc_link = &host;
        makecontext(&contexts[i], thread, 0);
        states[i] = READY;
        turns[i] = 0;
    }
    for (;;) {
        progress = false;
        for (int i = 0; i < threads; ++i) {
            if (states[i] != READY) continue;
            current = i;
            threadIdx = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
            swapcontext(&host, &contexts[i]);
        }
        bool going = progress | release(0, threads, AT_BLOCK_BARRIER), done = true;
        for (int w = 0; w < threads; w += 32) {
            going |= release(w, threads - w < 32 ? threads - w : 32, AT_WARP_BARRIER);
        }
        for (int i = 0; i < threads; ++i) done &= states[i] == DONE;
        if (done) return true;
        if (!going && !deliver()) return false;
    }
}
}  // namespace emulator
extern "C" int emulate(const unsigned* grid, const unsigned* block, void** values) {
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block[0], block[1], block[2]};
    emulator::values = values;
    emulator::late = !emulator::late;
    emulator::waiting_copies = 0;
    emulator::crooked = false;
    for (unsigned z = 0; z < grid[2]; ++z)
        for (unsigned y = 0; y < grid[1]; ++y)
            for (unsigned x = 0; x < grid[0]; ++x) {
                blockIdx = {x, y, z};
                if (!emulator::run_block(block[0] * block[1] * block[2])) return 1;
            }
    return emulator::crooked ? 2 : 0;
}
"""


class CompileError(RuntimeError):
    """A kernel's source that the compiler refuses; the message is the compiler's first error."""


class Deadlock(RuntimeError):
    """Threads that wait for ever: at a barrier that others of their block never reach, or for bytes that never come."""


def build(source: str, name: str) -> Any:
    """The kernel `name` of a CUDA source, built for this CPU.

    Raises:
        CompileError: the source is wrong, or there is no C++ compiler.
    """
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        raise CompileError("without a GPU a C++ compiler builds the kernel; there is none: install g++, or set CXX")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "kernel.so"
        options = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(library)]
        command = [*compiler.split(), *options]
        text = BEFORE + source + AFTER.replace("KERNEL", name)
        try:
            found = subprocess.run(command, input=text, capture_output=True, text=True)
        except OSError as error:
            raise CompileError(f"the C++ compiler {compiler} cannot be run: {error.strerror}") from error
        if found.returncode:
            errors = [line for line in found.stderr.splitlines() if "error" in line]
            raise CompileError(errors[0] if errors else found.stderr.strip())
        return ctypes.CDLL(str(library)).emulate


def launch(built: Any, grid: Sequence[int], block: Sequence[int], args: Sequence[torch.Tensor | int | float]) -> None:
    """Run a built kernel to its end. Tensors are passed as pointers, int as int, float as double.

    Raises:
        Deadlock: some threads of a block wait at a barrier that others do not reach.
        ValueError: a copy's address or size is not a multiple of 16 bytes.
    """
    values = [_value(argument) for argument in args]
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    ended = built((ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(*block), pointers)
    if ended == 2:
        raise ValueError("copy_async takes addresses and numbers of bytes that 16 divides")
    if ended:
        raise Deadlock(
            "some threads of a block wait at a barrier that others never reach: is one behind a condition? "
            "Or a Barrier waits for arrivals or bytes that never come"
        )


def _value(argument: torch.Tensor | int | float) -> Any:
    if isinstance(argument, torch.Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    return ctypes.c_int(argument) if isinstance(argument, int) else ctypes.c_double(argument)
