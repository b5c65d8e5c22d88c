"""Exercises in CUDA C++: gelu, row_sum, matmul. In float32, so that a kernel needs no header."""

from __future__ import annotations

from typing import Any

import torch

from kernel_ladder.exercises import elementwise, matrices
from kernel_ladder.exercises.exercise import Exercise, Mistake
from kernel_ladder.exercises.rows import EXERCISES as ON_ROWS
from kernel_ladder.spec import Case

_FLOAT32 = (torch.float32,)
THREADS = 256
TILE = 16


def _rows_of_matrix(case: Case) -> bool:
    shape = case.shapes[0]
    return shape is not None and len(shape) == 2 and case.options["dim"] == -1


def _of_first_threads(input: torch.Tensor, *, dim: int, keepdim: bool) -> torch.Tensor:
    return input[:, :THREADS].sum(dim, keepdim)


def _of_first_warp(input: torch.Tensor, *, dim: int, keepdim: bool) -> torch.Tensor:
    return input[:, ::THREADS].sum(dim, keepdim)


def _whole_k_tiles(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    k = input.shape[1] // TILE * TILE
    return input[:, :k] @ other[:k]


def _last_k_tile(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    k = (input.shape[1] - 1) // TILE * TILE
    return input[:, k:] @ other[k:]


def _mistakes_of(exercises: Any, name: str) -> tuple[Mistake, ...]:
    return tuple(next(each for each in exercises if each.name == name).mistakes)


EXERCISES = (
    Exercise(
        "cuda_gelu",
        op="gelu",
        rung="cuda.naive",
        difficulty="easy",
        teaches="threads and blocks: the index, the guard, the grid",
        formula="gelu(x) = 0.5 · x · (1 + tanh(√(2/π) · (x + 0.044715 · x³)))",
        hints=(
            "A thread has its number in its block, threadIdx.x, and its block's number in the grid, blockIdx.x. A "
            "block has blockDim.x threads.",
            "int i = blockIdx.x * blockDim.x + threadIdx.x; a surplus thread of the last block leaves: if (i >= numel) "
            "return;",
            "float u = 0.7978845608f * (x + 0.044715f * x * x * x); output[i] = 0.5f * x * (1.0f + tanhf(u));",
            "blocks is numel / THREADS, rounded up: -(-numel // THREADS).",
        ),
        asks=lambda case: case.options["approximate"] == "tanh",
        timed="16384x4096 tanh",
        mistakes=_mistakes_of(elementwise.EXERCISES, "gelu"),
        dtypes=_FLOAT32,
    ),
    Exercise(
        "cuda_row_sum",
        op="sum",
        rung="cuda.block",
        difficulty="medium",
        teaches="shared memory and barriers: the threads of a block reduce a row",
        formula="output[r] = Σ_c input[r, c]",
        hints=(
            "Threads that read neighbouring addresses share sectors: thread t reads t, t + blockDim.x, and so on.",
            "__shared__ double sums[256]; sums[threadIdx.x] = partial; __syncthreads(); then all sums are visible.",
            "In each round the first `half` threads add what stands `half` places further on. A barrier follows each "
            "round, outside of the condition, or some threads wait for ever.",
            "if (threadIdx.x == 0) output[blockIdx.x] = sums[0];",
        ),
        asks=_rows_of_matrix,
        timed="16384x4096 dim=-1",
        mistakes=(
            Mistake(
                "Only the first 256 elements of a row are added: a thread must go on in steps of blockDim.x.",
                _of_first_threads,
            ),
            Mistake("Only the sum of thread 0 is written: the threads' sums are not added.", _of_first_warp),
            *_mistakes_of(ON_ROWS, "row_sum"),
        ),
        dtypes=_FLOAT32,
    ),
    Exercise(
        "cuda_matmul",
        op="matmul",
        rung="cuda.tiled",
        difficulty="hard",
        teaches="tiles in shared memory: each element that is loaded serves 16 threads",
        formula="C[m, n] = Σ_k A[m, k] · B[k, n]",
        hints=(
            "row = blockIdx.y * TILE + threadIdx.y and column = blockIdx.x * TILE + threadIdx.x: neighbouring threads "
            "then read and write neighbouring addresses.",
            "Thread (x, y) copies A[row, k0 + x] to a_tile[y][x] and B[k0 + y, column] to b_tile[y][x]; outside of the "
            "matrices 0, which adds nothing. Then __syncthreads().",
            "sum += a_tile[threadIdx.y][k] * b_tile[k][threadIdx.x] for k below TILE. The second barrier keeps a fast "
            "thread from overwriting a tile that others still read.",
            "if (row < M && column < N) c[row * N + column] = sum; no thread may leave earlier, or the barriers break.",
        ),
        asks=matrices._matrices,
        timed="4096x4096x4096",
        mistakes=(
            Mistake("The last tile of K is cut off: the loop must go past the last whole tile.", _whole_k_tiles),
            Mistake("Only the last tile of K is in the result: add to the sum, do not assign.", _last_k_tile),
        ),
        dtypes=_FLOAT32,
    ),
)
