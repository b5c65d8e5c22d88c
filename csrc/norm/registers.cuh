// Normalised rows in registers of the threads that share them, on one block or a cluster: the last two steps of the climb
// of layer_norm, rms_norm and add_rms_norm.
#pragma once

#include <type_traits>

#include "norm/norm.cuh"

namespace kl {

// ---- forward -------------------------------------------------------------------------------------------------------

// On one block: two passes over registers, the second about the row's mean.
template <bool WHOLE, typename T, int V>
__device__ Stats centred_stats(Vec<T> (&tile)[V], const RowShare<false>& share, const NormForward<T>& p) {
    __shared__ Mailbox<false, float> of_sum, of_squares;
    __shared__ Mailbox<false, Pair> of_deviations;
    const float mean = reduce_over_row(sum_of(tile), Sum{}, of_sum) * p.per_element;
    stay_packed(tile);
    // The first would be zero, but that the mean is rounded.
    Pair deviations = deviations_from<WHOLE, SHIFTED<T>>(mean, tile, share, p.length);
    if constexpr (SHIFTED<T>) deviations = reduce_over_row(deviations, PairSum{}, of_deviations);
    if constexpr (!SHIFTED<T>) deviations.second = reduce_over_row(deviations.second, Sum{}, of_squares);
    return stats_of_deviations(mean, deviations, p.per_element, p.eps);
}

// Of some of a row's elements: how many there are, a value among them, and the sums of their deviations from it and of
// their squares.
struct alignas(16) Moments {
    float count, centre;
    Pair deviations;

