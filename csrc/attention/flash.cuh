// attention, rung 2 of 7: flash. The kernel, for batches (flash.cu) and packed sequences (varlen_flash.cu); flash_masked.cu
// has the instances that test every score.
//
// Shared memory holds one tile each of queries, keys and values: Q | K | V. cp.async loads values while scores are
// computed, and the next keys while values are used. A step of the mainloop:
//
//   cp.async       ├─ V of tile n ──────────┤├─ K of tile n − 1 ────────────────┤
//   tensor cores   ├─ S = Q · Kᵀ ───────────┤                ├─ O += P · V ─────┤
//   CUDA cores                               ├─ P = softmax ─┤
//                  ▲ wait: K n is there      ▲ wait: V n is there, K n has been read
//
// Each warp keeps maximum, sum and output of its rows in registers and rescales them when the maximum grows (Milakov and
// Gimelshein, arXiv:1805.02867). Warps exchange nothing. The log-sum-exp of each row is saved for the backward pass.
//
// The instances with General sequences take a mask in memory, a window, dropped weights, and operands that do not consist
// of aligned vectors. They test every score, and skip tiles outside the band. The others test scores only in the tiles on
// the diagonal and at the end.
//
// Two things bound the tile shapes. A fragment of keys or values from ldmatrix serves as many 16-row squares as a warp has.
// With one square, shared memory could not feed the tensor cores. More squares take more registers for scores and output.
// Two blocks must fit on an SM, so that one block's softmax overlaps the other's products.
#pragma once

#include <string>

#include "attention/sequences.cuh"
#include "attention/tile.cuh"

namespace kl {

template <typename T>
struct FlashOperands {
    View<T> output, query, key, value;
    Lse lse;
    Mask mask;
};

/// Launches the instance for General sequences, in flash_masked.cu.
void launch_flash_masked(const FlashOperands<half>& operands, const Attention& a, const General& sequences,
                         const Launch& launch);
void launch_flash_masked(const FlashOperands<bfloat16>& operands, const Attention& a, const General& sequences,
                         const Launch& launch);

namespace {

//                          head dim, queries, keys, warps
using Shape64 = FlashShape<64, 128, 128, 4>;
using Shape128 = FlashShape<128, 128, 64, 4>;
using Shape256 = FlashShape<256, 64, 64, 4>;

template <typename S>
constexpr int SHARED = S::BLOCK_BYTES + 2 * S::STREAM_BYTES;  // Q, K and V

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

/// Loads a tile with cp.async. The instances that test every score also take operands that are not whole vectors. The
/// others need EDGE only for a tile that reaches past the last row.
template <int ROWS, typename S, bool MASKED, bool EDGE, typename T>
__device__ __forceinline__ void load_rows(uint32_t tile, const T* source, const View<T>& view, int rows_left,
                                          int columns) {
    if constexpr (MASKED) {
        load_tile<ROWS, S::HEAD_DIM, S::THREADS>(tile, source, view, rows_left, columns);
    } else {
        load_tile<ROWS, S::HEAD_DIM, S::THREADS, true, EDGE>(tile, source, view, rows_left, columns);
    }
}

/// State of the online softmax. A lane has rows lane_row(m, h); its sum covers its own columns until quad_sum.
template <int M>
struct SoftmaxRows {
    float max[M][2], sum[M][2];

    __device__ void clear() {
#pragma unroll
        for (int m = 0; m < M; ++m) {
#pragma unroll
            for (int h = 0; h < 2; ++h) max[m][h] = -INFINITE, sum[m][h] = 0.0f;
        }
    }
};

/// Hides keys past the diagonal and past the last one. The squares begin at query row0 and key column0.
template <int M, int N>
__device__ __forceinline__ void mask_right(Squares<M, N>& scores, int row0, int column0, const Attention& a) {
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = row0 + lane_row(m, h);
            const int left = min(a.S_k, row + 1 + a.last) - column0;
#pragma unroll
            for (int j = 0; j < N; ++j) {
                if (lane_column(j) >= left) scores.x[m][j][2 * h] = -INFINITE;
                if (lane_column(j) + 1 >= left) scores.x[m][j][2 * h + 1] = -INFINITE;
            }
        }
    }
}

