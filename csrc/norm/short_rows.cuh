// Short normalised rows. All rows of a thread have the same parameters.
#pragma once

#include "norm/norm.cuh"
#include "reduce/short_rows.cuh"

namespace kl {

// Whether a thread has registers for its parameters beside its rows: they then come with the first loads.
template <typename T, bool CENTRED, int ROWS>
constexpr bool SHORT_EARLY = SHORT_VALUES * sizeof(T) / 4 + SHORT_VECTORS<T, ROWS> * (CENTRED ? 8 : 4) <= 48;

// As SHORT_BLOCKS: the most that leave registers enough for no spill.
template <typename T, bool CENTRED, bool RESIDUAL, int ROWS>
constexpr int SHORT_NORM_BLOCKS = sizeof(T) == 4 && (CENTRED || RESIDUAL) ? 10
                                  : CENTRED                               ? (ROWS == SHORT_ROWS ? 14 : 12)
                                                                          : SHORT_BLOCKS;

// No more than is looked at, all in one place: a launch waits for each line of its arguments. Steps are elements from row
// to row, of output and sum alike.
template <typename T>
struct ShortNorm {
    T *output, *sum;
    const T *input, *residual, *weight, *bias;
    float* stats;
    int64_t out_step, in_step, res_step, count;
    int length;
    float eps, per_element;
};

template <typename T>
ShortNorm<T> short_norm(const NormForward<T>& p) {
    return {p.output, p.sum,        p.input,     p.residual,   p.weight, p.bias,
            p.stats,  p.out.step(), p.in.step(), p.res.step(), p.count,  static_cast<int>(p.length),
            p.eps,    p.per_element};
}

// In two passes over registers, the second about each row's mean.
template <typename T, int ROWS, bool TEAM, int V>
__device__ void centred_stats(Stats (&stats)[ROWS], const Vec<T> (&tile)[ROWS][V], const ShortShare<ROWS, TEAM>& share,
                              const ShortNorm<T>& p) {
    __shared__ TeamSlots<TEAM ? ROWS : 0, float> of_sums, of_squares;
    __shared__ TeamSlots<TEAM && SHIFTED<T> ? ROWS : 0, Pair> of_deviations;
    float sums[ROWS];
    Pair deviations[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) sums[r] = sum_of(tile[r]);
    each_over_rows(sums, Sum{}, share, of_sums);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        stats[r].mean = sums[r] * p.per_element;
        deviations[r] = deviations_from<true, SHIFTED<T>>(stats[r].mean, tile[r], share, share.length);
        sums[r] = deviations[r].second;
    }
    if constexpr (SHIFTED<T>) each_over_rows(deviations, PairSum{}, share, of_deviations);
    if constexpr (!SHIFTED<T>) each_over_rows(sums, Sum{}, share, of_squares);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        if constexpr (!SHIFTED<T>) deviations[r].second = sums[r];
        stats[r] = stats_of_deviations(stats[r].mean, deviations[r], p.per_element, p.eps);
    }
}

template <typename T, int ROWS, bool TEAM, int V>
__device__ void plain_stats(Stats (&stats)[ROWS], const Vec<T> (&tile)[ROWS][V], const ShortShare<ROWS, TEAM>& share,
                            const ShortNorm<T>& p) {
    __shared__ TeamSlots<TEAM ? ROWS : 0, float> of_squares;
    float squares[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) squares[r] = sum_over(tile[r], [](float sum, float x) { return fmaf(x, x, sum); });
    each_over_rows(squares, Sum{}, share, of_squares);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) stats[r] = stats_of_squares(squares[r] * p.per_element, p.eps);
}

