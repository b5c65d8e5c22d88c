// layer_norm, rung 3 of 6: registers
// rms_norm, add_rms_norm, rung 3 of 5: registers
// Idea      The row stays in the registers of the threads that share it: a part of a warp, a warp, or a block. Mean and
//           deviations are two passes over registers. Two kernels: short_rows.cuh for short rows that lie evenly apart,
//           this file for all others (any strides).
// Predicts  A row is read once and written once: layer_norm's 4 passes over memory become 2, rms_norm's 3 become 2.
// Limit now Rows that fill an SM's registers leave too few loads in flight; above 8192 elements see `smem_pipeline`.
// Next      `smem_pipeline`: rows wait in shared memory, so that more threads fit on an SM.
// Backward  backward.cuh, shared by this rung and all that follow.
#pragma once

#include <type_traits>

#include "norm/norm.cuh"
#include "norm/short_rows.cuh"

namespace kl {

// ---- forward -------------------------------------------------------------------------------------------------------

// On one block: two passes over registers, the second about the row's mean.
template <bool VECTORIZED, typename T, int V>
__device__ Stats centred_stats(Vec<T> (&tile)[V], const RowPartition<false>& partition, const NormForward<T>& p) {
    __shared__ ReduceSmem<false, float> of_sum, of_squares;
    __shared__ ReduceSmem<false, Pair> of_deviations;
    const float mean = reduce_over_row(sum_of(tile), Sum{}, of_sum) * p.per_element;
    stay_packed(tile);
    // The first sum is not zero, because the mean is rounded.
    Pair deviations = deviations_from<VECTORIZED, SHIFTED<T>>(mean, tile, partition, p.length);
    if constexpr (SHIFTED<T>) deviations = reduce_over_row(deviations, PairSum{}, of_deviations);
    if constexpr (!SHIFTED<T>) deviations.second = reduce_over_row(deviations.second, Sum{}, of_squares);
    return stats_of_deviations(mean, deviations, p.per_element, p.eps);
}

// Partial statistics of some elements of a row: their count, a centre near them, and the sums of deviations from it and
// of their squares.
struct alignas(16) Moments {
    float count, centre;
    Pair deviations;

