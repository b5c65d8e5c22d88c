// Attention, second step; the table of the climb stands in attention.cuh.
//
//   flash    tiles and an online softmax keep scores on chip; tensor cores
//   mma.sync: Hopper's full rate needs wgmma
//
// FlashAttention-2 (Dao, arXiv:2307.08691). A block has BLOCK queries and walks
// over keys and values, STREAM at a time; cp.async brings the next tiles while
// these are used. Each warp keeps its rows' maximum, sum and output in
// registers and rescales them when the maximum grows (Milakov and Gimelshein,
// arXiv:1805.02867). Nothing is exchanged between warps. Beside the output, the
// logarithm of each row's sum of exponentials goes out, for the backward pass.

#include "tile.cuh"

namespace kl {
namespace {

//                          head dim, queries, keys, warps
using Shape64 = FlashShape<64, 128, 64, 4>;
using Shape128 = FlashShape<128, 128, 64, 4>;
using Shape256 = FlashShape<256, 128, 32, 8>;

template <typename S>
constexpr int SHARED = S::BLOCK_BYTES + 4 * S::STREAM_BYTES;  // Q; K and V twice

template <typename T>
struct Operands {
    View<T> output, query, key, value;
    float* lse;
};

template <typename T, typename S>
__global__ void __launch_bounds__(S::THREADS)
    attention_flash_kernel(const __grid_constant__ Operands<T> p, const __grid_constant__ Attention a) {
#if __CUDA_ARCH__ >= 800
    constexpr int M = S::ROWS / 16, N = S::STREAM / 8, D = S::HEAD_DIM;
    extern __shared__ __align__(128) unsigned char shared_bytes[];
    const uint32_t q_tile = shared_address(shared_bytes);
    const auto k_tile = [&](int n) { return q_tile + S::BLOCK_BYTES + n % 2 * 2 * S::STREAM_BYTES; };
    const auto v_tile = [&](int n) { return k_tile(n) + S::STREAM_BYTES; };

    // A head's tiles run together and share its keys and values in L2; with a
    // causal mask the longest come first.
    const int tiles = (a.S_q + S::BLOCK - 1) / S::BLOCK;
    const int q0 = (tiles - 1 - static_cast<int>(blockIdx.x % tiles)) * S::BLOCK;
    const int64_t head = blockIdx.x / tiles % a.heads, batch = blockIdx.x / tiles / a.heads;
    const T* key = p.key.at(batch, head);
    const T* value = p.value.at(batch, head);
    const int keys = a.causal ? min(a.S_k, q0 + S::BLOCK) : a.S_k;  // no later one is seen
    const int steps = (keys + S::STREAM - 1) / S::STREAM;

    const auto load = [&](int n) {
        const int k0 = n * S::STREAM;
        load_tile<S::STREAM, D, S::THREADS>(k_tile(n), key + k0 * p.key.row, p.key, a.S_k - k0, a.D);
        load_tile<S::STREAM, D, S::THREADS>(v_tile(n), value + k0 * p.value.row, p.value, a.S_k - k0, a.D_v);
        cp_async_commit();
    };
    load_tile<S::BLOCK, D, S::THREADS>(q_tile, p.query.at(batch, head) + q0 * p.query.row, p.query, a.S_q - q0, a.D);
    load(0);

    const int warp_row = threadIdx.x / WARP * S::ROWS;
    const float scale = a.scale * LOG2E;  // exp(x) = 2^(x · log2 e)
    float row_max[M][2], row_sum[M][2];   // the sum: of this lane's columns
    Squares<M, D / 8> output;
    output.clear();
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) row_max[m][h] = -INFINITE, row_sum[m][h] = 0.0f;
    }

    for (int n = 0; n < steps; ++n) {
        cp_async_wait<0>();
        __syncthreads();  // tile n has landed for all, and all have done with tile n
                          // − 1, whose place n + 1 takes
        if (n + 1 < steps) load(n + 1);

        Squares<M, N> scores;
        multiply_rows<T, D>(scores, q_tile, warp_row, k_tile(n));

        // Only the last tile of keys and those on the diagonal hold anything to
        // mask.
        const int k0 = n * S::STREAM;
        if (k0 + S::STREAM > a.S_k || (a.causal && k0 + S::STREAM - 1 > q0 + warp_row)) {
#pragma unroll
            for (int m = 0; m < M; ++m) {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int row = q0 + warp_row + lane_row(m, h);
                    const int left = (a.causal ? min(a.S_k, row + 1) : a.S_k) - k0;
#pragma unroll
                    for (int j = 0; j < N; ++j) {
                        if (lane_column(j) >= left) scores.x[m][j][2 * h] = -INFINITE;
                        if (lane_column(j) + 1 >= left) scores.x[m][j][2 * h + 1] = -INFINITE;
                    }
                }
            }
        }