    // The same about another centre, of which the count is not wanted.
    __device__ Pair about(float other) const {
        const float off = centre - other, moved = fmaf(count, off, deviations.first);
        return {moved, fmaf(off, moved + deviations.first, deviations.second)};
    }
};

// In a cluster, where what a thread waits for costs more: one pass and one meeting. A warp takes the deviations from the
// mean of its first vectors, which are on hand before the others. However far that mean may lie from the warp's, it is so
// of an eighth of the warp's elements, whose own deviations then outweigh what cancels: three bits are lost at most.
// From the moments of all warps those of the row follow (Chan, Golub and LeVeque, Updating Formulae and a Pairwise
// Algorithm for Computing Sample Variances, 1979), of 16-bit elements about the first warp's centre: what cancels there,
// one part in as many as a row has warps' vectors, is far below their spacing.
template <bool WHOLE, typename T, int V, typename F>
__device__ Stats centred_stats(Vec<T> (&tile)[V], const RowShare<true>& share, const NormForward<T>& p,
                               Mailbox<true, Moments>& mailbox, F&& meanwhile) {
    constexpr int E = Vec<T>::size;
    const int lane = threadIdx.x % WARP;
    const int left = min(share.end * E, static_cast<int>(p.length)) - (share.first - lane) * E;
    const auto inside = [&](int v) { return max(min(left - v * share.step() * E, WARP * E), 0); };
    int elements = 0;
#pragma unroll
    for (int v = 0; v < V; ++v) elements += inside(v);
    const Vec<T>(&head)[1] = reinterpret_cast<const Vec<T>(&)[1]>(tile[0]);
    const float sum = over_lanes(sum_of(head), Sum{}, WARP);
    Moments own{static_cast<float>(elements), 0.0f, {}};
    if (elements > 0) own.centre = sum * rcp_approx(static_cast<float>(inside(0)));
    own.deviations = over_lanes(deviations_from<WHOLE, true>(own.centre, tile, share, p.length), PairSum{}, WARP);

    const Moments* slots;
    const int count = leave_for_row(own, mailbox, slots, meanwhile);
    float mean = slots[0].centre;
    Pair deviations{0.0f, 0.0f};
    if constexpr (SHIFTED<T>) {
        float more = 0.0f;
#pragma unroll 1
        for (int slot = lane; slot < count; slot += WARP) more += slots[slot].about(mean).first;
        mean += over_lanes(more, Sum{}, WARP) * p.per_element;
    }
#pragma unroll 1
    for (int slot = lane; slot < count; slot += WARP) deviations = PairSum{}(deviations, slots[slot].about(mean));
    deviations = over_lanes(deviations, PairSum{}, WARP);
    Stats stats = stats_of_deviations(mean, deviations, p.per_element, p.eps);
    if constexpr (!SHIFTED<T>) stats.mean = fmaf(deviations.first, p.per_element, mean);
    return stats;
}

template <bool CLUSTER, typename T, int V, typename F>
__device__ Stats plain_stats(const Vec<T> (&tile)[V], const NormForward<T>& p, Mailbox<CLUSTER, float>& mailbox,
                             F&& meanwhile) {
    const float squares = sum_over(tile, [](float sum, float x) { return fmaf(x, x, sum); });
    return stats_of_squares(reduce_over_row(squares, Sum{}, mailbox, meanwhile) * p.per_element, p.eps);
}

// `gather(tile, share, row, live)` makes a row in registers, zeros past its end. Weight and bias come when they are needed,
// or one vector AHEAD, since ptxas moves no load over a store but of what is CONSTANT, from the L1 or L2: every row wants
// the same.
template <typename T, bool CENTRED, int V, bool WHOLE, bool CLUSTER, bool AHEAD, typename Gather>
__device__ void norm_registers_of(const NormForward<T>& p, Gather&& gather) {
    __shared__ Mailbox<CLUSTER, std::conditional_t<CENTRED && CLUSTER, Moments, float>> mailbox;
    constexpr int E = Vec<T>::size;
    const RowShare<CLUSTER> share(vectors_of<T>(p.length));
    share.open(mailbox);
    if constexpr (!CLUSTER) begin_early();
    const bool live = share.live(p.count);
    const int64_t row = live ? share.row : 0;
    Vec<T> tile[V];
    gather(tile, share, row, live);
    share.meet();
    Vec<T> weight, bias;
    const auto fetch_parameters = [&](int v) {
        const int first = share.at(v) * E;
        weight = load_parameter<WHOLE, CLUSTER>(p.weight, p.parameter, first, p.length, 1.0f);
        if constexpr (CENTRED) bias = load_parameter<WHOLE, CLUSTER>(p.bias, p.parameter, first, p.length, 0.0f);
    };
    const auto meanwhile = [&] { fetch_parameters(0); };
    Stats stats;
    if constexpr (!CENTRED) stats = plain_stats(tile, p, mailbox, meanwhile);
    if constexpr (CENTRED && CLUSTER) stats = centred_stats<WHOLE>(tile, share, p, mailbox, meanwhile);
    if constexpr (CENTRED && !CLUSTER) stats = centred_stats<WHOLE>(tile, share, p);
    if (live && share.first == 0) store_stats<CENTRED>(p.stats, row, stats);
    stay_packed(tile);
    T* const out = p.output + p.out.start(row);
    if constexpr (AHEAD) fetch_parameters(0);
#pragma unroll
    for (int v = 0; v < V; ++v) {
        if (!AHEAD && (!CLUSTER || v > 0)) fetch_parameters(v);
        float x[E], scale[E], offset[E];
        unpack(tile[v], x);
        unpack(weight, scale);
        if constexpr (CENTRED) unpack(bias, offset);
        if (AHEAD && v + 1 < V) fetch_parameters(v + 1);
#pragma unroll
        for (int e = 0; e < E; ++e) {
            x[e] = normalized<CENTRED, SHIFTED<T>>(x[e], stats);
            x[e] = CENTRED ? fmaf(x[e], scale[e], offset[e]) : x[e] * scale[e];
        }
        store_part<WHOLE>(out, p.out, pack<T>(x), v, share, live, p.length);
        keep_order();
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
    norm_registers_of<T, CENTRED, V, WHOLE, CLUSTER, WHOLE && !CLUSTER>(p, gather);
}

}  // namespace kl