    // The sums about another centre.
    __device__ Pair about(float other) const {
        const float off = centre - other, moved = fmaf(count, off, deviations.first);
        return {moved, fmaf(off, moved + deviations.first, deviations.second)};
    }
};

// In a cluster, where an exchange costs more: one pass and one exchange. Each warp takes deviations from the mean of
// its first vectors, which arrive first. Those are an eighth of the warp's elements. If their mean lies far from the
// warp's, their own deviations outweigh what cancels: at most three bits are lost. The row's moments follow from those
// of all warps (Chan, Golub and LeVeque, Updating Formulae and a Pairwise Algorithm for Computing Sample Variances,
// 1979). For 16-bit elements they are taken about the first warp's centre: the cancellation there is far below the
// elements' spacing.
template <bool VECTORIZED, typename T, int V, typename F>
__device__ Stats centred_stats(Vec<T> (&tile)[V], const RowPartition<true>& partition, const NormForward<T>& p,
                               ReduceSmem<true, Moments>& reduce_smem, F&& meanwhile) {
    constexpr int E = Vec<T>::size;
    const int lane = threadIdx.x % WARP;
    const int left = min(partition.end * E, static_cast<int>(p.length)) - (partition.first - lane) * E;
    const auto inside = [&](int v) { return max(min(left - v * partition.step() * E, WARP * E), 0); };
    int elements = 0;
#pragma unroll
    for (int v = 0; v < V; ++v) elements += inside(v);
    const Vec<T>(&head)[1] = reinterpret_cast<const Vec<T>(&)[1]>(tile[0]);
    const float sum = over_lanes(sum_of(head), Sum{}, WARP);
    Moments own{static_cast<float>(elements), 0.0f, {}};
    if (elements > 0) own.centre = sum * rcp_approx(static_cast<float>(inside(0)));
    own.deviations =
        over_lanes(deviations_from<VECTORIZED, true>(own.centre, tile, partition, p.length), PairSum{}, WARP);

    const Moments* partials;
    const int count = exchange_over_row(own, reduce_smem, partials, meanwhile);
    float mean = partials[0].centre;
    Pair deviations{0.0f, 0.0f};
    if constexpr (SHIFTED<T>) {
        float more = 0.0f;
#pragma unroll 1
        for (int i = lane; i < count; i += WARP) more += partials[i].about(mean).first;
        mean += over_lanes(more, Sum{}, WARP) * p.per_element;
    }
#pragma unroll 1
    for (int i = lane; i < count; i += WARP) deviations = PairSum{}(deviations, partials[i].about(mean));
    deviations = over_lanes(deviations, PairSum{}, WARP);
    Stats stats = stats_of_deviations(mean, deviations, p.per_element, p.eps);
    if constexpr (!SHIFTED<T>) stats.mean = fmaf(deviations.first, p.per_element, mean);
    return stats;
}

template <bool CLUSTER, typename T, int V, typename F>
__device__ Stats plain_stats(const Vec<T> (&tile)[V], const NormForward<T>& p, ReduceSmem<CLUSTER, float>& reduce_smem,
                             F&& meanwhile) {
    const float squares = sum_over(tile, [](float sum, float x) { return fmaf(x, x, sum); });
    return stats_of_squares(reduce_over_row(squares, Sum{}, reduce_smem, meanwhile) * p.per_element, p.eps);
}

/// Normalises the row of this thread. `gather(tile, partition, row, has_row)` loads it into registers, zeros past its end.
/// Weight and bias, which come from the L1 or L2, are loaded when needed or one vector AHEAD: ptxas moves only CONSTANT
/// loads across stores.
template <typename T, bool IS_LAYERNORM, int V, bool VECTORIZED, bool CLUSTER, bool AHEAD, typename Gather>
__device__ void norm_registers_of(const NormForward<T>& p, Gather&& gather) {
    __shared__ ReduceSmem<CLUSTER, std::conditional_t<IS_LAYERNORM && CLUSTER, Moments, float>> reduce_smem;
    constexpr int E = Vec<T>::size;
    const RowPartition<CLUSTER> partition(vectors_of<T>(p.length));
    partition.open(reduce_smem);
    if constexpr (!CLUSTER) pdl_begin();
    const bool has_row = partition.has_row(p.count);
    const int64_t row = has_row ? partition.row : 0;
    Vec<T> tile[V];
    gather(tile, partition, row, has_row);
    partition.meet();
    Vec<T> weight, bias;
    const auto fetch_parameters = [&](int v) {
        const int first = partition.at(v) * E;
        weight = load_parameter<VECTORIZED, CLUSTER>(p.weight, p.parameter, first, p.length, 1.0f);
        if constexpr (IS_LAYERNORM)
            bias = load_parameter<VECTORIZED, CLUSTER>(p.bias, p.parameter, first, p.length, 0.0f);
    };
    const auto meanwhile = [&] { fetch_parameters(0); };
    Stats stats;
    if constexpr (!IS_LAYERNORM) stats = plain_stats(tile, p, reduce_smem, meanwhile);
    if constexpr (IS_LAYERNORM && CLUSTER)
        stats = centred_stats<VECTORIZED>(tile, partition, p, reduce_smem, meanwhile);
    if constexpr (IS_LAYERNORM && !CLUSTER) stats = centred_stats<VECTORIZED>(tile, partition, p);
    if (has_row && partition.first == 0) store_stats<IS_LAYERNORM>(p.stats, row, stats);
    stay_packed(tile);
    T* const out = p.output + p.out.start(row);
    if constexpr (AHEAD) fetch_parameters(0);
#pragma unroll
    for (int v = 0; v < V; ++v) {
        if (!AHEAD && (!CLUSTER || v > 0)) fetch_parameters(v);
        float x[E], scale[E], offset[E];
        unpack(tile[v], x);
        unpack(weight, scale);
        if constexpr (IS_LAYERNORM) unpack(bias, offset);
        if (AHEAD && v + 1 < V) fetch_parameters(v + 1);
#pragma unroll
        for (int e = 0; e < E; ++e) {
            x[e] = normalized<IS_LAYERNORM, SHIFTED<T>>(x[e], stats);
            x[e] = IS_LAYERNORM ? fmaf(x[e], scale[e], offset[e]) : x[e] * scale[e];
        }
        store_part<VECTORIZED>(out, p.out, pack<T>(x), v, partition, has_row, p.length);
        keep_order();
    }
}

// Rows of one operand or, with HAS_RESIDUAL, the sum of two, which is stored.
template <typename T, bool IS_LAYERNORM, bool HAS_RESIDUAL, int V, bool VECTORIZED, bool CLUSTER>
__device__ void norm_registers(const NormForward<T>& p) {
    if (!exists_here<CLUSTER>()) return;
    const auto gather = [&](Vec<T>(&tile)[V], const RowPartition<CLUSTER>& partition, int64_t row, bool has_row) {
        load_row<VECTORIZED>(tile, p.input + p.in.start(row), p.in, partition, has_row, p.length, 0.0f);
        if constexpr (HAS_RESIDUAL) {
            Vec<T> residual[V];
            load_row<VECTORIZED>(residual, p.residual + p.res.start(row), p.res, partition, has_row, p.length, 0.0f);
#pragma unroll
            for (int v = 0; v < V; ++v) tile[v] = add_vec(tile[v], residual[v]);
            store_row<VECTORIZED>(p.sum + p.out.start(row), p.out, tile, partition, has_row, p.length);
        }
    };
    norm_registers_of<T, IS_LAYERNORM, V, VECTORIZED, CLUSTER, VECTORIZED && !CLUSTER>(p, gather);
}

template <class Op, typename T, int V, bool VECTORIZED>
__global__ void __launch_bounds__(ROW_THREADS, BLOCKS_AN_SM<VECTORIZED>)
    norm_registers_kernel(__grid_constant__ const NormForward<T> p) {
    norm_registers<T, Op::IS_LAYERNORM, Op::HAS_RESIDUAL, V, VECTORIZED, false>(p);
}

// ---- host ----------------------------------------------------------------------------------------------------------

// Vectors per thread of a long row. With a residual a thread holds the vectors of both operands for a while.
template <class Op>
constexpr int LONG_ROW_VECTORS = Op::HAS_RESIDUAL ? ROW_VECTORS : WIDE_VECTORS;

// Rows of at most this many vectors take twice the threads instead. The work per thread and row is smaller without a
// mean.
template <class Op>
constexpr int64_t NARROW = Op::IS_LAYERNORM ? 512 : 256;

/// Both kernels keep rows in registers; short_rows.cuh is the instance for rows that lie evenly apart. The choice stays here,
/// because it needs the strides of each operand, which Python would read once more in every call.
template <class Op, typename T>
void launch_registers(const NormForward<T>& p, bool vectorized, const Launch& launch) {
    if (are_even(vectorized, p.in, p.res, p.out) && launch_short_rows<Op>(p, launch)) return;
    const int most = vectorized ? LONG_ROW_VECTORS<Op> : ROW_VECTORS;
    const int64_t vectors = ceil_div(p.length, Vec<T>::size);
    check_takes(vectors <= int64_t{ROW_THREADS} * most, Op::NAME, p.length);
    const RowLaunch shape = row_launch(vectors, /*clusters=*/true, most, NARROW<Op>, /*whole_warps=*/true);
    with_row_shape<ROW_VECTORS, LONG_ROW_VECTORS<Op>>(shape, vectorized, [&](auto v, auto w, auto cluster) {
        if constexpr (!cluster()) {
            launch_rows(norm_registers_kernel<Op, T, v(), w()>, shape, shape.grid(p.count), 0, launch, p);
        }
    });
}

}  // namespace kl
