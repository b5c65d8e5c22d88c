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


def _whole_vectors(input: torch.Tensor, *, approximate: str) -> torch.Tensor:
    """gelu of the first element of each vector alone, in all four places."""
    flat = input.reshape(-1)
    first = flat[torch.arange(flat.numel(), device=input.device) // 4 * 4]
    return torch.nn.functional.gelu(first, approximate=approximate).view(input.shape)


def _freed_early(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Each step computes with the tiles that its stage holds next: the producer has overwritten its own."""
    depth, stages = 16, 3
    a, b = input.split(depth, dim=1), other.split(depth)
    later = [step + stages if step + stages < len(a) else step for step in range(len(a))]
    return sum((a[step] @ b[step] for step in later), input.new_zeros(input.shape[0], other.shape[1]))


def _nothing(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return input.new_zeros(input.shape[0], other.shape[1])


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
        "cuda_gelu_vectorized",
        op="gelu",
        rung="cuda.vectorized",
        difficulty="medium",
        teaches="16-byte loads: four times the bytes in flight from as many threads, and the tail that no vector fills",
        formula="gelu(x) = 0.5 · x · (1 + tanh(√(2/π) · (x + 0.044715 · x³)))",
        hints=(
            "A thread that loads 16 bytes in place of 4 has four times as many on their way while it waits for memory.",
            "int i = (blockIdx.x * blockDim.x + threadIdx.x) * VECTOR; a vector is whole where i + VECTOR <= numel.",
            "float4 v = *(const float4*)(input + i) is one load; *(float4*)(output + i) = v is one store.",
            "The tail: for (int j = i; j < numel; ++j) output[j] = gelu(input[j]). Past the end the loop has no turns.",
            "A block takes THREADS * VECTOR elements: blocks is numel / (THREADS * VECTOR), rounded up.",
        ),
        asks=lambda case: case.options["approximate"] == "tanh",
        timed="16384x4096 tanh",
        mistakes=(
            Mistake("All four elements are the gelu of v.x: use v.y, v.z and v.w too.", _whole_vectors),
            *_mistakes_of(elementwise.EXERCISES, "gelu"),
        ),
        slow="Right, but slow. Does each thread load and store whole vectors, float4, and do neighbouring threads take "
        "neighbouring vectors? Four loads of 4 bytes, 16 bytes apart from thread to thread, read a sector four times.",
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
    Exercise(
        "cuda_matmul_pipeline",
        op="matmul",
        rung="cuda.warp_specialized",
        difficulty="hard",
        teaches="a pipeline of stages: a producer warp, asynchronous copies, full and empty barriers and their phases",
        formula="""\
C[m, n] = Σ_k A[m, k] · B[k, n]
In step s stage s % STAGES holds DEPTH of k. The producer waits for `empty` and fills it, consumers wait for `full`.""",
        hints=(
            "A phase of full[s] ends when the producer has arrived and all the expected bytes have come: 1 arrival. A "
            "phase of empty[s] ends when all consumers have read the stage: 256.",
            "Round r of a stage uses phase r of full[s], and phases alternate in parity: consumers wait for round & 1.",
            "The producer waits for the phase before: (round & 1) ^ 1. In round 0 that returns at once.",
            "Both tiles have TILE * DEPTH elements of 4 bytes: barrier_expect(&full[stage], 2 * TILE * DEPTH * 4). A "
            "number that is too large is waited for for ever, one that is too small lets a phase end early.",
            "copy_async(a_tile[stage][i], a + (long long)(row0 + i) * K + k0, DEPTH * sizeof(float), &full[stage]), "
            "and of B row k0 + i from column0 on, TILE elements.",
            "barrier_arrive(&empty[stage]) stands after the last read of the stage, or the producer overwrites it.",
        ),
        asks=matrices._matrices,
        timed="4096x4096x4096",
        mistakes=(
            Mistake(
                "A stage is overwritten while consumers still read it: barrier_arrive(&empty[stage]) after the last "
                "read.",
                _freed_early,
            ),
            Mistake("The stages are read before their bytes have come: wait for full[stage].", _nothing),
            Mistake("Only the last tile of K is in the result: add to the sums, do not assign.", _last_k_tile),
        ),
        otherwise="Are the tiles those of this step? Check the bytes that full[stage] expects, the parities of both "
        "waits, and the rows that are copied.",
        capability=(9, 0),
        dtypes=_FLOAT32,
    ),
)
