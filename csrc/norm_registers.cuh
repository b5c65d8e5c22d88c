// Normalised rows in registers of the threads that share them, on one block or a cluster: the last two steps of the climb
// of layer_norm, rms_norm and add_rms_norm.
#pragma once

#include <type_traits>

#include "norm.cuh"

namespace kl {

// ---- forward -------------------------------------------------------------------------------------------------------

// Mean and deviations in two passes over registers: as exact as it gets, and no byte moves for it.
template <typename T>
using Deviations = std::conditional_t<SHIFTED<T>, Pair, float>;  // their sum and squares, or the squares

template <bool CENTRED, bool WHOLE, bool CLUSTER, typename T, int VECTORS>
__device__ Stats row_stats(Vec<T> (&tile)[VECTORS], const RowShare<CLUSTER>& share, const NormForward<T>& p,
                           Mailbox<CLUSTER, float>& of_sum, Mailbox<CLUSTER, Deviations<T>>& of_deviations, int turn) {
    constexpr int E = Vec<T>::size;
    float x[E], sum = 0.0f;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        unpack(tile[v], x);
        float partial = 0.0f;
#pragma unroll
        for (int e = 0; e < E; ++e) partial = CENTRED ? partial + x[e] : fmaf(x[e], x[e], partial);
        sum += partial;
    }
    sum = reduce_over_row<CLUSTER>(sum, Sum{}, of_sum, turn);
    if constexpr (!CENTRED) return stats_of_squares(sum * p.per_element, p.eps);
    const float mean = sum * p.per_element;
    stay_packed(tile);
    Deviations<T> deviations{};
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        unpack(tile[v], x);
        const int first = (share.first + v * share.step) * E;
        const float centre =
            first < static_cast<int>(p.length) ? mean : 0.0f;  // past the end there are zeros, which are not to deviate
        float lost = 0.0f, squares = 0.0f;
#pragma unroll
        for (int e = 0; e < E; ++e) {
            const float deviation = x[e] - (WHOLE || first + e < static_cast<int>(p.length) ? centre : 0.0f);
            if constexpr (SHIFTED<T>) lost += deviation;
            squares = fmaf(deviation, deviation, squares);
        }
        if constexpr (SHIFTED<T>) {
            deviations = PairSum{}(deviations, {lost, squares});
        } else {
            deviations += squares;
        }
    }
    if constexpr (SHIFTED<T>) {
        deviations = reduce_over_row<CLUSTER>(deviations, PairSum{}, of_deviations, turn);
        return stats_of_deviations(mean, deviations, p.per_element, p.eps);
    } else {
        deviations = reduce_over_row<CLUSTER>(deviations, Sum{}, of_deviations, turn);
        return {mean, rsqrtf(deviations * p.per_element + p.eps), 0.0f};
    }
}

// `gather(tile, share, row, live)` makes a row in registers, zeros past its end. Weight and bias come when they are needed,
// from the L1: every row of the SM wants the same.
template <typename T, bool CENTRED, int V, bool WHOLE, bool CLUSTER, typename Gather>
__device__ void norm_registers_of(const NormForward<T>& p, Gather&& gather) {
    __shared__ Mailbox<CLUSTER, float> of_sum[CENTRED ? 1 : 2];
    __shared__ Mailbox<CLUSTER, Deviations<T>> of_deviations;
    constexpr int E = Vec<T>::size, TURNS = CENTRED ? 1 : 2;
    const RowShare<CLUSTER> share;
    if constexpr (CENTRED) share.open(of_sum[0], of_deviations);
    if constexpr (!CENTRED) share.open(of_sum[0], of_sum[1]);
    share.template each_row<STAYS<WHOLE, CLUSTER>>(p.count, [&](int64_t row, bool live, int turn) {
        Vec<T> tile[V];
        gather(tile, share, row, live);
        if (turn == 0) share.meet();
        const Stats stats =
            row_stats<CENTRED, WHOLE>(tile, share, p, of_sum[turn % TURNS], of_deviations, turn / TURNS);
        if (live && share.first == 0) store_stats<CENTRED>(p.stats, row, stats);
        stay_packed(tile);
        T* const out = p.output + p.out.start(row);
#pragma unroll
        for (int v = 0; v < V; ++v) {
            const int first = (share.first + v * share.step) * E;
            if (first >= static_cast<int>(p.length)) break;
            float x[E], scale[E], offset[E];
            unpack(tile[v], x);
            unpack(load_parameter<WHOLE>(p.weight, p.parameter, first, p.length, 1.0f), scale);
            if constexpr (CENTRED) unpack(load_parameter<WHOLE>(p.bias, p.parameter, first, p.length, 0.0f), offset);
#pragma unroll
            for (int e = 0; e < E; ++e) {
                x[e] = normalized<CENTRED, SHIFTED<T>>(x[e], stats);
                x[e] = CENTRED ? fmaf(x[e], scale[e], offset[e]) : x[e] * scale[e];
            }
            store_part<WHOLE>(out, p.out, pack<T>(x), v, share, live, p.length);
        }
    });
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