/// One step of the online softmax: w = exp(score − new maximum); sum and output are rescaled by exp(old − new maximum).
/// Weights are summed before they are rounded to 16 bits: the log-sum-exp is float32's. With MASKED they stay in `scores`,
/// for dropout; else they go to `weights`, as round_squares would place them.
template <bool MASKED, typename T, int M, int N, int COLUMNS>
__device__ __forceinline__ void softmax_update(Squares<M, N>& scores, Fragments<M, N>& weights,
                                               Squares<M, COLUMNS>& output, SoftmaxRows<M>& rows, float scale,
                                               const MaskedUnits& units) {
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            // fmaxf drops NaN; the exponential of such a score brings it back.
            float new_max = rows.max[m][h];
#pragma unroll
            for (int j = 0; j < N; ++j) {
                new_max = fmaxf(new_max, fmaxf(scores.x[m][j][2 * h], scores.x[m][j][2 * h + 1]));
            }
            new_max = fmaxf(new_max, __shfl_xor_sync(FULL_MASK, new_max, 1));
            new_max = fmaxf(new_max, __shfl_xor_sync(FULL_MASK, new_max, 2));
            // While a row has seen only −inf, nothing is subtracted: its exponentials are 0, not NaN.
            const float base = new_max == -INFINITE ? 0.0f : new_max, shift = base * scale;
            const auto exponential = [&](float x) {
                return exp2_approx(MASKED ? (x - base) * units.factor : fmaf(x, scale, -shift));
            };
            const float rescale = exponential(rows.max[m][h]);
            rows.max[m][h] = new_max;
            float sum[2] = {};
#pragma unroll
            for (int j = 0; j < N; ++j) {
                const float x[2] = {exponential(scores.x[m][j][2 * h]), exponential(scores.x[m][j][2 * h + 1])};
#pragma unroll
                for (int e = 0; e < 2; ++e) sum[e] += x[e];
                if constexpr (MASKED) {
#pragma unroll
                    for (int e = 0; e < 2; ++e) scores.x[m][j][2 * h + e] = x[e];
                } else {
                    weights.x[j / 2][m][j % 2 * 2 + h] = pack_pair<T>(x[0], x[1]);
                }
            }
            rows.sum[m][h] = fmaf(rows.sum[m][h], rescale, sum[0] + sum[1]);
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) {
                output.x[m][j][2 * h] *= rescale;
                output.x[m][j][2 * h + 1] *= rescale;
            }
        }
    }
}

/// Completes the sums and stores the log-sum-exps of a warp's rows, the first of which is row `first_row` of the call.
template <bool MASKED, int M>
__device__ __forceinline__ void store_lse(const Lse& lse, SoftmaxRows<M>& rows, int64_t first_row, int rows_left,
                                          const Attention& a, const MaskedUnits& units) {
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = lane_row(m, h);
            rows.sum[m][h] = quad_sum(rows.sum[m][h]);
            if (threadIdx.x % 4 == 0 && row < rows_left) {
                if constexpr (MASKED) {
                    lse.store(first_row + row, rows.max[m][h] * units.to_log, logf(rows.sum[m][h]));
                } else {
                    lse.data[first_row + row] = rows.max[m][h] * a.scale + logf(rows.sum[m][h]);
                }
            }
        }
    }
}

#endif

