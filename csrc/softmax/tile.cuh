// What softmax makes of the vectors that a thread holds of a row: their maximum and sum, the quotient, the gradient.
#pragma once

#include "reduce/rows.cuh"

namespace kl {

constexpr float NEG_INF = -std::numeric_limits<float>::infinity();

// Within 2 ulp, and |x| / 2 more for the rounding of the scaled argument, of a result that shrinks as exp(x).
__device__ inline float fast_exp(float x) { return exp2_approx(x * LOG2E); }

// A maximum that fmaxf took over NaN or nothing is no matter: x − max is NaN for a NaN x, and reaches the sum. But a
// row of −inf so far must not poison the sum of what follows, so an online maximum starts from zero there.
__device__ inline float finite_or_zero(float running_max) { return running_max == NEG_INF ? 0.0f : running_max; }

// Maxima from here on are far. There y = x · log2 e rounds, or overflows, by more than a power of two can hold; but
// elements that differ do so by 64 at least, so that next to the maximum the others weigh nothing.
constexpr float FAR = 1 << 30;

__device__ inline bool is_far(float top) { return fabsf(top) >= FAR && top != NEG_INF; }

// 2^(y − 2 · top), or where the top is FAR, 2^((x − top) · log2 e).
template <bool IS_FAR>
__device__ float power_below(float x, float top) {
    return exp2_approx(IS_FAR ? (x - top) * LOG2E : fmaf(x, LOG2E, -2.0f * top));
}

// Σ 2^(y − 2 · top) over some of a row's elements y = x · log2 e, where 2 · top is a whole number not below any of them:
// then each is one multiply-add and one power of two, and sums with different tops meet without an error, by powers of
// two that are exact. (Milakov and Gimelshein, arXiv:1805.02867, with tops that are maxima.) As `first` and `second`.
// A far top is the maximum itself; tops are halved so that they stay below that, and are in the order of the maxima.
struct Peak {
    // `sum` with regard to `top`, with regard to one at least as high. Equal tops may be infinite, and their difference
    // no number.
    static __device__ float lowered(float sum, float top, float high) {
        return sum * (top == high ? 1.0f : exp2_approx(2.0f * (top - high)));
    }
    __device__ Pair operator()(Pair a, Pair b) const {
        const float high = fmaxf(a.first, b.first);
        return {high, lowered(a.second, a.first, high) + lowered(b.second, b.first, high)};
    }
};
// The top first, then the sums: a power of two a lane, not one a step.
__device__ inline Pair over_lanes(Pair value, Peak, int lanes) {
    const float high = over_lanes(value.first, Max{}, lanes);
    return {high, over_lanes(Peak::lowered(value.second, value.first, high), Sum{}, lanes)};
}

// fmaxf drops NaN, which reaches the sum; so do its forms for two elements of 16 bits.
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
__device__ float sum_of_powers(const Vec<T> (&tile)[V], float top) {
    return sum_over(tile, [top](float sum, float x) { return sum + power_below<IS_FAR>(x, top); });
}

// Of the elements that this thread has.
template <typename T, int V>
__device__ Pair peak_of(Vec<T> (&tile)[V]) {
    const float thread_max = max_of(tile);
    stay_packed(tile);
    Pair peak{thread_max, 0.0f};
    if (is_far(thread_max)) {
        peak.second = sum_of_powers<true>(tile, thread_max);
    } else {
        peak.first = 0.5f * ceilf(thread_max * LOG2E);
        // Of nothing but −inf, the sum is zero.
        peak.second = sum_of_powers<false>(tile, finite_or_zero(peak.first));
    }
    stay_packed(tile);
    return peak;
}

template <bool IS_FAR, typename T, int V, typename F>
__device__ void divide_by(const Vec<T> (&tile)[V], Pair peak, F&& put) {
    const float scale = 1.0f / peak.second;
    float x[Vec<T>::size];
#pragma unroll
    for (int v = 0; v < V; ++v) {
        unpack(tile[v], x);
#pragma unroll
        for (int e = 0; e < Vec<T>::size; ++e) x[e] = power_below<IS_FAR>(x[e], peak.first) * scale;
        put(v, pack<T>(x));
        keep_order();
    }
}

// Makes the result, vector by vector for `put(v, vector)`, from the peak of the whole row. A row of nothing but −inf gives
// NaN.
template <typename T, int V, typename F>
__device__ void divide_by(const Vec<T> (&tile)[V], Pair peak, F&& put) {
    is_far(peak.first) ? divide_by<true>(tile, peak, put) : divide_by<false>(tile, peak, put);
}

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

// d x = y · (dy − Σ y·dy), in place of dy.
template <typename T>
__device__ void gradient_of(Vec<T> (&g_tile)[ROW_VECTORS], const Vec<T> (&o_tile)[ROW_VECTORS], float dot) {
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

}  // namespace kl