        // scores becomes exp(scores − row_max).
#pragma unroll
        for (int m = 0; m < M; ++m) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                // fmaxf drops NaN; the exponential of such a score brings it back.
                float new_max = row_max[m][h];
#pragma unroll
                for (int j = 0; j < N; ++j) {
                    new_max = fmaxf(new_max, fmaxf(scores.x[m][j][2 * h], scores.x[m][j][2 * h + 1]));
                }
                new_max = fmaxf(new_max, __shfl_xor_sync(FULL_MASK, new_max, 1));
                new_max = fmaxf(new_max, __shfl_xor_sync(FULL_MASK, new_max, 2));
                // While a row has seen only −inf, nothing is subtracted: its
                // exponentials are 0, not NaN.
                const float shift = new_max == -INFINITE ? 0.0f : new_max * scale;
                const float rescale = exp2_fast(row_max[m][h] * scale - shift);
                row_max[m][h] = new_max;
                float sum = 0.0f;
#pragma unroll
                for (int j = 0; j < N; ++j) {
#pragma unroll
                    for (int e = 2 * h; e < 2 * h + 2; ++e) {
                        scores.x[m][j][e] = exp2_fast(fmaf(scores.x[m][j][e], scale, -shift));
                        sum += scores.x[m][j][e];
                    }
                }
                row_sum[m][h] = row_sum[m][h] * rescale + sum;
#pragma unroll
                for (int j = 0; j < D / 8; ++j) {
                    output.x[m][j][2 * h] *= rescale;
                    output.x[m][j][2 * h + 1] *= rescale;
                }
            }
        }
        multiply_accumulate<T, D>(output, scores, v_tile(n), 0);
    }

    const int rows_left = a.S_q - q0 - warp_row;
    float* lse = p.lse + (batch * a.heads + head) * a.S_q + q0 + warp_row;
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            row_sum[m][h] += __shfl_xor_sync(FULL_MASK, row_sum[m][h], 1);
            row_sum[m][h] += __shfl_xor_sync(FULL_MASK, row_sum[m][h], 2);
            const int row = lane_row(m, h);
            if (threadIdx.x % 4 == 0 && row < rows_left) lse[row] = row_max[m][h] * a.scale + logf(row_sum[m][h]);
        }
    }
    // A row of nothing but −inf sums to 0, and 0 / 0 is the NaN that PyTorch
    // gives.
    store_squares(output, p.output.at(batch, head) + (q0 + warp_row) * p.output.row, p.output.row, rows_left, a.D_v,
                  [&](int m, int h) { return 1.0f / row_sum[m][h]; });
#endif
}

}  // namespace

std::tuple<Tensor, Tensor> attention_flash(const Tensor& query, const Tensor& key, const Tensor& value, bool is_causal,
                                           double scale, bool enable_gqa) {
    const Attention a = prepare_attention(query, key, value, is_causal, scale, enable_gqa);
    const Launch launch(query);
    Tensor output = empty_like_query(query, query.scalar_type(), a.D_v);
    Tensor lse = empty_like_query(query, ScalarType::Float, 0);
    if (lse.numel() == 0) return {output, lse};
    if (a.S_k == 0) {  // a sum over no keys; its logarithm is read by no one
        fill_zero(output, launch.stream);
        fill_zero(lse, launch.stream);
        return {output, lse};
    }
    dispatch_16bit(query.scalar_type(), "attention", [&](auto zero) {
        using T = decltype(zero);
        const Operands<T> operands{make_view<T>(output), make_view<T>(query), make_view<T>(key, a.group()),
                                   make_view<T>(value, a.group()), static_cast<float*>(lse.data_ptr())};
        dispatch_shape<Shape64, Shape128, Shape256>(std::max(a.D, a.D_v), [&](auto shape) {
            using S = decltype(shape);
            const auto kernel = attention_flash_kernel<T, S>;
            allow_shared(kernel, SHARED<S>);
            const auto grid = grid_size(a.batches * a.heads * ceil_div(a.S_q, S::BLOCK));
            kernel<<<grid, S::THREADS, SHARED<S>, launch.stream>>>(operands, a);
        });
    });
    KL_LAUNCH_CHECK();
    return {output, lse};
}

void attention_flash_kernel_facts(std::vector<KernelFacts>& facts) {
    const auto add = [&](const char* name, auto shape) {
        using S = decltype(shape);
        facts.push_back(kernel_facts(name, attention_flash_kernel<bfloat16, S>, S::THREADS, SHARED<S>));
    };
    add("attention.flash.64", Shape64{});
    add("attention.flash.128", Shape128{});
    add("attention.flash.256", Shape256{});
}

}  // namespace kl
