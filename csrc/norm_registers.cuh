// Normalised rows in registers of the threads that share them, on one block or a cluster: the last two steps of the climb
// of layer_norm, rms_norm and add_rms_norm.
#pragma once

#include <type_traits>

#include "norm.cuh"

namespace kl {

// ---- forward -------------------------------------------------------------------------------------------------------

template <typename T, int V>
__device__ float sum_of(const Vec<T> (&tile)[V]) {
    return sum_over(tile, [](float sum, float x) { return sum + x; });
}

// The sums of a thread's deviations from `centre` and of their squares. The first would be zero for a row and its mean,
// but that the mean is rounded; it counts only where SHIFTED.
template <bool WHOLE, bool CLUSTER, typename T, int V>
__device__ Pair deviations_from(float centre, const Vec<T> (&tile)[V], const RowShare<CLUSTER>& share, int64_t length) {
    constexpr int E = Vec<T>::size;
    float x[E];
    Pair sums{0.0f, 0.0f};
#pragma unroll
    for (int v = 0; v < V; ++v) {
        unpack(tile[v], x);
        const int first = share.at(v) * E;
        // Past the end stand zeros, which are not to deviate.
        const float inside = share.template has<T>(v, length) ? centre : 0.0f;
        Pair partial{0.0f, 0.0f};
#pragma unroll
        for (int e = 0; e < E; ++e) {
            const float deviation = x[e] - (WHOLE || first + e < static_cast<int>(length) ? inside : 0.0f);
            if constexpr (SHIFTED<T>) partial.first += deviation;
            partial.second = fmaf(deviation, deviation, partial.second);
        }
        sums = PairSum{}(sums, partial);
    }
    return sums;
}

// On one block: two passes over registers, the second about the row's mean.
template <bool WHOLE, typename T, int V>
__device__ Stats centred_stats(Vec<T> (&tile)[V], const RowShare<false>& share, const NormForward<T>& p) {
    __shared__ Mailbox<false, float> of_sum, of_squares;
    __shared__ Mailbox<false, Pair> of_deviations;
    const float mean = reduce_over_row(sum_of(tile), Sum{}, of_sum) * p.per_element;
    stay_packed(tile);
    Pair deviations = deviations_from<WHOLE>(mean, tile, share, p.length);
    if constexpr (SHIFTED<T>) deviations = reduce_over_row(deviations, PairSum{}, of_deviations);
    if constexpr (!SHIFTED<T>) deviations.second = reduce_over_row(deviations.second, Sum{}, of_squares);
    return stats_of_deviations(mean, deviations, p.per_element, p.eps);
}

// Of some of a row's elements: how many there are, a value near their mean, and the sums of their deviations from it and
// of their squares.
struct alignas(16) Moments {
    float count, centre;
    Pair deviations;
};

// In a cluster, where a meeting costs more: the second pass about the mean of what a warp has. From the moments of all warps
// those of the row follow (Chan, Golub and LeVeque, Updating Formulae and a Pairwise Algorithm for Computing Sample
// Variances, 1979).
template <bool WHOLE, typename T, int V>
__device__ Stats centred_stats(Vec<T> (&tile)[V], const RowShare<true>& share, const NormForward<T>& p,
                               Mailbox<true, Moments>& mailbox) {
    constexpr int E = Vec<T>::size;
    const int lane = threadIdx.x % WARP, end = min(share.end * E, static_cast<int>(p.length));
    float sum = over_lanes(sum_of(tile), Sum{}, WARP);
    stay_packed(tile);
    int elements = 0;
#pragma unroll
    for (int v = 0; v < V; ++v) elements += max(min(end - (share.at(v) - lane) * E, WARP * E), 0);
    Moments own{static_cast<float>(elements), 0.0f, {}};
    if (elements > 0) own.centre = sum * rcp_approx(own.count);
    own.deviations = deviations_from<WHOLE>(own.centre, tile, share, p.length);
    if constexpr (SHIFTED<T>) own.deviations.first = over_lanes(own.deviations.first, Sum{}, WARP);
    own.deviations.second = over_lanes(own.deviations.second, Sum{}, WARP);

    const Moments* slots;
    const int count = leave_for_row(own, mailbox, slots);
    sum = 0.0f;
    for (int slot = lane; slot < count; slot += WARP) sum = fmaf(slots[slot].count, slots[slot].centre, sum);
    const float mean = over_lanes(sum, Sum{}, WARP) * p.per_element;
    Pair deviations{0.0f, 0.0f};
    for (int slot = lane; slot < count; slot += WARP) {
        const Moments m = slots[slot];
        const float off = m.centre - mean, moved = fmaf(m.count, off, m.deviations.first);
        if constexpr (SHIFTED<T>) deviations.first += moved;
        deviations.second += fmaf(off, moved + m.deviations.first, m.deviations.second);
    }
    if constexpr (SHIFTED<T>) deviations.first = over_lanes(deviations.first, Sum{}, WARP);
    deviations.second = over_lanes(deviations.second, Sum{}, WARP);
    return stats_of_deviations(mean, deviations, p.per_element, p.eps);
}

template <bool CLUSTER, typename T, int V>
__device__ Stats plain_stats(const Vec<T> (&tile)[V], const NormForward<T>& p, Mailbox<CLUSTER, float>& mailbox) {
    const float squares = sum_over(tile, [](float sum, float x) { return fmaf(x, x, sum); });
    return stats_of_squares(reduce_over_row(squares, Sum{}, mailbox) * p.per_element, p.eps);
}

// A vector of weight and of bias.
template <typename T>
struct Parameters {
    Vec<T> weight, bias;
};

// Vectors whose weight and bias are on their way at once: on one block they come from the L1.
template <bool CLUSTER>
constexpr int TOGETHER = CLUSTER ? 2 : 1;

// `gather(tile, share, row, live)` makes a row in registers, zeros past its end. Weight and bias come when they are needed,
// from the L1 or L2: every row wants the same.
template <typename T, bool CENTRED, int V, bool WHOLE, bool CLUSTER, typename Gather>
__device__ void norm_registers_of(const NormForward<T>& p, Gather&& gather) {
    __shared__ Mailbox<CLUSTER, std::conditional_t<CENTRED && CLUSTER, Moments, float>> mailbox;
    constexpr int E = Vec<T>::size, N = TOGETHER<CLUSTER>;
    const RowShare<CLUSTER> share(vectors_of<T>(p.length));
    share.open(mailbox);
    const bool live = share.row < p.count;
    const int64_t row = live ? share.row : 0;
    Vec<T> tile[V];
    gather(tile, share, row, live);
    share.meet();
    Stats stats;
    if constexpr (!CENTRED) stats = plain_stats(tile, p, mailbox);
    if constexpr (CENTRED && CLUSTER) stats = centred_stats<WHOLE>(tile, share, p, mailbox);
    if constexpr (CENTRED && !CLUSTER) stats = centred_stats<WHOLE>(tile, share, p);
    if (live && share.first == 0) store_stats<CENTRED>(p.stats, row, stats);
    stay_packed(tile);
    T* const out = p.output + p.out.start(row);
#pragma unroll
    for (int v = 0; v < V; v += N) {
        Parameters<T> parameters[N];
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const int first = share.at(v + i) * E;
            parameters[i].weight = load_parameter<WHOLE>(p.weight, p.parameter, first, p.length, 1.0f);
            if constexpr (CENTRED)
                parameters[i].bias = load_parameter<WHOLE>(p.bias, p.parameter, first, p.length, 0.0f);
        }
#pragma unroll
        for (int i = 0; i < N; ++i) {
            float x[E], scale[E], offset[E];
            unpack(tile[v + i], x);
            unpack(parameters[i].weight, scale);
            if constexpr (CENTRED) unpack(parameters[i].bias, offset);
#pragma unroll
            for (int e = 0; e < E; ++e) {
                x[e] = normalized<CENTRED, SHIFTED<T>>(x[e], stats);
                x[e] = CENTRED ? fmaf(x[e], scale[e], offset[e]) : x[e] * scale[e];
            }
            store_part<WHOLE>(out, p.out, pack<T>(x), v + i, share, live, p.length);
        }
    }
}

// Rows as they are, or with a RESIDUAL the sum of two, which is stored.
template <typename T, bool CENTRED, bool RESIDUAL, int V, bool WHOLE, bool CLUSTER>
__device__ void norm_registers(const NormForward<T>& p) {
    if (!exists_here<CLUSTER>()) return;
    const auto gather = [&](Vec<T>(&tile)[V], const RowShare<CLUSTER>& share, int64_t row, bool live) {
        load_row<WHOLE>(tile, p.input + p.in.start(row), p.in, share, live, p.length, 0.0f);
        if constexpr (RESIDUAL) {
            Vec<T> residual[V];
            load_row<WHOLE>(residual, p.residual + p.res.start(row), p.res, share, live, p.length, 0.0f);
#pragma unroll
            for (int v = 0; v < V; ++v) tile[v] = add_vec(tile[v], residual[v]);
            store_row<WHOLE>(p.sum + p.out.start(row), p.out, tile, share, live, p.length);
        }
    };
    norm_registers_of<T, CENTRED, V, WHOLE, CLUSTER>(p, gather);
}

}  // namespace kl
