// matmul, rung 4 of 16: thread_tile
// Idea      Each thread computes TM x TN = 8x8 outputs in registers. A value read from shared memory serves 8
//           multiply-adds.
// Predicts  Shared loads per multiply-add: (TM + TN) / (TM · TN) = 1/4 instead of 2 in `tiled`: 8x fewer. Arithmetic
//           intensity: 2 · BM · BN / (4 · (BM + BN)) = 32 flop per byte of global memory instead of 8: 4x less traffic.
// Limit now Load instructions: each moves 4 bytes, from global memory and from A's tile.
// Next      `vectorized`: 16 bytes per load.
//
// Plain case: float32, row-major operands without gaps, M and N multiples of 128, K a multiple of 8.

#include "matmul/plain_case.cuh"

namespace kl {
namespace {

namespace thread_tile {
constexpr int BM = 128, BN = 128, BK = 8;             // of a block
constexpr int TM = 8, TN = 8;                         // outputs of a thread
constexpr int BLOCK_THREADS = (BM / TM) * (BN / TN);  // 256
constexpr int A_LOADS = BM * BK / BLOCK_THREADS;      // per thread and tile
constexpr int B_LOADS = BK * BN / BLOCK_THREADS;
}  // namespace thread_tile

// Grid: one block per 128x128 outputs, row by row.
__global__ void __launch_bounds__(thread_tile::BLOCK_THREADS, 2)
    matmul_thread_tile_kernel(float* c, const float* a, const float* b, int N, int K) {
    using namespace thread_tile;
    __shared__ float a_tile[BM][BK];
    __shared__ float b_tile[BK][BN];
    const int thread = threadIdx.x, tiles_n = N / BN;
    const int64_t m0 = int64_t{blockIdx.x / tiles_n} * BM, n0 = int64_t{blockIdx.x % tiles_n} * BN;
    const int m_thread = thread / (BN / TN) * TM, n_thread = thread % (BN / TN) * TN;
    a += m0 * K;
    b += n0;

    float sum[TM][TN] = {};
    for (int k0 = 0; k0 < K; k0 += BK) {
#pragma unroll
        for (int i = 0; i < A_LOADS; ++i) {
            const int row = (thread + i * BLOCK_THREADS) / BK, k = thread % BK;
            a_tile[row][k] = a[int64_t{row} * K + k0 + k];
        }
#pragma unroll
        for (int i = 0; i < B_LOADS; ++i) {
            const int k = (thread + i * BLOCK_THREADS) / BN, column = thread % BN;
            b_tile[k][column] = b[int64_t{k0 + k} * N + column];
        }
        __syncthreads();
#pragma unroll 2  // more would not fit the registers
        for (int k = 0; k < BK; ++k) {
            float a_values[TM], b_values[TN];
#pragma unroll
            for (int i = 0; i < TM; ++i) a_values[i] = a_tile[m_thread + i][k];
#pragma unroll
            for (int j = 0; j < TN; ++j) b_values[j] = b_tile[k][n_thread + j];
#pragma unroll
            for (int i = 0; i < TM; ++i) {
#pragma unroll
                for (int j = 0; j < TN; ++j) sum[i][j] += a_values[i] * b_values[j];
            }
        }
        __syncthreads();  // before the next tile overwrites this one
    }
#pragma unroll
    for (int i = 0; i < TM; ++i) {
#pragma unroll
        for (int j = 0; j < TN; ++j) c[(m0 + m_thread + i) * N + n0 + n_thread + j] = sum[i][j];
    }
}

}  // namespace

Tensor matmul_thread_tile(const Tensor& input, const Tensor& other) {
    using namespace thread_tile;
    return run_plain<matmul_thread_tile_kernel, BM, BN, BK, BLOCK_THREADS>(input, other, "thread_tile");
}

void matmul_thread_tile_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    if (dtype != ScalarType::Float) return;
    attributes.push_back(
        kernel_attributes<matmul_thread_tile_kernel>("matmul.thread_tile", thread_tile::BLOCK_THREADS));
}

}  // namespace kl
