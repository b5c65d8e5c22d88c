// The backward pass of short 16-bit rows. A warp has a row, and the next one waits in its registers: what comes by way of
// shared memory is written and read there once more, and a barrier would hold up warps that have nothing to do with each
// other.
#pragma once

#include "norm_backward.cuh"
#include "short_rows.cuh"

namespace kl {

// A lane has VECTORS_ of its row. BLOCKS_ of THREADS_ fill an SM.
template <int VECTORS_, int THREADS_, int BLOCKS_>
struct WarpRow {
    static constexpr int VECTORS = VECTORS_, THREADS = THREADS_, BLOCKS = BLOCKS_;
    static constexpr int WARPS = THREADS / WARP, REACH = VECTORS * WARP;  // vectors of the longest row
};
using WarpRows = std::tuple<WarpRow<1, 512, 2>, WarpRow<2, 256, 2>>;

// This lane's vectors of the warp's rows, which are every `apart`-th.
template <typename T, bool CENTRED, int V>
struct NextRow {
    static constexpr int E = Vec<T>::size;

    const NormBackward<T>& p;
    const int lane;
    const T *input, *grad;
    Vec<T> x[V], g[V];  // of the row that was fetched last
    Stats stats;

    __device__ NextRow(const NormBackward<T>& p_in, int row)
        : p(p_in),
          lane(threadIdx.x % WARP),
          input(p.input + row * p.even_in.step + lane * E),
          grad(p.grad + row * p.even_g.step + lane * E) {
#pragma unroll
        for (int v = 0; v < V; ++v) {
            reinterpret_cast<uint4&>(x[v]) = reinterpret_cast<uint4&>(g[v]) = filled<T>(0.0f);
        }
    }

    __device__ bool has(int v) const { return (lane + v * WARP) * E < static_cast<int>(p.length); }

    // To be called for every row, in order. Past a row's end zeros stay; where there is no row, the one before.
    __device__ void fetch(int row) {
        const bool live = row < static_cast<int>(p.count);
#pragma unroll
        for (int v = 0; v < V; ++v) {
            if (live & has(v)) {
                reinterpret_cast<uint4&>(x[v]) = *once(reinterpret_cast<const uint4*>(input + v * WARP * E));
                reinterpret_cast<uint4&>(g[v]) = *once(reinterpret_cast<const uint4*>(grad + v * WARP * E));
            }
        }
        if (live) stats = load_stats<CENTRED>(p.stats, row);
        input += p.even_in.apart;
        grad += p.even_g.apart;
    }
};

// The sums of a block's columns: those of its warps, in their order.
template <typename T, typename ROW, int SUMS>
__device__ void store_warps_partials(const NormWeights<T>& w, float4* of_warps, int length,
                                     const float (&of_columns)[SUMS][ROW::VECTORS][Vec<T>::size]) {
    constexpr int E = Vec<T>::size, FOURS = ROW::REACH * E / 4;  // of one sum of one warp
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
#pragma unroll
    for (int s = 0; s < SUMS; ++s) {
#pragma unroll
        for (int v = 0; v < ROW::VECTORS; ++v) {
#pragma unroll
            for (int e = 0; e < E; e += 4) {
                const float* const four = of_columns[s][v] + e;
                of_warps[(warp * SUMS + s) * FOURS + (lane + v * WARP) * (E / 4) + e / 4] =
                    make_float4(four[0], four[1], four[2], four[3]);
            }
        }
    }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < SUMS * FOURS; i += ROW::THREADS) {
        float4 sum = of_warps[i];
#pragma unroll 4
        for (int other = 1; other < ROW::WARPS; ++other) {
            const float4 more = of_warps[other * SUMS * FOURS + i];
            sum = make_float4(sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w);
        }
        float* const partials = w.partials + (int64_t{i / FOURS} * w.groups + blockIdx.x) * length;
        store_columns<true>(partials, i % FOURS * 4, sum, length);
    }
}

template <typename T, bool CENTRED, typename ROW>
__device__ void norm_backward_short(const NormWeights<T>& w, const NormBackward<T>& p) {
    constexpr int E = Vec<T>::size, V = ROW::VECTORS, SUMS = CENTRED ? 2 : 1;
    launch_dependents();
    __shared__ float4 of_warps[ROW::WARPS * SUMS * ROW::REACH * E / 4];
    // The rows of a turn lie a grid apart, so that those of the last one are spread over all SMs.
    const int warp = threadIdx.x / WARP, first = static_cast<int>(blockIdx.x + warp * gridDim.x);
    const int count = static_cast<int>(p.count), apart = static_cast<int>(p.apart);
    wait_for_previous();
    NextRow<T, CENTRED, V> next(p, first);
    next.fetch(first);
    uint4 weight[V];
#pragma unroll
    for (int v = 0; v < V; ++v) {
        weight[v] = filled<T>(1.0f);
        load_if<false>(weight[v], p.weight + (next.lane + v * WARP) * E, p.weight != nullptr && next.has(v));
    }
    T* to = p.grad_input + first * p.even_gi.step + next.lane * E;
    float of_columns[SUMS][V][E] = {};
    for (int row = first; row < count; row += apart) {
        Vec<T> x[V], g[V];
        const Stats stats = next.stats;
#pragma unroll
        for (int v = 0; v < V; ++v) x[v] = next.x[v], g[v] = next.g[v];
        next.fetch(row + apart);
        float sums[SUMS] = {};  // of w·dy, if centred, and of w·dy·x̂
#pragma unroll
        for (int v = 0; v < V; ++v) {
            Worked<T, CENTRED> part;
            part.work_out(x[v], g[v], weight[v], stats);
#pragma unroll
            for (int e = 0; e < E; ++e) {
                of_columns[0][v][e] = fmaf(part.g[e], part.x_hat[e], of_columns[0][v][e]);
                sums[SUMS - 1] = fmaf(part.weighted[e], part.x_hat[e], sums[SUMS - 1]);
                if constexpr (CENTRED) {
                    of_columns[1][v][e] += part.g[e];
                    sums[0] += part.weighted[e];
                }
            }
        }
        if (p.grad_input == nullptr) continue;
        stay_packed(x);
        stay_packed(g);
        each_over_lanes(sums, Sum{}, WARP);
        const Pair means = means_of({CENTRED ? sums[0] : 0.0f, sums[SUMS - 1]}, p.per_element);
#pragma unroll
        for (int v = 0; v < V; ++v) {
            Worked<T, CENTRED> part;
            part.work_out(x[v], g[v], weight[v], stats);
            float out[E];
#pragma unroll
            for (int e = 0; e < E; ++e) {
                out[e] = gradient<CENTRED>(part.x_hat[e], part.weighted[e], means, stats.rstd);
            }
            store_if(to + v * WARP * E, pack<T>(out), next.has(v));
        }
        to += p.even_gi.apart;
    }
    if (w.partials != nullptr) store_warps_partials<T, ROW>(w, of_warps, static_cast<int>(p.length), of_columns);
}

}  // namespace kl
