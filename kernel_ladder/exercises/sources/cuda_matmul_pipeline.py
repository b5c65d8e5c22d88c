"""Solution of the exercise `cuda_matmul_pipeline`."""

import torch

from kernel_ladder.exercises import not_plain
from kernel_ladder.exercises.cuda import CudaKernel
from kernel_ladder.table import register

EXERCISE = "cuda_matmul_pipeline"
TILE = 64  # rows and columns of C
DEPTH = 16  # of k, in a stage
THREADS = 32 + 256  # a producer warp, then the consumers

# These are given. A phase of a barrier ends after its arrivals and all the bytes that it expects.
#   barrier_init(barrier, arrivals)               once, by one thread, before __syncthreads()
#   barrier_expect(barrier, bytes)                one arrival, and so many bytes more to wait for
#   barrier_arrive(barrier)                       one arrival
#   barrier_wait(barrier, parity)                 until the phase of that parity has ended; phases count 0, 1, 0, 1, …
#   copy_async(shared, global, bytes, barrier)    returns at once; its bytes are told to the barrier as they arrive

SOURCE = r"""
#define TILE 64
#define DEPTH 16
#define STAGES 3

// Grid: a block for each TILE × TILE tile of C. All sizes are multiples of the tile's: the host pads.
extern "C" __global__ void matmul_kernel(float* c, const float* a, const float* b, int M, int N, int K) {
    __shared__ __align__(128) float a_tile[STAGES][TILE][DEPTH], b_tile[STAGES][DEPTH][TILE];
    __shared__ Barrier full[STAGES], empty[STAGES];
    const int row0 = blockIdx.y * TILE, column0 = blockIdx.x * TILE, steps = K / DEPTH;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            // TODO 1: how many arrivals end a phase of full[s], where one producer thread arrives, and of empty[s],
            // where every one of the 256 consumers does?
            // gap
            barrier_init(&full[s], 1);
            barrier_init(&empty[s], 256);
            // end
        }
    }
    __syncthreads();

    if (threadIdx.x < 32) {  // the producer: one thread of its warp
        for (int step = 0; threadIdx.x == 0 && step < steps; ++step) {
            const int stage = step % STAGES, round = step / STAGES, k0 = step * DEPTH;
            // TODO 2: wait until the stage is empty. In round 0 it is: waiting for parity 1 of a fresh barrier returns.
            // gap
            barrier_wait(&empty[stage], (round & 1) ^ 1);
            // end
            // TODO 3: tell full[stage] how many bytes will come: those of both tiles.
            // gap
            barrier_expect(&full[stage], 2 * TILE * DEPTH * sizeof(float));
            // end
            // TODO 4: copy A's tile and B's, row by row. A row of A's tile has DEPTH elements, one of B's has TILE.
            // gap
            for (int i = 0; i < TILE; ++i) {
                const float* from = a + (long long)(row0 + i) * K + k0;
                copy_async(a_tile[stage][i], from, DEPTH * sizeof(float), &full[stage]);
            }
            for (int i = 0; i < DEPTH; ++i) {
                const float* from = b + (long long)(k0 + i) * N + column0;
                copy_async(b_tile[stage][i], from, TILE * sizeof(float), &full[stage]);
            }
            // end
        }
        return;
    }

    // The consumers: 16 × 16 threads, each with 4 × 4 elements of C.
    const int x = threadIdx.x % 16, y = (threadIdx.x - 32) / 16;
    float sums[4][4] = {};
    for (int step = 0; step < steps; ++step) {
        const int stage = step % STAGES, round = step / STAGES;
        // TODO 5: wait until the stage is full. Which phase of full[stage] is that in this round?
        // gap
        barrier_wait(&full[stage], round & 1);
        // end
        for (int k = 0; k < DEPTH; ++k) {
            for (int i = 0; i < 4; ++i) {
                for (int j = 0; j < 4; ++j) sums[i][j] += a_tile[stage][y + 16 * i][k] * b_tile[stage][k][x + 16 * j];
            }
        }
        // TODO 6: this thread has read the stage: say so.
        // gap
        barrier_arrive(&empty[stage]);
        // end
    }
    for (int i = 0; i < 4; ++i) {
        for (int j = 0; j < 4; ++j) c[(long long)(row0 + y + 16 * i) * N + column0 + x + 16 * j] = sums[i][j];
    }
}
"""

matmul_kernel = CudaKernel(SOURCE, "matmul_kernel")


def padded(x, rows, columns):
    """The matrix with zeros to multiples of `rows` and `columns`, from an address that 16 divides."""
    m, n = -(-x.shape[0] // rows) * rows, -(-x.shape[1] // columns) * columns
    if x.shape == (m, n) and x.data_ptr() % 16 == 0:
        return x
    whole = x.new_zeros(m, n)
    whole[: x.shape[0], : x.shape[1]] = x
    return whole


def matmul(input, other):
    a, b = padded(input, TILE, DEPTH), padded(other, DEPTH, TILE)
    (m, k), n = a.shape, b.shape[1]
    output = a.new_empty(m, n)
    matmul_kernel((n // TILE, m // TILE), THREADS, output, a, b, m, n, k)
    return output[: input.shape[0], : other.shape[1]].contiguous(), ()


def unsupported(input, other):
    if input.dim() != 2 or other.dim() != 2 or input.dtype != torch.float32:
        return "takes two matrices in float32"
    return not_plain(input, other)


register("matmul", "cuda.my_matmul_pipeline", forward=matmul, unsupported=unsupported)