// `gather(tile, meanwhile)` makes the thread's rows, zeros past their end, and calls `meanwhile()` when it has asked for all
// it needs: parameters that are to come EARLY are asked for there.
template <typename T, bool CENTRED, int ROWS, bool TEAM, int V, bool EARLY, typename Gather>
__device__ void norm_short_of(const ShortNorm<T>& p, const ShortShare<ROWS, TEAM>& share, Gather&& gather) {
    constexpr int E = Vec<T>::size;
    Vec<T> tile[ROWS][V], weight[V], bias[V];
    const auto fetch_parameters = [&](int v) {
        weight[v] = share.parameter(p.weight, v, 1.0f);
        if constexpr (CENTRED) bias[v] = share.parameter(p.bias, v, 0.0f);
    };
    gather(tile, [&] {
#pragma unroll
        for (int v = 0; v < V; ++v) {
            if constexpr (EARLY) fetch_parameters(v);
        }
    });
    Stats stats[ROWS];
    if constexpr (CENTRED) centred_stats(stats, tile, share, p);
    if constexpr (!CENTRED) plain_stats(stats, tile, share, p);
    if (share.lane == 0) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            if (share.live(r)) store_stats<CENTRED>(p.stats, share.row + r * share.apart, stats[r]);
        }
    }
    if constexpr (!EARLY) fetch_parameters(0);
#pragma unroll
    for (int v = 0; v < V; ++v) {
        float x[E], scale[E], offset[E];
        unpack(weight[v], scale);
        if constexpr (CENTRED) unpack(bias[v], offset);
        if (!EARLY && v + 1 < V) fetch_parameters(v + 1);  // before the stores, over which no load is moved
        T* to = share.begin(p.output, p.out_step, v);
#pragma unroll
        for (int r = 0; r < ROWS; ++r, to += share.next(p.out_step)) {
            unpack(tile[r][v], x);
            Stats here = stats[r];
            if constexpr (CENTRED) here.mean = share.template has<T>(v, share.length) ? here.mean : 0.0f;
#pragma unroll
            for (int e = 0; e < E; ++e) {
                x[e] = normalized<CENTRED, SHIFTED<T>>(x[e], here);
                x[e] = CENTRED ? fmaf(x[e], scale[e], offset[e]) : x[e] * scale[e];
            }
            share.store(to, r, v, pack<T>(x));
            keep_order();
        }
    }
}

// Rows as they are, or with a RESIDUAL the sum of two, which is stored.
template <typename T, bool CENTRED, bool RESIDUAL, int ROWS, bool TEAM, int V, bool EARLY>
__device__ void norm_short_or_team(const ShortNorm<T>& p) {
    begin_early();
    const ShortShare<ROWS, TEAM> share(p.count, p.length);
    const auto gather = [&](Vec<T>(&tile)[ROWS][V], auto&& meanwhile) {
        share.load(tile, p.input, p.in_step, 0.0f);
        [[maybe_unused]] Vec<T> residual[RESIDUAL ? ROWS : 1][V];
        if constexpr (RESIDUAL) share.load(residual, p.residual, p.res_step, 0.0f);
        meanwhile();
        if constexpr (RESIDUAL) {
            T* to = share.begin(p.sum, p.out_step);
#pragma unroll
            for (int r = 0; r < ROWS; ++r, to += share.next(p.out_step)) {
#pragma unroll
                for (int v = 0; v < V; ++v) {
                    tile[r][v] = add_vec(tile[r][v], residual[r][v]);
                    share.store(to + v * share.lanes * Vec<T>::size, r, v, tile[r][v]);
                }
            }
        }
    };
    norm_short_of<T, CENTRED, ROWS, TEAM, V, EARLY>(p, share, gather);
}

template <typename T, bool CENTRED, bool RESIDUAL, int ROWS>
__device__ void norm_short(const ShortNorm<T>& p) {
    norm_short_or_team<T, CENTRED, RESIDUAL, ROWS, false, SHORT_VECTORS<T, ROWS>, SHORT_EARLY<T, CENTRED, ROWS>>(p);
}

template <typename T, bool CENTRED, bool RESIDUAL, typename TEAM>
__device__ void norm_team(const ShortNorm<T>& p) {
    constexpr bool EARLY = TEAM::VECTORS * (CENTRED ? 8 : 4) <= 16;
    norm_short_or_team<T, CENTRED, RESIDUAL, TEAM::ROWS, true, TEAM::VECTORS, EARLY>(p);
}

}  // namespace kl
