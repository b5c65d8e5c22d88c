"""Solution of the exercise `cuda_row_sum`."""

import torch

from kernel_ladder.exercises import not_plain
from kernel_ladder.exercises.cuda import CudaKernel
from kernel_ladder.table import register

EXERCISE = "cuda_row_sum"
THREADS = 256

SOURCE = r"""
// Grid: a block of 256 threads for each row.
extern "C" __global__ void row_sum_kernel(float* output, const float* input, int n_cols) {
    const float* row = input + (long long)blockIdx.x * n_cols;
    // TODO 1: `partial`, the sum of this thread's elements: threadIdx.x, threadIdx.x + blockDim.x, …
    // gap
    double partial = 0.0;
    for (int i = threadIdx.x; i < n_cols; i += blockDim.x) partial += row[i];
    // end

    // TODO 2: leave each thread's sum in shared memory, and wait until all have.
    // gap
    __shared__ double sums[256];
    sums[threadIdx.x] = partial;
    __syncthreads();
    // end

    // TODO 3: halve the number of sums until one is left: 128 threads add, then 64, … All threads reach every barrier.
    // gap
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
        __syncthreads();
    }
    // end

    // TODO 4: one thread writes the sum of the row.
    // gap
    if (threadIdx.x == 0) output[blockIdx.x] = (float)sums[0];
    // end
}
"""

row_sum_kernel = CudaKernel(SOURCE, "row_sum_kernel")


def row_sum(input, *, dim, keepdim):
    output = input.new_empty(*input.shape[:-1], *([1] if keepdim else []))
    row_sum_kernel(input.shape[0], THREADS, output, input, input.shape[1])
    return output, ()


def unsupported(input, *, dim, keepdim):
    if input.dim() != 2 or dim not in (-1, 1) or input.dtype != torch.float32:
        return "takes a float32 matrix, summed along its rows"
    return not_plain(input)


register("sum", "cuda.my_row_sum", forward=row_sum, unsupported=unsupported)
