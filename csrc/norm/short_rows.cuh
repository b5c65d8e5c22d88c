// layer_norm, rms_norm, add_rms_norm: the kernels of rung `registers` for rows that lie evenly apart and consist of
// whole vectors. Short rows: a warp or a part of it per row, several rows per thread. Longer 16-bit rows: all threads
// of a block share a few rows (BY_BLOCK), so that a thread loads its parameters once for all of them.
#pragma once

#include "norm/norm.cuh"
#include "reduce/short_rows.cuh"

namespace kl {

// Whether registers suffice to load the parameters together with the rows.
template <typename T, bool IS_LAYERNORM, int ROWS>
constexpr bool SHORT_PRELOAD_PARAMS =
    SHORT_VALUES * sizeof(T) / 4 + SHORT_VECTORS<T, ROWS> * (IS_LAYERNORM ? 8 : 4) <= 48;

// Blocks per SM, as SHORT_BLOCKS: the most for which ptxas spills nothing.
template <typename T, bool IS_LAYERNORM, bool HAS_RESIDUAL, int ROWS>
constexpr int SHORT_NORM_BLOCKS = sizeof(T) == 4 && (IS_LAYERNORM || HAS_RESIDUAL) ? 10
                                  : IS_LAYERNORM                                   ? (ROWS == SHORT_ROWS ? 14 : 12)
                                                                                   : SHORT_BLOCKS;

// Only the arguments that kernels of evenly spaced rows read, in one place: a launch waits for each line of its
// arguments. Steps are elements from row to row; `sum` has the step of `output`.
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

// Two passes over registers, the second about each row's mean.
template <typename T, int ROWS, bool BY_BLOCK, int V>
__device__ void centred_stats(Stats (&stats)[ROWS], const Vec<T> (&tile)[ROWS][V],
                              const MultiRowPartition<ROWS, BY_BLOCK>& partition, const ShortNorm<T>& p) {
    __shared__ BlockReduceSmem<BY_BLOCK ? ROWS : 0, float> of_sums, of_squares;
    __shared__ BlockReduceSmem<BY_BLOCK && SHIFTED<T> ? ROWS : 0, Pair> of_deviations;
    float sums[ROWS];
    Pair deviations[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) sums[r] = sum_of(tile[r]);
    each_over_rows(sums, Sum{}, partition, of_sums);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        stats[r].mean = sums[r] * p.per_element;
        deviations[r] = deviations_from<true, SHIFTED<T>>(stats[r].mean, tile[r], partition, partition.length);
        sums[r] = deviations[r].second;
    }
    if constexpr (SHIFTED<T>) each_over_rows(deviations, PairSum{}, partition, of_deviations);
    if constexpr (!SHIFTED<T>) each_over_rows(sums, Sum{}, partition, of_squares);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        if constexpr (!SHIFTED<T>) deviations[r].second = sums[r];
        stats[r] = stats_of_deviations(stats[r].mean, deviations[r], p.per_element, p.eps);
    }
}

template <typename T, int ROWS, bool BY_BLOCK, int V>
__device__ void plain_stats(Stats (&stats)[ROWS], const Vec<T> (&tile)[ROWS][V],
                            const MultiRowPartition<ROWS, BY_BLOCK>& partition, const ShortNorm<T>& p) {
    __shared__ BlockReduceSmem<BY_BLOCK ? ROWS : 0, float> of_squares;
    float squares[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) squares[r] = sum_over(tile[r], [](float sum, float x) { return fmaf(x, x, sum); });
    each_over_rows(squares, Sum{}, partition, of_squares);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) stats[r] = stats_of_squares(squares[r] * p.per_element, p.eps);
}

/// Normalises this thread's rows. `gather(tile, meanwhile)` fills them, zeros past their end, and calls `meanwhile()`
/// once all its loads are issued. With PRELOAD_PARAMS that call issues the loads of the parameters.
template <typename T, bool IS_LAYERNORM, int ROWS, bool BY_BLOCK, int V, bool PRELOAD_PARAMS, typename Gather>
__device__ void norm_short_of(const ShortNorm<T>& p, const MultiRowPartition<ROWS, BY_BLOCK>& partition,
                              Gather&& gather) {
    constexpr int E = Vec<T>::size;
    Vec<T> tile[ROWS][V], weight[V], bias[V];
    const auto fetch_parameters = [&](int v) {
        weight[v] = partition.parameter(p.weight, v, 1.0f);
        if constexpr (IS_LAYERNORM) bias[v] = partition.parameter(p.bias, v, 0.0f);
    };
    gather(tile, [&] {
#pragma unroll
        for (int v = 0; v < V; ++v) {
            if constexpr (PRELOAD_PARAMS) fetch_parameters(v);
        }
    });
    Stats stats[ROWS];
    if constexpr (IS_LAYERNORM) centred_stats(stats, tile, partition, p);
    if constexpr (!IS_LAYERNORM) plain_stats(stats, tile, partition, p);
    if (partition.lane == 0) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            if (partition.has_row(r)) store_stats<IS_LAYERNORM>(p.stats, partition.row + r * partition.apart, stats[r]);
        }
    }
    if constexpr (!PRELOAD_PARAMS) fetch_parameters(0);
