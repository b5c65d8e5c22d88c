// What all rungs of layer_norm, rms_norm and add_rms_norm share: operands, statistics of a row, the gradient's formula,
// and the column sum of the weights' gradients. IS_LAYERNORM: rows are shifted to mean zero first. HAS_RESIDUAL: rows
// are the sum of two operands.
#pragma once

#include "core/pdl.cuh"
#include "reduce/column_sum.cuh"
#include "reduce/rows.cuh"

namespace kl {

// Statistics of a row, saved for the backward pass: x̂ = (x − mean) · rstd + shift. The mean is rounded to a float.
// `shift` corrects that error, which exceeds all others where the mean is large.
struct Stats {
    float mean, rstd, shift;
};

template <bool IS_LAYERNORM>
constexpr int STATS = IS_LAYERNORM ? 3 : 1;  // floats per row in memory

template <bool IS_LAYERNORM>
__device__ Stats load_stats(const float* stats, int64_t row) {
    const float* const of_row = stats + row * STATS<IS_LAYERNORM>;
    if constexpr (IS_LAYERNORM) return {of_row[0], of_row[1], of_row[2]};
    return {0.0f, of_row[0], 0.0f};
}

template <bool IS_LAYERNORM>
__device__ void store_stats(float* stats, int64_t row, const Stats& value) {
    if (stats == nullptr) return;
    float* const of_row = stats + row * STATS<IS_LAYERNORM>;
    if constexpr (IS_LAYERNORM) {
        of_row[0] = value.mean;
        of_row[1] = value.rstd;
        of_row[2] = value.shift;
    } else {
        of_row[0] = value.rstd;
    }
}

// Whether `shift` matters: for 16-bit elements the rounding of the mean is far below their own spacing.
template <typename T>
constexpr bool SHIFTED = sizeof(T) == 4;

// x̂. Without SHIFTED, `shift` is ignored.
template <bool IS_LAYERNORM, bool SHIFTED = true>
__device__ float normalized(float x, const Stats& stats) {
    if constexpr (!IS_LAYERNORM) return x * stats.rstd;
    return SHIFTED ? fmaf(x - stats.mean, stats.rstd, stats.shift) : (x - stats.mean) * stats.rstd;
}

__device__ inline Stats stats_of_squares(float mean_of_squares, float eps) {
    return {0.0f, rsqrtf(mean_of_squares + eps), 0.0f};
}

// Statistics from the sums of the deviations and of their squares. The deviations are from a rounded mean: their sum is
// the rounding error times the length.
__device__ inline Stats stats_of_deviations(float mean, Pair deviations, float per_element, float eps) {
    const float lost = deviations.first * per_element;
    const float variance = deviations.second * per_element - lost * lost;
    const float rstd = rsqrtf((variance < 0.0f ? 0.0f : variance) + eps);
    return {mean, rstd, -lost * rstd};
}

// dx = rstd · (w·dy − mean(w·dy) − x̂ · mean(w·dy·x̂)); rms_norm has no first mean. That mean is of rounded products,
// so it is subtracted from a rounded product. A fused multiply-add would give a row of one element a gradient.
template <bool IS_LAYERNORM>
__device__ float gradient(float x_hat, float weighted, Pair means, float rstd) {
    return fmaf(-x_hat, means.second, IS_LAYERNORM ? __fsub_rn(weighted, means.first) : weighted) * rstd;
}

// ---- operands ------------------------------------------------------------------------------------------------------
// weight and bias are dense, and null where absent. Rows of `sum` and `output` have the same layout.

template <typename T>
struct NormForward {
    T *output, *sum;
    Rows out;
    float* stats;  // (count, STATS); null where no backward pass follows
    const T *input, *residual;
    Rows in, res;
    const T *weight, *bias;
    Rows parameter;
    int64_t count, length;
    float eps, per_element;  // per_element = 1 / length
};

// Rows that lie evenly, for blocks that loop over many: elements from a row to the next, and to the block's next row.
struct EvenRows {
    int64_t step, apart;
};

// Members that kernels of evenly spaced rows read come first. Before its first load, every SM fetches the cache lines
// of the arguments that it reads, one after the other.
template <typename T>
struct NormBackward {
    T* grad_input;  // null where no gradient of the input is wanted
    const T *grad, *grad_sum, *input;
    const float* stats;
    const T* weight;
    EvenRows even_gi, even_g, even_gs, even_in;
    int64_t length;
    int64_t apart;      // distance between rows of a block
    int64_t rest;       // blocks whose first row is before this one have one iteration more than
    int iterations;     // these
    float per_element;  // 1 / length
    int64_t count;
    Rows gi, g, gs, in, parameter;
};

// Gradients of weight and bias, null where not wanted. Stage one stores its sums over groups of rows in `partials`, as
// (weight or bias, group, length).
template <typename T>
struct NormWeights {
    T *grad_weight, *grad_bias;
    float* partials;
    int groups;

