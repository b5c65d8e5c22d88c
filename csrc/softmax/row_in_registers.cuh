// softmax of a row in registers: the device functions of `registers`, `multirow`, `cluster` and `cluster_two_pass`.
// Each thread holds some vectors of a row (`tile`). The threads that share a row merge their online softmax states.
#pragma once

#include "softmax/softmax.cuh"

namespace kl {

// ---- online softmax state ------------------------------------------------------------------------------------------

/// Maxima of at least this magnitude are far. There the rounding error of x · log2 e is too large for an exponent, or the
/// product overflows. But distinct elements differ by at least 64, so that all but the maximum weigh nothing.
constexpr float FAR = 1 << 30;

__device__ inline bool is_far(float row_max) { return fabsf(row_max) >= FAR && row_max != NEG_INF; }

/// exp(x) over the power of two that `half_shift` stands for: 2^(x · log2 e − 2 · half_shift). Of a far row,
/// exp(x − half_shift).
template <bool IS_FAR>
__device__ float shifted_exp(float x, float half_shift) {
    return exp2_approx(IS_FAR ? (x - half_shift) * LOG2E : fmaf(x, LOG2E, -2.0f * half_shift));
}

/// Maximum and sum of some of a row's elements (Milakov and Gimelshein, arXiv:1805.02867). The maximum is rounded: 2 ·
/// half_shift is the whole number at or above max x · log2 e. Each term of the sum is then one multiply-add and one
/// power of two, and states merge without error, by exact powers of two. Shifts are halved so that a far row, whose
/// half_shift is the maximum itself, keeps the order of the maxima without overflow.
struct OnlineSoftmaxState {
    float half_shift, sum;
};

__device__ inline OnlineSoftmaxState shuffle_xor(OnlineSoftmaxState state, int lane) {
    return {shuffle_xor(state.half_shift, lane), shuffle_xor(state.sum, lane)};
}

/// Merges two states, in any order.
struct MergeSoftmax {
    __device__ static OnlineSoftmaxState none() { return {Max::identity, 0.0f}; }
    /// `sum` with regard to `half_shift`, rescaled to `high`, which is at least as high. Equal shifts may be infinite, and
    /// their difference NaN.
    static __device__ float rescaled(float sum, float half_shift, float high) {
        return sum * (half_shift == high ? 1.0f : exp2_approx(2.0f * (half_shift - high)));
    }
    __device__ OnlineSoftmaxState operator()(OnlineSoftmaxState a, OnlineSoftmaxState b) const {
        const float high = fmaxf(a.half_shift, b.half_shift);
        return {high, rescaled(a.sum, a.half_shift, high) + rescaled(b.sum, b.half_shift, high)};
    }
};

/// Reduces the shift first, then the sums: one power of two per lane instead of one per step.
__device__ inline OnlineSoftmaxState over_lanes(OnlineSoftmaxState state, MergeSoftmax, int lanes) {
    const float high = over_lanes(state.half_shift, Max{}, lanes);
    return {high, over_lanes(MergeSoftmax::rescaled(state.sum, state.half_shift, high), Sum{}, lanes)};
}

// ---- a thread's vectors --------------------------------------------------------------------------------------------

/// Maximum of a thread's elements. fmaxf and its 16-bit forms drop NaN, which reaches the sum instead.
template <typename T, int V>
__device__ float max_of(const Vec<T> (&tile)[V]) {
    if constexpr (sizeof(T) == 4) {
        float top = NEG_INF;
#pragma unroll
        for (int v = 0; v < V; ++v) {
#pragma unroll
            for (int e = 0; e < Vec<T>::size; ++e) top = fmaxf(top, tile[v][e]);
        }
        return top;
    } else {
        using Two = std::conditional_t<std::is_same_v<T, half>, half2, __nv_bfloat162>;
        Two top;
        top.x = top.y = from_float<T>(NEG_INF);
#pragma unroll
        for (int v = 0; v < V; ++v) {
#pragma unroll
            for (int i = 0; i < 4; ++i) top = __hmax2(top, reinterpret_cast<const Two*>(&tile[v])[i]);
        }
        return fmaxf(to_float(top.x), to_float(top.y));
    }
}

template <bool IS_FAR, typename T, int V>
__device__ float sum_of_exp(const Vec<T> (&tile)[V], float half_shift) {
    return sum_over(tile, [half_shift](float sum, float x) { return sum + shifted_exp<IS_FAR>(x, half_shift); });
}

/// The state of a thread's elements.
template <typename T, int V>
__device__ OnlineSoftmaxState softmax_state(Vec<T> (&tile)[V]) {
    const float thread_max = max_of(tile);
    stay_packed(tile);
    OnlineSoftmaxState state{thread_max, 0.0f};
    if (is_far(thread_max)) {
        state.sum = sum_of_exp<true>(tile, thread_max);
    } else {
        state.half_shift = 0.5f * ceilf(thread_max * LOG2E);
        state.sum = sum_of_exp<false>(tile, finite_or_zero(state.half_shift));  // of nothing but −inf: zero
    }
    stay_packed(tile);
    return state;
}

template <bool IS_FAR, typename T, int V, typename F>
__device__ void store_softmax(const Vec<T> (&tile)[V], OnlineSoftmaxState row, F&& store) {
    const float scale = 1.0f / row.sum;
    float x[Vec<T>::size];
#pragma unroll
    for (int v = 0; v < V; ++v) {
        unpack(tile[v], x);
#pragma unroll
        for (int e = 0; e < Vec<T>::size; ++e) x[e] = shifted_exp<IS_FAR>(x[e], row.half_shift) * scale;
        store(v, pack<T>(x));
        keep_order();
    }
}

/// Computes the output from the state of the whole row, and calls `store(v, vector)` for each vector.
/// A row of nothing but −inf gives NaN.
template <typename T, int V, typename F>
__device__ void store_softmax(const Vec<T> (&tile)[V], OnlineSoftmaxState row, F&& store) {
    is_far(row.half_shift) ? store_softmax<true>(tile, row, store) : store_softmax<false>(tile, row, store);
}

/// Σ dy · y over a thread's elements.
template <typename T>
__device__ float dot_of(const Vec<T> (&g_tile)[ROW_VECTORS], const Vec<T> (&o_tile)[ROW_VECTORS]) {
    float g[Vec<T>::size], o[Vec<T>::size], dot = 0.0f;
#pragma unroll
    for (int v = 0; v < ROW_VECTORS; ++v) {
        unpack(g_tile[v], g);
        unpack(o_tile[v], o);
#pragma unroll
        for (int e = 0; e < Vec<T>::size; ++e) dot += g[e] * o[e];
    }
    return dot;
}

/// dx = y · (dy − Σ dy · y), in place of dy.
template <typename T>
__device__ void softmax_gradient(Vec<T> (&g_tile)[ROW_VECTORS], const Vec<T> (&o_tile)[ROW_VECTORS], float dot) {
    float g[Vec<T>::size], o[Vec<T>::size];
#pragma unroll
    for (int v = 0; v < ROW_VECTORS; ++v) {
        unpack(g_tile[v], g);
        unpack(o_tile[v], o);
#pragma unroll
        for (int e = 0; e < Vec<T>::size; ++e) g[e] = o[e] * (g[e] - dot);
        g_tile[v] = pack<T>(g);
    }
}

// ---- the bodies of `registers` and `cluster` -----------------------------------------------------------------------

/// One row per group of threads, V vectors per thread. VECTORIZED: rows consist of aligned 16-byte vectors.
/// CLUSTER: the blocks of a cluster share the row.
template <typename T, int V, bool VECTORIZED, bool CLUSTER>
__device__ __forceinline__ void softmax_in_registers(T* output, const Rows& out_rows, const T* input,
                                                     const Rows& in_rows, int64_t count, int64_t length) {
    if (!exists_here<CLUSTER>()) return;
    __shared__ ReduceSmem<CLUSTER, OnlineSoftmaxState> reduce_smem;
    const RowPartition<CLUSTER> partition(vectors_of<T>(length));
    partition.open(reduce_smem);
    if constexpr (!CLUSTER) pdl_begin();
    const bool has_row = partition.has_row(count);
    const int64_t row = has_row ? partition.row : 0;
    Vec<T> tile[V];
    load_row<VECTORIZED>(tile, input + in_rows.start(row), in_rows, partition, has_row, length, NEG_INF);
    partition.meet();
    const OnlineSoftmaxState state = reduce_over_row(softmax_state(tile), MergeSoftmax{}, reduce_smem);
    T* const out = output + out_rows.start(row);
    store_softmax(tile, state, [&](int v, const Vec<T>& part) {
        store_part<VECTORIZED>(out, out_rows, part, v, partition, has_row, length);
    });
}

/// The backward pass of the same.
template <typename T, bool VECTORIZED, bool CLUSTER>
__device__ __forceinline__ void softmax_backward_in_registers(T* grad_input, const Rows& gi_rows, const T* grad,
                                                              const Rows& g_rows, const T* output, const Rows& o_rows,
                                                              int64_t count, int64_t length) {
    if (!exists_here<CLUSTER>()) return;
    __shared__ ReduceSmem<CLUSTER, float> reduce_smem;
    const RowPartition<CLUSTER> partition(vectors_of<T>(length));
    partition.open(reduce_smem);
    if constexpr (!CLUSTER) pdl_begin();
    const bool has_row = partition.has_row(count);
    const int64_t row = has_row ? partition.row : 0;
    Vec<T> g_tile[ROW_VECTORS], o_tile[ROW_VECTORS];
    load_row<VECTORIZED>(g_tile, grad + g_rows.start(row), g_rows, partition, has_row, length, 0.0f);
    load_row<VECTORIZED>(o_tile, output + o_rows.start(row), o_rows, partition, has_row, length, 0.0f);
    partition.meet();
    const float dot = reduce_over_row(dot_of(g_tile, o_tile), Sum{}, reduce_smem);
    stay_packed(g_tile);
    stay_packed(o_tile);
    softmax_gradient(g_tile, o_tile, dot);
    store_row<VECTORIZED>(grad_input + gi_rows.start(row), gi_rows, g_tile, partition, has_row, length);
}

}  // namespace kl
