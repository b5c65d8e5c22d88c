// Short normalised rows: a warp holds several, or the whole of one. Instructions bound them, so every row of a thread has
// the same parameters, and rows lie evenly apart.
#pragma once

#include <type_traits>

#include "norm.cuh"

namespace kl {

constexpr int SHORT_VALUES = 32;                // a thread holds
constexpr int SHORT_ROW = SHORT_VALUES * WARP;  // elements of the longest row that a warp can hold
constexpr int SHORT_ROWS = 4;                   // of a thread at most, and where a row may not need a whole warp

// Vectors that a thread holds of each of so many rows.
template <typename T, int ROWS>
constexpr int SHORT_VECTORS = SHORT_VALUES / Vec<T>::size / ROWS;

// Whether a thread has registers for all its parameters: they then come with the first loads.
template <typename T, bool CENTRED, int ROWS>
constexpr bool SHORT_EARLY = SHORT_VECTORS<T, ROWS> * (CENTRED ? 2 : 1) <= 8;

// Blocks of MIN_BLOCK threads that an SM is to have room for: the most that leave registers enough for no spill.
template <typename T, bool CENTRED, int ROWS>
constexpr int SHORT_BLOCKS = !CENTRED                                            ? 16
                             : std::is_same_v<T, bfloat16> && ROWS == SHORT_ROWS ? 16
                             : sizeof(T) == 4 && ROWS < SHORT_ROWS               ? 10
                                                                                 : 12;

// No more than is looked at, all in one place: a launch waits for each line of its arguments.
template <typename T>
struct ShortNorm {
    T* output;
    const T *input, *weight, *bias;
    float* stats;
    int64_t out_step, in_step, count;  // elements from row to row; rows
    int length;
    float eps, per_element;
};

// The sum over so many neighbouring lanes, a power of two, for each of several rows.
template <int ROWS, typename V, typename Op>
__device__ void each_over_lanes(V (&values)[ROWS], Op op, int lanes) {
#pragma unroll
    for (int l = WARP / 2; l > 0; l /= 2) {
        if (l >= lanes) continue;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) values[r] = op(values[r], shuffle_xor(values[r], l));
    }
}

// Which rows and vectors are this thread's. blockDim.x threads share a row, a whole warp unless a thread has SHORT_ROWS,
// and take every blockDim.y-th row of the block's.
template <typename T, int ROWS>
struct ShortShare {
    int lane = threadIdx.x, lanes = ROWS < SHORT_ROWS ? WARP : blockDim.x, apart = blockDim.y;
    int64_t row = int64_t{blockIdx.x} * (ROWS * apart) + threadIdx.y;
    int length, left;

    __device__ explicit ShortShare(const ShortNorm<T>& p)
        : length(p.length), left(static_cast<int>(min(p.count - row, int64_t{ROWS} * apart))) {}
    __device__ int at(int v) const { return (lane + v * lanes) * Vec<T>::size; }
    __device__ bool in_row(int v) const { return at(v) < length; }
    __device__ bool live(int r) const { return r * apart < left; }
};

// In two passes over registers, the second about each row's mean.
template <typename T, int ROWS, int V>
__device__ void short_stats(Stats (&stats)[ROWS], const Vec<T> (&tile)[ROWS][V], const ShortShare<T, ROWS>& share,
                            const ShortNorm<T>& p) {
    float x[Vec<T>::size], sums[ROWS];
    Pair deviations[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) sums[r] = sum_over(tile[r], [](float sum, float x) { return sum + x; });
    each_over_lanes(sums, Sum{}, share.lanes);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const float mean = stats[r].mean = sums[r] * p.per_element;
        deviations[r] = {0.0f, 0.0f};
#pragma unroll
        for (int v = 0; v < V; ++v) {
            unpack(tile[r][v], x);
            const float centre = share.in_row(v) ? mean : 0.0f;  // zeros past the end are not to deviate
            Pair partial{0.0f, 0.0f};
#pragma unroll
            for (int e = 0; e < Vec<T>::size; ++e) {
                const float deviation = x[e] - centre;
                if constexpr (SHIFTED<T>) partial.first += deviation;
                partial.second = fmaf(deviation, deviation, partial.second);
            }
            deviations[r] = PairSum{}(deviations[r], partial);
        }
        sums[r] = deviations[r].second;
    }
    if constexpr (SHIFTED<T>) each_over_lanes(deviations, PairSum{}, share.lanes);
    if constexpr (!SHIFTED<T>) each_over_lanes(sums, Sum{}, share.lanes);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        if constexpr (!SHIFTED<T>) deviations[r].second = sums[r];
        stats[r] = stats_of_deviations(stats[r].mean, deviations[r], p.per_element, p.eps);
    }
}

template <typename T, bool CENTRED, int ROWS>
__device__ void norm_short(const ShortNorm<T>& p) {
    constexpr int E = Vec<T>::size, V = SHORT_VECTORS<T, ROWS>;
    const ShortShare<T, ROWS> share(p);
    Vec<T> tile[ROWS][V], weight[V], bias[V];
    const T* input = p.input + share.row * p.in_step;
#pragma unroll
    for (int r = 0; r < ROWS; ++r, input += share.apart * p.in_step) {
#pragma unroll
        for (int v = 0; v < V; ++v) {
            uint4 word = filled<T>(0.0f);
            if (share.live(r) && share.in_row(v)) word = *reinterpret_cast<const uint4*>(input + share.at(v));
            reinterpret_cast<uint4&>(tile[r][v]) = word;
        }
    }
    const auto parameter = [&](const T* from, int v, float absent) {
        uint4 word = filled<T>(absent);
        load_constant_if(word, from + share.at(v), from != nullptr && share.in_row(v));
        return reinterpret_cast<const Vec<T>&>(word);
    };
    const auto fetch_parameters = [&](int v) {
        weight[v] = parameter(p.weight, v, 1.0f);
        if constexpr (CENTRED) bias[v] = parameter(p.bias, v, 0.0f);
    };
    constexpr bool EARLY = SHORT_EARLY<T, CENTRED, ROWS>;
#pragma unroll
    for (int v = 0; v < V; ++v) {
        if constexpr (EARLY) fetch_parameters(v);
    }
    Stats stats[ROWS];
    if constexpr (CENTRED) {
        short_stats(stats, tile, share, p);
    } else {
        float squares[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            squares[r] = sum_over(tile[r], [](float sum, float x) { return fmaf(x, x, sum); });
        }
        each_over_lanes(squares, Sum{}, share.lanes);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) stats[r] = stats_of_squares(squares[r] * p.per_element, p.eps);
    }
    if (share.lane == 0) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            if (share.live(r)) store_stats<CENTRED>(p.stats, share.row + r * share.apart, stats[r]);
        }
    }
    T* const output = p.output + share.row * p.out_step;
#pragma unroll
    for (int v = 0; v < V; ++v) {
        float x[E], scale[E], offset[E];
        if constexpr (!EARLY) fetch_parameters(v);
        unpack(weight[v], scale);
        if constexpr (CENTRED) unpack(bias[v], offset);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            unpack(tile[r][v], x);
#pragma unroll
            for (int e = 0; e < E; ++e) {
                x[e] = normalized<CENTRED, SHIFTED<T>>(x[e], stats[r]);
                x[e] = CENTRED ? fmaf(x[e], scale[e], offset[e]) : x[e] * scale[e];
            }
            T* const out = output + r * share.apart * p.out_step + share.at(v);
            if (share.live(r) && share.in_row(v)) store_vec(out, pack<T>(x));
            keep_order();
        }
    }
}

}  // namespace kl