#pragma unroll
    for (int v = 0; v < V; ++v) {
        float x[E], scale[E], offset[E];
        unpack(weight[v], scale);
        if constexpr (IS_LAYERNORM) unpack(bias[v], offset);
        if (!PRELOAD_PARAMS && v + 1 < V)
            fetch_parameters(v + 1);  // before the stores: ptxas moves no load across them
        T* to = partition.begin(p.output, p.out_step, v);
#pragma unroll
        for (int r = 0; r < ROWS; ++r, to += partition.next(p.out_step)) {
            unpack(tile[r][v], x);
            Stats here = stats[r];
            if constexpr (IS_LAYERNORM) here.mean = partition.template has<T>(v, partition.length) ? here.mean : 0.0f;
#pragma unroll
            for (int e = 0; e < E; ++e) {
                x[e] = normalized<IS_LAYERNORM, SHIFTED<T>>(x[e], here);
                x[e] = IS_LAYERNORM ? fmaf(x[e], scale[e], offset[e]) : x[e] * scale[e];
            }
            partition.store(to, r, v, pack<T>(x));
            keep_order();
        }
    }
}

// Rows of one operand or, with HAS_RESIDUAL, the sum of two, which is stored.
template <typename T, bool IS_LAYERNORM, bool HAS_RESIDUAL, int ROWS, bool BY_BLOCK, int V, bool PRELOAD_PARAMS>
__device__ void norm_short(const ShortNorm<T>& p) {
    pdl_begin();
    const MultiRowPartition<ROWS, BY_BLOCK> partition(p.count, p.length);
    const auto gather = [&](Vec<T>(&tile)[ROWS][V], auto&& meanwhile) {
        partition.load(tile, p.input, p.in_step, 0.0f);
        [[maybe_unused]] Vec<T> residual[HAS_RESIDUAL ? ROWS : 1][V];
        if constexpr (HAS_RESIDUAL) partition.load(residual, p.residual, p.res_step, 0.0f);
        meanwhile();
        if constexpr (HAS_RESIDUAL) {
            T* to = partition.begin(p.sum, p.out_step);
#pragma unroll
            for (int r = 0; r < ROWS; ++r, to += partition.next(p.out_step)) {
#pragma unroll
                for (int v = 0; v < V; ++v) {
                    tile[r][v] = add_vec(tile[r][v], residual[r][v]);
                    partition.store(to + v * partition.lanes * Vec<T>::size, r, v, tile[r][v]);
                }
            }
        }
    };
    norm_short_of<T, IS_LAYERNORM, ROWS, BY_BLOCK, V, PRELOAD_PARAMS>(p, partition, gather);
}

template <class Op, typename T, int ROWS>
__global__ void __launch_bounds__(MIN_BLOCK, SHORT_NORM_BLOCKS<T, Op::IS_LAYERNORM, Op::HAS_RESIDUAL, ROWS>)
    norm_registers_short_kernel(__grid_constant__ const ShortNorm<T> p) {
    constexpr bool PRELOAD_PARAMS = SHORT_PRELOAD_PARAMS<T, Op::IS_LAYERNORM, ROWS>;
    norm_short<T, Op::IS_LAYERNORM, Op::HAS_RESIDUAL, ROWS, false, SHORT_VECTORS<T, ROWS>, PRELOAD_PARAMS>(p);
}

template <class Op, typename T, typename SHAPE>
__global__ void __launch_bounds__(SHAPE::THREADS, THREADS_AN_SM / SHAPE::THREADS)
    norm_registers_block_rows_kernel(__grid_constant__ const ShortNorm<T> p) {
    constexpr bool PRELOAD_PARAMS = SHAPE::VECTORS * (Op::IS_LAYERNORM ? 8 : 4) <= 16;
    norm_short<T, Op::IS_LAYERNORM, Op::HAS_RESIDUAL, SHAPE::ROWS, true, SHAPE::VECTORS, PRELOAD_PARAMS>(p);
}

// ---- host ----------------------------------------------------------------------------------------------------------

/// Launches a kernel of this file if one takes rows of this length, which must lie evenly. Returns whether one did.
template <class Op, typename T>
bool launch_short_rows(const NormForward<T>& p, const Launch& launch) {
    const ShortNorm<T> args = short_norm(p);
    return with_even_rows<T>(
        typename Op::BlockRows{}, p.count, p.length,
        [&](auto shape, unsigned grid, dim3 block) {
            launch_pdl(norm_registers_block_rows_kernel<Op, T, decltype(shape)>, grid, block, launch, args);
        },
        [&](auto rows, unsigned grid, dim3 block) {
            launch_pdl(norm_registers_short_kernel<Op, T, rows()>, grid, block, launch, args);
        });
}

}  // namespace kl
