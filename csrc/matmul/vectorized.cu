// matmul, rung 5 of 16: vectorized
// Idea      Every load moves 16 bytes. A is transposed on its way into shared memory, so that the 8 values a thread
//           needs of one k are neighbours.
// Predicts  Load instructions per thread and tile of K: global 8 -> 2; shared BK · (TM + TN) = 128 -> BK · (TM + TN) /
//           4 = 32. 4x fewer of both, for 512 multiply-adds.
// Limit now Latency: all threads wait for the next tile's loads, and multiply nothing meanwhile.
// Next      `double_buffered`: load the next tile during the multiply-adds.
//
// Plain case: float32, row-major operands without gaps, M and N multiples of 128, K a multiple of 8.

#include "matmul/plain_case.cuh"

namespace kl {
namespace {

namespace vectorized {
constexpr int BM = 128, BN = 128, BK = 8;             // of a block
constexpr int TM = 8, TN = 8;                         // outputs of a thread
constexpr int BLOCK_THREADS = (BM / TM) * (BN / TN);  // 256
constexpr int V = 4;                                  // floats per load
static_assert(BM * BK == BLOCK_THREADS * V && BK * BN == BLOCK_THREADS * V, "one load per thread, tile and operand");
}  // namespace vectorized

// Grid: one block per 128x128 outputs, row by row.
__global__ void __launch_bounds__(vectorized::BLOCK_THREADS, 2)
    matmul_vectorized_kernel(float* c, const float* a, const float* b, int N, int K) {
    using namespace vectorized;
    __shared__ __align__(16) float a_tile[BK][BM];  // transposed
    __shared__ __align__(16) float b_tile[BK][BN];
    const int thread = threadIdx.x, tiles_n = N / BN;
    const int64_t m0 = int64_t{blockIdx.x / tiles_n} * BM, n0 = int64_t{blockIdx.x % tiles_n} * BN;
    const int m_thread = thread / (BN / TN) * TM, n_thread = thread % (BN / TN) * TN;
    const int a_row = thread / (BK / V), a_k = thread % (BK / V) * V;  // what this thread loads of a tile
    const int b_k = thread / (BN / V), b_column = thread % (BN / V) * V;
    a += (m0 + a_row) * K + a_k;
    b += int64_t{b_k} * N + n0 + b_column;

    float sum[TM][TN] = {};
    for (int k0 = 0; k0 < K; k0 += BK) {
        const float4 a_next = load4(a + k0), b_next = load4(b + int64_t{k0} * N);
        a_tile[a_k][a_row] = a_next.x, a_tile[a_k + 1][a_row] = a_next.y;
        a_tile[a_k + 2][a_row] = a_next.z, a_tile[a_k + 3][a_row] = a_next.w;
        store4(&b_tile[b_k][b_column], b_next);
        __syncthreads();
#pragma unroll
        for (int k = 0; k < BK; ++k) {
            alignas(16) float a_values[TM], b_values[TN];
#pragma unroll
            for (int i = 0; i < TM; i += V) store4(a_values + i, load4(&a_tile[k][m_thread + i]));
#pragma unroll
            for (int j = 0; j < TN; j += V) store4(b_values + j, load4(&b_tile[k][n_thread + j]));
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
        for (int j = 0; j < TN; j += V) {
            const float4 out = make_float4(sum[i][j], sum[i][j + 1], sum[i][j + 2], sum[i][j + 3]);
            store4(c + (m0 + m_thread + i) * N + n0 + n_thread + j, out);
        }
    }
}

}  // namespace

Tensor matmul_vectorized(const Tensor& input, const Tensor& other) {
    using namespace vectorized;
    return run_plain<matmul_vectorized_kernel, BM, BN, BK, BLOCK_THREADS>(input, other, "vectorized");
}

void matmul_vectorized_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    if (dtype != ScalarType::Float) return;
    attributes.push_back(kernel_attributes<matmul_vectorized_kernel>("matmul.vectorized", vectorized::BLOCK_THREADS));
}

}  // namespace kl
