// layer_norm, rms_norm: the shared backward pass (backward.cuh) for short 16-bit rows.
// Idea      WARPS warps share a row, and the next row waits in their registers. There is no copy through shared memory,
//           and only the row's warps wait at a barrier. backward.cuh costs 2 to 5 % more at rows of 256 to 1024
//           elements.
#pragma once

#include "norm/backward.cuh"
#include "reduce/short_rows.cuh"

namespace kl {

// WARPS warps share a row, with VECTORS vectors per thread. BLOCKS blocks of THREADS fill an SM.
template <int VECTORS_, int WARPS_, int THREADS_, int BLOCKS_>
struct WarpsPerRowShape {
    static constexpr int VECTORS = VECTORS_, WARPS = WARPS_, THREADS = THREADS_, BLOCKS = BLOCKS_;
    static constexpr int LANES = WARPS * WARP, ROWS = THREADS / LANES;
    static constexpr int REACH = VECTORS * LANES;  // vectors of the longest row
};

// Sums N values over the warps of a row, with a named barrier of that row alone. Lane l of a warp finishes value
// l / (WARP / N), so that N values cost about as much as one.
template <typename SHAPE, int N>
struct WarpsReduceSmem {
    float of_warps[2][SHAPE::ROWS][SHAPE::WARPS][N];

    __device__ void sum(float (&values)[N], int iteration, int row_in_block, int warp) {
        if constexpr (SHAPE::WARPS == 1) {
            each_over_lanes(values, Sum{}, WARP);
        } else {
            // Two buffers suffice. A warp that writes those of iteration t + 2 has passed the barrier of t + 1. Before that
            // barrier every warp read those of t.
            auto& partials = of_warps[iteration % 2][row_in_block];
            const float own = reduce_rows_over_lanes(values, Sum{}, WARP);
            const int lane = threadIdx.x % WARP;
            if (lane % (WARP / N) == 0) partials[warp][lane / (WARP / N)] = own;
            named_barrier_sync(1 + row_in_block, SHAPE::LANES);
#pragma unroll
            for (int n = 0; n < N; ++n) {
                values[n] = partials[0][n];
#pragma unroll
                for (int w = 1; w < SHAPE::WARPS; ++w) values[n] += partials[w][n];
            }
        }
    }
};

// This thread's vectors of its rows, which are every `apart`-th.
template <typename T, bool IS_LAYERNORM, typename SHAPE>
struct WarpsRows {
    static constexpr int E = Vec<T>::size, V = SHAPE::VECTORS;

    const NormBackward<T>& p;
    const int at;  // index of this thread's first vector of a row
    const T *input, *grad;
    Vec<T> x[V], g[V];  // of the row loaded last
    Stats stats;

    __device__ WarpsRows(const NormBackward<T>& p_in, int at_in, int row)
        : p(p_in),
          at(at_in),
          input(p.input + row * p.even_in.step + at * E),
          grad(p.grad + row * p.even_g.step + at * E) {
#pragma unroll
        for (int v = 0; v < V; ++v) {
            reinterpret_cast<uint4&>(x[v]) = reinterpret_cast<uint4&>(g[v]) = filled<T>(0.0f);
        }
    }

    __device__ bool has(int v) const { return (at + v * SHAPE::LANES) * E < static_cast<int>(p.length); }

    // Loads a row. Must be called for every row, in order. Zeros stay past a row's end; after the last row, the last
    // row stays.
    __device__ void fetch(int row) {
        const bool has_row = row < static_cast<int>(p.count);
#pragma unroll
        for (int v = 0; v < V; ++v) {
            if (has_row & has(v)) {
                reinterpret_cast<uint4&>(x[v]) =
                    *evict_last(reinterpret_cast<const uint4*>(input + v * SHAPE::LANES * E));
                reinterpret_cast<uint4&>(g[v]) =
                    *evict_last(reinterpret_cast<const uint4*>(grad + v * SHAPE::LANES * E));
            }
        }
        if (has_row) stats = load_stats<IS_LAYERNORM>(p.stats, row);
        input += p.even_in.apart;
        grad += p.even_g.apart;
    }
};

// Stores the column sums of a block: the sum over its rows in flight, in order.
template <typename T, typename SHAPE, int SUMS>
__device__ void store_row_partials(const NormWeights<T>& w, float4* sums_of_rows, int length,
                                   const float (&of_columns)[SUMS][SHAPE::VECTORS][Vec<T>::size], int row_in_block,
                                   int at) {
    constexpr int E = Vec<T>::size, FOURS = SHAPE::REACH * E / 4;  // float4 of one sum of one row in flight
#pragma unroll
    for (int s = 0; s < SUMS; ++s) {
#pragma unroll
        for (int v = 0; v < SHAPE::VECTORS; ++v) {
#pragma unroll
            for (int e = 0; e < E; e += 4) {
                const float* const four = of_columns[s][v] + e;
                sums_of_rows[(row_in_block * SUMS + s) * FOURS + (at + v * SHAPE::LANES) * (E / 4) + e / 4] =
                    make_float4(four[0], four[1], four[2], four[3]);
            }
        }
    }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < SUMS * FOURS; i += SHAPE::THREADS) {
        float4 sum = sums_of_rows[i];
#pragma unroll 4
        for (int c = 1; c < SHAPE::ROWS; ++c) {
            const float4 more = sums_of_rows[c * SUMS * FOURS + i];
            sum = make_float4(sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w);
        }
        float* const partials = w.partials + (int64_t{i / FOURS} * w.groups + blockIdx.x) * length;
        store_columns<true>(partials, i % FOURS * 4, sum, length);
    }
}