    bool wanted() const { return grad_weight != nullptr || grad_bias != nullptr; }
};

template <typename T>
__device__ float parameter_at(const T* parameter, int64_t i, float absent) {
    return parameter != nullptr ? to_float(parameter[i]) : absent;
}

template <typename T>
__device__ Vec<T> add_vec(const Vec<T>& a, const Vec<T>& b) {
    float x[Vec<T>::size], y[Vec<T>::size];
    unpack(a, x);
    unpack(b, y);
#pragma unroll
    for (int e = 0; e < Vec<T>::size; ++e) x[e] += y[e];
    return pack<T>(x);
}

// CONSTANT: see load_if.
template <bool VECTORIZED = false, bool CONSTANT = false, typename T>
__device__ Vec<T> load_parameter(const T* parameter, const Rows& rows, int64_t first, int64_t length, float absent) {
    if (!VECTORIZED && parameter != nullptr) return load_chunk(parameter, rows, first, length, absent);
    uint4 word = filled<T>(absent);
    if constexpr (VECTORIZED) load_if<CONSTANT>(word, parameter + first, parameter != nullptr && first < length);
    return reinterpret_cast<const Vec<T>&>(word);
}

// ---- a thread's part of a row in registers --------------------------------------------------------------------------

template <typename T, int V>
__device__ float sum_of(const Vec<T> (&tile)[V]) {
    return sum_over(tile, [](float sum, float x) { return sum + x; });
}

// Sums of a thread's deviations from `centre` and of their squares. The first sum is computed where it is WANTED.
template <bool VECTORIZED, bool WANTED, typename T, int V, typename Partition>
__device__ Pair deviations_from(float centre, const Vec<T> (&tile)[V], const Partition& partition, int64_t length) {
    constexpr int E = Vec<T>::size;
    float x[E];
    Pair sums{-0.0f, -0.0f};
#pragma unroll
    for (int v = 0; v < V; ++v) {
        unpack(tile[v], x);
        const int first = partition.at(v) * E;
        // Elements past the end are zeros and must have no deviation.
        const float shift = partition.template has<T>(v, length) ? centre : 0.0f;
        Pair partial{-0.0f, -0.0f};
#pragma unroll
        for (int e = 0; e < E; ++e) {
            const float deviation = x[e] - (VECTORIZED || first + e < static_cast<int>(length) ? shift : 0.0f);
            if constexpr (WANTED) partial.first += deviation;
            partial.second = fmaf(deviation, deviation, partial.second);
        }
        sums = PairSum{}(sums, partial);
    }
    return sums;
}

/// Raises unless a rung takes rows like these. `unsupported` of cuda_impl/norms.py tells callers the reason beforehand.
inline void check_takes(bool takes, const char* op, int64_t length) {
    KL_CHECK(takes, op, ": the rung does not take rows of ", length, " elements of this type and layout");
}

// ---- column sum ------------------------------------------------------------------------------------------------------

/// Stage two of the weights' gradients, shared by every rung but `naive`. It sums the partials of `w.groups` groups of
/// rows; blockIdx.y selects the weight or the bias.
template <class Op, typename T>
__global__ void __launch_bounds__(SUM_THREADS) norm_backward_column_sum_kernel(const NormWeights<T> w, int64_t length) {
    pdl_begin();
    T* const out = blockIdx.y == 0 ? w.grad_weight : w.grad_bias;
    if (out != nullptr) sum_partials(out, w.partials + int64_t{blockIdx.y} * w.groups * length, w.groups, length);
}

template <class Op, typename T>
void launch_column_sum(const NormWeights<T>& w, int64_t length, const Launch& launch) {
    const dim3 grid(blocks_of_columns(length), w.grad_bias == nullptr ? 1 : 2);
    launch_pdl(norm_backward_column_sum_kernel<Op, T>, grid, sum_block(length), launch, w, length);
}

}  // namespace kl