template <typename T, typename S, typename Sequences>
__global__ void __launch_bounds__(S::THREADS, 2)
    attention_flash_kernel(const __grid_constant__ FlashOperands<T> p, const __grid_constant__ Attention all,
                           const __grid_constant__ Sequences sequences) {
#if __CUDA_ARCH__ >= 800
    constexpr int M = S::ROWS / 16, N = S::STREAM / 8, D = S::HEAD_DIM;
    constexpr bool MASKED = Sequences::GENERAL;
    extern __shared__ __align__(128) unsigned char shared_bytes[];
    const uint32_t q_tile = shared_address(shared_bytes);
    const uint32_t k_tile = q_tile + S::BLOCK_BYTES, v_tile = k_tile + S::STREAM_BYTES;

    // The tiles of a head run at the same time and share its keys and values in L2. Under a causal mask the longest tiles
    // start first.
    const unsigned tiles = (sequences.longest_q(all) + S::BLOCK - 1) / S::BLOCK, outer = blockIdx.x / tiles;
    const int q0 = static_cast<int>(tiles - 1 - blockIdx.x % tiles) * S::BLOCK;
    const int head = static_cast<int>(outer % all.heads);
    const auto sequence = sequences.at(all, static_cast<int>(outer / all.heads));
    const Attention& a = sequence.a;
    if (q0 >= a.S_q) return;
    const T* key = sequence.keys(p.key, head);
    const T* value = sequence.keys(p.value, head);
    const int keys = min(a.S_k, q0 + S::BLOCK + a.last);  // no later one is seen
    const int steps = max((keys + S::STREAM - 1) / S::STREAM, 1);
    // The number of tiles of keys without masked scores; edge and diagonal follow.
    const int unmasked = max(min(a.S_k, q0 + 1 + a.last), 0) / S::STREAM;
    const int begin = MASKED ? min(max(q0 + a.first, 0) / S::STREAM, steps - 1) : 0;

    const auto load = [&](uint32_t tile, const T* source, const View<T>& view, int n, int columns, auto edge) {
        const int k0 = n * S::STREAM;
        load_rows<S::STREAM, S, MASKED, decltype(edge)::value>(tile, source + k0 * view.row, view, a.S_k - k0, columns);
        cp_async_commit();
    };
    load_rows<S::BLOCK, S, MASKED, true>(q_tile, sequence.queries(p.query, head) + q0 * p.query.row, p.query,
                                         a.S_q - q0, a.D);
    load(k_tile, key, p.key, steps - 1, a.D, std::true_type{});

    const int warp_row = threadIdx.x / WARP * S::ROWS;
    const int64_t mask_offset = MASKED ? sequence.mask(p.mask, head) : 0;
    const float scale = a.scale * LOG2E;  // exp(x) = 2^(x · log2 e)
    const MaskedUnits units(p.mask, a);
    Squares<M, D / 8> output;
    output.clear();
    SoftmaxRows<M> softmax;
    softmax.clear();

    // From the last tile of keys to the first: only the first steps have anything to mask.
    const auto step = [&](int n, auto masked) {
        cp_async_wait<0>();
        __syncthreads();  // keys n have landed for all threads, and all have read values n + 1
        load(v_tile, value, p.value, n, a.D_v, masked);
        [[maybe_unused]] uint32_t kept = 0;
        if constexpr (Sequences::GENERAL) {
            const int64_t row = sequence.first_row(head) + q0 + warp_row;
            if (sequences.drops) kept = kept_weights<N>(sequences.dropout, row, n * S::STREAM, a);
        }

        Squares<M, N> scores;
        multiply_rows<T, D>(scores, q_tile, warp_row, k_tile);

        cp_async_wait<0>();
        __syncthreads();  // values n have landed for all threads, and all have read keys n
        if (n > begin) load(k_tile, key, p.key, n - 1, a.D, std::false_type{});

        if constexpr (MASKED) {
            apply_mask<T>(scores, p.mask, mask_offset, q0 + warp_row, n * S::STREAM, a);
        } else if constexpr (decltype(masked)::value) {
            mask_right(scores, q0 + warp_row, n * S::STREAM, a);
        }

        Fragments<M, N> weights;
        softmax_update<MASKED, T>(scores, weights, output, softmax, scale, units);
        if constexpr (MASKED) {
            if (sequences.drops) drop(scores, kept, sequences.dropout.scale);  // after they were summed
            weights = round_squares<T>(scores);
        }
        multiply_accumulate<T, D>(output, weights, v_tile, 0);
    };
    int n = steps - 1;
    if constexpr (MASKED) {
        for (; n >= begin; --n) step(n, std::true_type{});
    } else {
        for (; n >= unmasked; --n) step(n, std::true_type{});
        for (; n >= 0; --n) step(n, std::false_type{});
    }

    const int rows_left = a.S_q - q0 - warp_row;
    store_lse<MASKED>(p.lse, softmax, sequence.first_row(head) + q0 + warp_row, rows_left, a, units);
    // A row of nothing but −inf sums to 0, and its output is 0.
    store_squares(output, sequence.queries(p.output, head) + (q0 + warp_row) * p.output.row, p.output.row, rows_left,
                  a.D_v, [&](int m, int h) { return softmax.sum[m][h] == 0.0f ? 0.0f : 1.0f / softmax.sum[m][h]; });
#endif
}

template <typename T, typename S, typename Sequences>
void launch_flash(const FlashOperands<T>& operands, const Attention& a, const Sequences& sequences,
                  const Launch& launch) {
    const auto kernel = attention_flash_kernel<T, S, Sequences>;
    static DeviceSet asked;
    allow_shared(kernel, SHARED<S>, launch.device, asked);
    const auto grid = grid_size(sequences.count(a) * a.heads * ceil_div(sequences.longest_q(a), S::BLOCK));
    kernel<<<grid, S::THREADS, SHARED<S>, launch.stream>>>(operands, a, sequences);
    KL_LAUNCH_CHECK();
}

/// Launches the instance for the call.
template <typename T, typename Sequences>
void launch_flash(const FlashOperands<T>& operands, const Attention& a, const Sequences& sequences, bool hides_left,
                  const std::optional<DropoutMask>& dropout, const Launch& launch) {
    const bool whole = operands.query.whole && operands.key.whole && operands.value.whole;
    if (operands.mask.kind != MaskKind::NONE || hides_left || dropout || !whole) {
        return launch_flash_masked(operands, a, General(sequences, dropout), launch);
    }
    dispatch_shape<Shape64, Shape128, Shape256>(std::max(a.D, a.D_v), [&](auto shape) {
        launch_flash<T, decltype(shape)>(operands, a, Any(sequences), launch);
    });
}

/// Adds the attributes of instances, named by head dimension below `prefix`.
template <typename Sequences, typename S64, typename S128>
void flash_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype, const std::string& prefix) {
    if (dtype == ScalarType::Float) return;
    dispatch_16bit(dtype, "attention", [&](auto zero) {
        const auto add = [&](const char* name, auto shape) {
            using T = decltype(zero);
            using S = decltype(shape);
            attributes.push_back(kernel_attributes<attention_flash_kernel<T, S, Sequences>>((prefix + name).c_str(),
                                                                                            S::THREADS, SHARED<S>));
        };
        add("64", S64{});
        add("128", S128{});
        add("256", Shape256{});
    });
}

}  // namespace
}  // namespace kl