template <class Op, typename T, typename SHAPE>
__global__ void __launch_bounds__(SHAPE::THREADS, SHAPE::BLOCKS)
    norm_backward_registers_warps_kernel(const NormWeights<T> w, __grid_constant__ const NormBackward<T> p) {
    constexpr bool IS_LAYERNORM = Op::IS_LAYERNORM;
    constexpr int E = Vec<T>::size, V = SHAPE::VECTORS, SUMS = IS_LAYERNORM ? 2 : 1;
    griddepcontrol_launch_dependents();
    __shared__ WarpsReduceSmem<SHAPE, SUMS> reduce_smem;
    __shared__ float4 sums_of_rows[SHAPE::ROWS * SUMS * SHAPE::REACH * E / 4];
    const int warp = threadIdx.x / WARP, row_in_block = warp / SHAPE::WARPS, warp_in_row = warp % SHAPE::WARPS;
    // A block's rows lie a grid apart, so that the last rows are spread over all SMs.
    const int first = static_cast<int>(blockIdx.x + row_in_block * gridDim.x), count = static_cast<int>(p.count);
    const int apart = static_cast<int>(p.apart);
    griddepcontrol_wait();
    WarpsRows<T, IS_LAYERNORM, SHAPE> next(p, warp_in_row * WARP + threadIdx.x % WARP, first);
    next.fetch(first);
    uint4 weight[V];
#pragma unroll
    for (int v = 0; v < V; ++v) {
        weight[v] = filled<T>(1.0f);
        load_if<false>(weight[v], p.weight + (next.at + v * SHAPE::LANES) * E, p.weight != nullptr && next.has(v));
    }
    T* to = p.grad_input + first * p.even_gi.step + next.at * E;
    float of_columns[SUMS][V][E] = {};
    int iteration = 0;
    for (int row = first; row < count; row += apart, ++iteration) {
        Vec<T> x[V], g[V];
        const Stats stats = next.stats;
#pragma unroll
        for (int v = 0; v < V; ++v) x[v] = next.x[v], g[v] = next.g[v];
        next.fetch(row + apart);
        float sums[SUMS] = {};  // of w·dy (layer_norm only), and of w·dy·x̂
#pragma unroll
        for (int v = 0; v < V; ++v) {
            UnpackedVector<T, IS_LAYERNORM> part;
            part.unpack_row(x[v], g[v], weight[v], stats);
#pragma unroll
            for (int e = 0; e < E; ++e) {
                of_columns[0][v][e] = fmaf(part.g[e], part.x_hat[e], of_columns[0][v][e]);
                sums[SUMS - 1] = fmaf(part.weighted[e], part.x_hat[e], sums[SUMS - 1]);
                if constexpr (IS_LAYERNORM) {
                    of_columns[1][v][e] += part.g[e];
                    sums[0] += part.weighted[e];
                }
            }
        }
        if (p.grad_input == nullptr) continue;
        stay_packed(x);
        stay_packed(g);
        reduce_smem.sum(sums, iteration, row_in_block, warp_in_row);
        const Pair means = means_of({IS_LAYERNORM ? sums[0] : 0.0f, sums[SUMS - 1]}, p.per_element);
#pragma unroll
        for (int v = 0; v < V; ++v) {
            UnpackedVector<T, IS_LAYERNORM> part;
            part.unpack_row(x[v], g[v], weight[v], stats);
            float out[E];
#pragma unroll
            for (int e = 0; e < E; ++e)
                out[e] = gradient<IS_LAYERNORM>(part.x_hat[e], part.weighted[e], means, stats.rstd);
            if (next.has(v)) store_evict_first(to + v * SHAPE::LANES * E, pack<T>(out));
        }
        to += p.even_gi.apart;
    }
    if (w.partials == nullptr) return;
    store_row_partials<T, SHAPE>(w, sums_of_rows, static_cast<int>(p.length), of_columns, row_in_block, next.at);
}

// ---- host ----------------------------------------------------------------------------------------------------------

/// Rows of whole vectors that lie evenly, of at most SHAPE::REACH vectors.
template <class Op, typename SHAPE, typename T>
void launch_backward_warps(NormWeights<T> w, NormBackward<T> p, const Tensor& like, const Launch& launch) {
    constexpr auto kernel = norm_backward_registers_warps_kernel<Op, T, SHAPE>;
    static OccupancyCache resident;
    const int64_t most = resident.clusters(kernel, dim3(SHAPE::THREADS), 1, 0, launch);
    const auto partials = distribute_rows<Op::IS_LAYERNORM>(w, p, SHAPE::ROWS, most, like);
    launch_pdl(kernel, dim3(w.groups), dim3(SHAPE::THREADS), launch, w, p);
    if (w.wanted()) launch_column_sum<Op>(w, p.length, launch);
}

}  // namespace kl
