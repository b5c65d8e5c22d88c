"""Solution of the exercise `cuda_matmul`."""

import torch

from kernel_ladder.exercises import not_plain
from kernel_ladder.exercises.cuda import CudaKernel
from kernel_ladder.table import register

EXERCISE = "cuda_matmul"
TILE = 16

SOURCE = r"""
#define TILE 16

// Grid: a block of TILE × TILE threads for each tile of C. A is M × K, B is K × N, C is M × N, row by row.
extern "C" __global__ void matmul_kernel(float* c, const float* a, const float* b, int M, int N, int K) {
    __shared__ float a_tile[TILE][TILE], b_tile[TILE][TILE];
    // TODO 1: `row` and `column`, the place in C of this thread. Neighbouring threads (x) take neighbouring columns.
    // gap
    const int row = blockIdx.y * TILE + threadIdx.y, column = blockIdx.x * TILE + threadIdx.x;
    // end
    float sum = 0.0f;
    for (int k0 = 0; k0 < K; k0 += TILE) {
        // TODO 2: each thread copies one element of A's tile and one of B's; 0 stands for what lies outside. Then wait.
        // gap
        const int k_of_a = k0 + threadIdx.x, k_of_b = k0 + threadIdx.y;
        a_tile[threadIdx.y][threadIdx.x] = row < M && k_of_a < K ? a[(long long)row * K + k_of_a] : 0.0f;
        b_tile[threadIdx.y][threadIdx.x] = k_of_b < K && column < N ? b[(long long)k_of_b * N + column] : 0.0f;
        __syncthreads();
        // end

        // TODO 3: add the TILE products of this thread's row of A's tile and column of B's. Then wait again: why?
        // gap
        for (int k = 0; k < TILE; ++k) sum += a_tile[threadIdx.y][k] * b_tile[k][threadIdx.x];
        __syncthreads();
        // end
    }
    // TODO 4: write `sum`, where this thread's place lies inside of C.
    // gap
    if (row < M && column < N) c[(long long)row * N + column] = sum;
    // end
}
"""

matmul_kernel = CudaKernel(SOURCE, "matmul_kernel")


def matmul(input, other):
    (m, k), n = input.shape, other.shape[1]
    output = input.new_empty(m, n)
    matmul_kernel((-(-n // TILE), -(-m // TILE)), (TILE, TILE), output, input, other, m, n, k)
    return output, ()


def unsupported(input, other):
    if input.dim() != 2 or other.dim() != 2 or input.dtype != torch.float32:
        return "takes two matrices in float32"
    return not_plain(input, other)


register("matmul", "cuda.my_matmul", forward=matmul, unsupported=unsupported)
