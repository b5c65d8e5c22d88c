// matmul, rung 6 of 16: double_buffered
// Idea      Shared memory holds two stages. While the threads multiply one, the next tile is on its way into registers,
//           and then into the other stage.
// Predicts  Time per tile: max(load, multiply) instead of load + multiply: up to 2x where both are equal. One barrier
//           per tile instead of two.
// Limit now 64 outputs per thread need 4 shared loads of 16 bytes per k, for 64 multiply-adds. A tile of 8 k hides
//           little latency.
// Next      `registers`: 8x16 outputs per thread, tiles of 32 k, three stages filled by cp.async, any layout.
//
// Plain case: float32, row-major operands without gaps, M and N multiples of 128, K a multiple of 8.

#include "matmul/plain_case.cuh"

namespace kl {
namespace {

namespace double_buffered {
constexpr int BM = 128, BN = 128, BK = 8;             // of a block
constexpr int TM = 8, TN = 8;                         // outputs of a thread
constexpr int BLOCK_THREADS = (BM / TM) * (BN / TN);  // 256
constexpr int V = 4;                                  // floats per load
static_assert(BM * BK == BLOCK_THREADS * V && BK * BN == BLOCK_THREADS * V, "one load per thread, tile and operand");
}  // namespace double_buffered

// Grid: one block per 128x128 outputs, row by row.
__global__ void __launch_bounds__(double_buffered::BLOCK_THREADS, 2)
    matmul_double_buffered_kernel(float* c, const float* a, const float* b, int N, int K) {
    using namespace double_buffered;
    __shared__ __align__(16) float a_tile[2][BK][BM];  // transposed
    __shared__ __align__(16) float b_tile[2][BK][BN];
    const int thread = threadIdx.x, tiles_n = N / BN;
    const int64_t m0 = int64_t{blockIdx.x / tiles_n} * BM, n0 = int64_t{blockIdx.x % tiles_n} * BN;
    const int m_thread = thread / (BN / TN) * TM, n_thread = thread % (BN / TN) * TN;
    const int a_row = thread / (BK / V), a_k = thread % (BK / V) * V;  // what this thread loads of a tile
    const int b_k = thread / (BN / V), b_column = thread % (BN / V) * V;
    a += (m0 + a_row) * K + a_k;
    b += int64_t{b_k} * N + n0 + b_column;

    const auto store = [&](int stage, const float4& a_next, const float4& b_next) {
        a_tile[stage][a_k][a_row] = a_next.x, a_tile[stage][a_k + 1][a_row] = a_next.y;
        a_tile[stage][a_k + 2][a_row] = a_next.z, a_tile[stage][a_k + 3][a_row] = a_next.w;
        store4(&b_tile[stage][b_k][b_column], b_next);
    };

    float sum[TM][TN] = {};
    int stage = 0;
    if (K > 0) store(stage, load4(a), load4(b));  // prologue: the first tile
    __syncthreads();
    for (int k0 = 0; k0 < K; k0 += BK, stage ^= 1) {
        const bool more = k0 + BK < K;
        float4 a_next{}, b_next{};
        if (more) a_next = load4(a + k0 + BK), b_next = load4(b + int64_t{k0 + BK} * N);
#pragma unroll
        for (int k = 0; k < BK; ++k) {
            alignas(16) float a_values[TM], b_values[TN];
#pragma unroll
            for (int i = 0; i < TM; i += V) store4(a_values + i, load4(&a_tile[stage][k][m_thread + i]));
#pragma unroll
            for (int j = 0; j < TN; j += V) store4(b_values + j, load4(&b_tile[stage][k][n_thread + j]));
#pragma unroll
            for (int i = 0; i < TM; ++i) {
#pragma unroll
                for (int j = 0; j < TN; ++j) sum[i][j] += a_values[i] * b_values[j];
            }
        }
        // All threads passed the last barrier, so none still reads the other stage.
        if (more) store(stage ^ 1, a_next, b_next);
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < TM; ++i) {
#pragma unroll
        for (int j = 0; j < TN; j += V) {
            const float4 out = make_float4(sum[i][j], sum[i][j + 1], sum[i][j + 2], sum[i][j + 3]);
            store4(c + (m0 + m_thread + i) * N + n0 + n_thread + j, out);
        }
    }
}

}  // namespace

Tensor matmul_double_buffered(const Tensor& input, const Tensor& other) {
    using namespace double_buffered;
    return run_plain<matmul_double_buffered_kernel, BM, BN, BK, BLOCK_THREADS>(input, other, "double_buffered");
}

void matmul_double_buffered_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    if (dtype != ScalarType::Float) return;
    attributes.push_back(
        kernel_attributes<matmul_double_buffered_kernel>("matmul.double_buffered", double_buffered::BLOCK_THREADS));
}

}  // namespace kl
