// attention, backward pass of rung 2 of 7: flash. The weights again, from scores and the saved log-sum-exp, and their
// gradients.
//
// The forward pass saves one number per row instead of the S_q × S_k weights. With it a weight is one exponential:
//
//   P_ij = exp(scale · q_i · k_j − lse_i) = 2^(scale · log2 e · q_i · k_j − log2_sum_i)
//   dS_ij = P_ij · (dP_ij − delta_i)
#pragma once

#include "attention/tile.cuh"

namespace kl {

template <typename T>
struct FlashGradients {
    View<T> query, key, value, grad;
    View<T> grad_query, grad_key, grad_value;
    const float *lse, *log_sum, *delta;  // `log_sum` as in Lse
    Mask mask;
};

/// Recomputes weights: exp(score − max) / sum. Without an additive mask the log-sum-exp includes the maximum.
struct RowShift {
    float max, log2_sum;
};

/// For a query outside, or one that sees no key, the logarithm is infinite: its weights are exp(−∞) = 0.
template <typename Operands>
__device__ RowShift row_shift(const Operands& p, int64_t row, bool inside) {
    const float lse = inside ? p.lse[row] : -INFINITE;
    if (lse == -INFINITE) return {0.0f, INFINITE};
    if (p.log_sum == nullptr) return {0.0f, lse * LOG2E};
    return {lse, p.log_sum[row] * LOG2E};
}

/// Weight of a score in MaskedUnits. Transposed tiles sum in another order, so that under an additive mask a score may round
/// to more than the saved maximum. It is clamped; NaN stays.
__device__ inline float masked_weight(float score, float max, float log2_sum, float factor, bool additive) {
    float below = score - max;
    if (additive && below > 0.0f) below = 0.0f;
    return exp2_approx(fmaf(below, factor, -log2_sum));
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

/// Loads the statistics of the STREAM queries from q0 on: log2 of the sums, then deltas, then with MASKED the maxima.
template <typename S, bool MASKED, typename T>
__device__ __forceinline__ void load_row_stats(float* stats, const FlashGradients<T>& p, int64_t first_row, int q0,
                                               int S_q) {
    if (threadIdx.x >= (MASKED ? 3 : 2) * S::STREAM) return;
    const int row = q0 + static_cast<int>(threadIdx.x % S::STREAM);
    const int64_t index = first_row + row;
    const int kind = static_cast<int>(threadIdx.x) / S::STREAM;
    float stat = 0.0f;
    if (kind == 1) {
        if (row < S_q) stat = p.delta[index];
    } else {
        const RowShift shift = row_shift(p, index, row < S_q);
        stat = kind == 0 ? shift.log2_sum : shift.max;
    }
    stats[threadIdx.x] = stat;
}

/// Scores in `weights` become P, and dP in `grads` becomes dS = P ∘ (dP − delta). Both are 0 outside the band. The squares are
/// transposed: rows are keys, from k0 on, and columns are queries, from q0 on.
template <typename S, bool MASKED, typename T, int N>
__device__ __forceinline__ void weights_and_gradients(Squares<1, N>& weights, Squares<1, N>& grads, const float* stats,
                                                      const FlashGradients<T>& p, const Attention& a,
                                                      const MaskedUnits& units, int64_t mask_offset, int k0, int q0) {
    const float *log2_sum = stats, *delta = log2_sum + S::STREAM, *row_max = delta + S::STREAM;  // the last if MASKED
    const float scale = a.scale * LOG2E;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int row = k0 + lane_row(0, h);
        // The first query of the tile that sees this key; none sees a key outside.
        const int begin = row >= a.S_k ? S::STREAM : row - a.last - q0;
        const int end = MASKED ? min(a.S_q, row - a.first + 1) - q0 : S::STREAM;
#pragma unroll
        for (int j = 0; j < N; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int column = lane_column(j) + e;
                float& weight = weights.x[0][j][2 * h + e];
                float& grad = grads.x[0][j][2 * h + e];
                const bool inside = column >= begin && (!MASKED || column < end);
                if constexpr (MASKED) {
                    if (inside && p.mask.kind != MaskKind::NONE) {
                        const int64_t element = mask_offset + (q0 + column) * p.mask.row + row * p.mask.column;
                        weight = p.mask.template apply<T>(weight, element, a.scale);
                    }
                    weight = masked_weight(weight, row_max[column], log2_sum[column], units.factor, p.mask.additive());
                } else {
                    weight = exp2_approx(fmaf(weight, scale, -log2_sum[column]));
                }
                grad = inside ? weight * (grad - delta[column]) : 0.0f;
                weight = inside ? weight : 0.0f;
            }
        }
    }
}

#endif

}  // namespace kl
