// The backward pass of short 16-bit rows. A few warps share a row, one at a time, and the next one waits in their registers:
// what comes by way of shared memory is written and read there once more, and a barrier of a block holds up warps that have
// nothing to do with each other.
#pragma once

#include "norm/backward.cuh"
#include "reduce/short_rows.cuh"

namespace kl {

// WARPS share a row, VECTORS of it a thread. BLOCKS of THREADS fill an SM.
template <int VECTORS_, int WARPS_, int THREADS_, int BLOCKS_>
struct CrewShape {
    static constexpr int VECTORS = VECTORS_, WARPS = WARPS_, THREADS = THREADS_, BLOCKS = BLOCKS_;
    static constexpr int LANES = WARPS * WARP, CREWS = THREADS / LANES;
    static constexpr int REACH = VECTORS * LANES;  // vectors of the longest row
};

// The sum over the crew of each of several values, by a barrier of the crew alone. Lane l of a warp finishes value
// l / (WARP / N), so that N values cost about as much as one.
template <typename CREW, int N>
struct CrewSums {
    float of_warps[2][CREW::CREWS][CREW::WARPS][N];

    __device__ void sum(float (&values)[N], int turn, int crew, int warp) {
        if constexpr (CREW::WARPS == 1) {
            each_over_lanes(values, Sum{}, WARP);
        } else {
            // A warp that leaves its sums of turn t + 2 has passed the barrier of t + 1, and so has every warp read those of t.
            auto& slots = of_warps[turn % 2][crew];
            const float own = own_over_lanes(values, Sum{}, WARP);
            const int lane = threadIdx.x % WARP;
            if (lane % (WARP / N) == 0) slots[warp][lane / (WARP / N)] = own;
            named_barrier_sync(1 + crew, CREW::LANES);
#pragma unroll
            for (int n = 0; n < N; ++n) {
                values[n] = slots[0][n];
#pragma unroll
                for (int w = 1; w < CREW::WARPS; ++w) values[n] += slots[w][n];
            }
        }
    }
};

// This thread's vectors of its crew's rows, which are every `apart`-th.
template <typename T, bool CENTRED, typename CREW>
struct CrewRows {
    static constexpr int E = Vec<T>::size, V = CREW::VECTORS;

    const NormBackward<T>& p;
    const int at;  // this thread's first vector of a row
    const T *input, *grad;
    Vec<T> x[V], g[V];  // of the row that was fetched last
    Stats stats;

    __device__ CrewRows(const NormBackward<T>& p_in, int at_in, int row)
        : p(p_in),
          at(at_in),
          input(p.input + row * p.even_in.step + at * E),
          grad(p.grad + row * p.even_g.step + at * E) {
#pragma unroll
        for (int v = 0; v < V; ++v) {
            reinterpret_cast<uint4&>(x[v]) = reinterpret_cast<uint4&>(g[v]) = filled<T>(0.0f);
        }
    }

    __device__ bool has(int v) const { return (at + v * CREW::LANES) * E < static_cast<int>(p.length); }

    // To be called for every row, in order. Past a row's end zeros stay; where there is no row, the one before.
    __device__ void fetch(int row) {
        const bool live = row < static_cast<int>(p.count);
#pragma unroll
        for (int v = 0; v < V; ++v) {
            if (live & has(v)) {
                reinterpret_cast<uint4&>(x[v]) = *once(reinterpret_cast<const uint4*>(input + v * CREW::LANES * E));
                reinterpret_cast<uint4&>(g[v]) = *once(reinterpret_cast<const uint4*>(grad + v * CREW::LANES * E));
            }
        }
        if (live) stats = load_stats<CENTRED>(p.stats, row);
        input += p.even_in.apart;
        grad += p.even_g.apart;
    }
};

// The columns' sums of a block: those of its crews, in their order.
template <typename T, typename CREW, int SUMS>
__device__ void store_crew_partials(const NormWeights<T>& w, float4* of_crews, int length,
                                    const float (&of_columns)[SUMS][CREW::VECTORS][Vec<T>::size], int crew, int at) {
    constexpr int E = Vec<T>::size, FOURS = CREW::REACH * E / 4;  // of one sum of one crew
#pragma unroll
    for (int s = 0; s < SUMS; ++s) {
#pragma unroll
        for (int v = 0; v < CREW::VECTORS; ++v) {
#pragma unroll
            for (int e = 0; e < E; e += 4) {
                const float* const four = of_columns[s][v] + e;
                of_crews[(crew * SUMS + s) * FOURS + (at + v * CREW::LANES) * (E / 4) + e / 4] =
                    make_float4(four[0], four[1], four[2], four[3]);
            }
        }
    }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < SUMS * FOURS; i += CREW::THREADS) {
        float4 sum = of_crews[i];
#pragma unroll 4
        for (int c = 1; c < CREW::CREWS; ++c) {
            const float4 more = of_crews[c * SUMS * FOURS + i];
            sum = make_float4(sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w);
        }
        float* const partials = w.partials + (int64_t{i / FOURS} * w.groups + blockIdx.x) * length;
        store_columns<true>(partials, i % FOURS * 4, sum, length);
    }
}

template <typename T, bool CENTRED, typename CREW>
__device__ void norm_backward_short(const NormWeights<T>& w, const NormBackward<T>& p) {
    constexpr int E = Vec<T>::size, V = CREW::VECTORS, SUMS = CENTRED ? 2 : 1;
    launch_dependents();
    __shared__ CrewSums<CREW, SUMS> crew_sums;
    __shared__ float4 of_crews[CREW::CREWS * SUMS * CREW::REACH * E / 4];
    const int warp = threadIdx.x / WARP, crew = warp / CREW::WARPS, in_crew = warp % CREW::WARPS;
    // The rows of a turn lie a grid apart, so that those of the last one are spread over all SMs.
    const int first = static_cast<int>(blockIdx.x + crew * gridDim.x), count = static_cast<int>(p.count);
    const int apart = static_cast<int>(p.apart);
    wait_for_previous();
    CrewRows<T, CENTRED, CREW> next(p, in_crew * WARP + threadIdx.x % WARP, first);
    next.fetch(first);
    uint4 weight[V];
#pragma unroll
    for (int v = 0; v < V; ++v) {
        weight[v] = filled<T>(1.0f);
        load_if<false>(weight[v], p.weight + (next.at + v * CREW::LANES) * E, p.weight != nullptr && next.has(v));
    }
    T* to = p.grad_input + first * p.even_gi.step + next.at * E;
    float of_columns[SUMS][V][E] = {};
    int turn = 0;
    for (int row = first; row < count; row += apart, ++turn) {
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
        crew_sums.sum(sums, turn, crew, in_crew);
        const Pair means = means_of({CENTRED ? sums[0] : 0.0f, sums[SUMS - 1]}, p.per_element);
#pragma unroll
        for (int v = 0; v < V; ++v) {
            Worked<T, CENTRED> part;
            part.work_out(x[v], g[v], weight[v], stats);
            float out[E];
#pragma unroll
            for (int e = 0; e < E; ++e) out[e] = gradient<CENTRED>(part.x_hat[e], part.weighted[e], means, stats.rstd);
            if (next.has(v)) store_streamed(to + v * CREW::LANES * E, pack<T>(out));
        }
        to += p.even_gi.apart;
    }
    if (w.partials == nullptr) return;
    store_crew_partials<T, CREW>(w, of_crews, static_cast<int>(p.length), of_columns, crew, next.at);
}

}  // namespace kl
