// Normalised rows, for layer_norm, rms_norm and add_rms_norm: operands, and the first two steps of the climb. The others
// are in norm/registers.cuh and norm/backward.cuh, and how all are launched in norm/launch.cuh.
// CENTRED rows are shifted to mean zero first; with a RESIDUAL the rows are the sum of two operands.
#pragma once

#include "core/pdl.cuh"
#include "reduce/column_sum.cuh"
#include "reduce/rows.cuh"

namespace kl {

// What is kept of a row for the backward pass: x̂ = (x − mean) · rstd + shift. The mean is rounded to a float; `shift`
// puts right what that loses, which is more than the rest of the arithmetic where the mean is large.
struct Stats {
    float mean, rstd, shift;
};

template <bool CENTRED>
constexpr int STATS = CENTRED ? 3 : 1;  // floats of them in memory

template <bool CENTRED>
__device__ Stats load_stats(const float* stats, int64_t row) {
    const float* const of_row = stats + row * STATS<CENTRED>;
    if constexpr (CENTRED) return {of_row[0], of_row[1], of_row[2]};
    return {0.0f, of_row[0], 0.0f};
}

template <bool CENTRED>
__device__ void store_stats(float* stats, int64_t row, const Stats& value) {
    if (stats == nullptr) return;
    float* const of_row = stats + row * STATS<CENTRED>;
    if constexpr (CENTRED) {
        of_row[0] = value.mean;
        of_row[1] = value.rstd;
        of_row[2] = value.shift;
    } else {
        of_row[0] = value.rstd;
    }
}

// What rounding the mean loses shows in float32 alone: of 16-bit elements it is far below their own spacing.
template <typename T>
constexpr bool SHIFTED = sizeof(T) == 4;

// Of what is not SHIFTED, the shift counts for nothing.
template <bool CENTRED, bool SHIFTED = true>
__device__ float normalized(float x, const Stats& stats) {
    if constexpr (!CENTRED) return x * stats.rstd;
    return SHIFTED ? fmaf(x - stats.mean, stats.rstd, stats.shift) : (x - stats.mean) * stats.rstd;
}

__device__ inline Stats stats_of_squares(float mean_of_squares, float eps) {
    return {0.0f, rsqrtf(mean_of_squares + eps), 0.0f};
}

// From sum and squares of the deviations from a mean that has been rounded: their sum is what the rounding lost.
__device__ inline Stats stats_of_deviations(float mean, Pair deviations, float per_element, float eps) {
    const float lost = deviations.first * per_element;
    const float variance = deviations.second * per_element - lost * lost;
    const float rstd = rsqrtf((variance < 0.0f ? 0.0f : variance) + eps);
    return {mean, rstd, -lost * rstd};
}

// d x = rstd · (w·dy − mean(w·dy) − x̂ · mean(w·dy·x̂)), the first of the means only of what was centred. The mean is of
// rounded products: taken from one that is not, in a fused multiply-add, it would leave a row of one element a gradient.
template <bool CENTRED>
__device__ float gradient(float x_hat, float weighted, Pair means, float rstd) {
    return fmaf(-x_hat, means.second, CENTRED ? __fsub_rn(weighted, means.first) : weighted) * rstd;
}

// ---- operands ------------------------------------------------------------------------------------------------------
// weight and bias are dense, and null where absent. The rows of sum and output lie alike.

template <typename T>
struct NormForward {
    T *output, *sum;
    Rows out;
    float* stats;  // (count, STATS); null where there will be no backward pass
    const T *input, *residual;
    Rows in, res;
    const T *weight, *bias;
    Rows parameter;
    int64_t count, length;
    float eps, per_element;  // the latter 1 / length
};

// Of rows that lie evenly, where blocks go through many of them: elements from one to the next, and to a block's next.
struct EvenRows {
    int64_t step, apart;
};

// First what is looked at where rows lie evenly: of a kernel's arguments every SM fetches the lines that it looks at, one
// after the other, before its first load.
template <typename T>
struct NormBackward {
    T* grad_input;  // null where not wanted
    const T *grad, *grad_sum, *input;
    const float* stats;
    const T* weight;
    EvenRows even_gi, even_g, even_gs, even_in;
    int64_t length;
    int64_t apart;      // a block's rows are every so-many-th,
    int64_t rest;       // one more for those that begin before this row
    int turns;          // than so many
    float per_element;  // 1 / length
    int64_t count;
    Rows gi, g, gs, in, parameter;
};

// Gradients of weight and bias: null where not wanted. Stage one leaves sums over groups of rows as
// (weight or bias, group, length) in `partials`.
template <typename T>
struct NormWeights {
    T *grad_weight, *grad_bias;
    float* partials;
    int groups;
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
template <bool WHOLE = false, bool CONSTANT = false, typename T>
__device__ Vec<T> load_parameter(const T* parameter, const Rows& rows, int64_t first, int64_t length, float absent) {
    if (!WHOLE && parameter != nullptr) return load_chunk(parameter, rows, first, length, absent);
    uint4 word = filled<T>(absent);
    if constexpr (WHOLE) load_if<CONSTANT>(word, parameter + first, parameter != nullptr && first < length);
    return reinterpret_cast<const Vec<T>&>(word);
}

// ---- a thread's part of a row in registers --------------------------------------------------------------------------

template <typename T, int V>
__device__ float sum_of(const Vec<T> (&tile)[V]) {
    return sum_over(tile, [](float sum, float x) { return sum + x; });
}

// The sums of a thread's deviations from `centre` and of their squares. The first is only made where it is WANTED.
template <bool WHOLE, bool WANTED, typename T, int V, typename Share>
__device__ Pair deviations_from(float centre, const Vec<T> (&tile)[V], const Share& share, int64_t length) {
    constexpr int E = Vec<T>::size;
    float x[E];
    Pair sums{-0.0f, -0.0f};
#pragma unroll
    for (int v = 0; v < V; ++v) {
        unpack(tile[v], x);
        const int first = share.at(v) * E;
        // Past the end stand zeros, which are not to deviate.
        const float inside = share.template has<T>(v, length) ? centre : 0.0f;
        Pair partial{-0.0f, -0.0f};
#pragma unroll
        for (int e = 0; e < E; ++e) {
            const float deviation = x[e] - (WHOLE || first + e < static_cast<int>(length) ? inside : 0.0f);
            if constexpr (WANTED) partial.first += deviation;
            partial.second = fmaf(deviation, deviation, partial.second);
        }
        sums = PairSum{}(sums, partial);
    }
    return sums;
}

// ---- naive: one thread a row; of the weights' gradients, one thread a column -----------------------------------------

template <typename T, bool CENTRED, bool RESIDUAL>
__device__ void norm_naive(const NormForward<T>& p) {
    const int64_t row = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (row >= p.count) return;
    const T* x = p.input + p.in.start(row);
    int64_t stride = p.in.stride;
    if constexpr (RESIDUAL) {
        const T* const r = p.residual + p.res.start(row);
        T* const sum = p.sum + p.out.start(row);
        for (int64_t i = 0; i < p.length; ++i) {
            sum[i * p.out.stride] = from_float<T>(to_float(x[i * stride]) + to_float(r[i * p.res.stride]));
        }
        x = sum;
        stride = p.out.stride;
    }
    CompensatedSum sum, lost, squares;
    Stats stats;
    if constexpr (CENTRED) {
        for (int64_t i = 0; i < p.length; ++i) sum.add(to_float(x[i * stride]));
        const float mean = sum.sum / static_cast<float>(p.length);
        for (int64_t i = 0; i < p.length; ++i) {
            const float deviation = to_float(x[i * stride]) - mean;
            lost.add(deviation);
            squares.add(deviation * deviation);
        }
        stats = stats_of_deviations(mean, {lost.sum, squares.sum}, p.per_element, p.eps);
    } else {
        for (int64_t i = 0; i < p.length; ++i) squares.add(to_float(x[i * stride]) * to_float(x[i * stride]));
        stats = stats_of_squares(squares.sum * p.per_element, p.eps);
    }
    store_stats<CENTRED>(p.stats, row, stats);
    T* const out = p.output + p.out.start(row);
    for (int64_t i = 0; i < p.length; ++i) {
        const float scaled = normalized<CENTRED>(to_float(x[i * stride]), stats) * parameter_at(p.weight, i, 1.0f);
        out[i * p.out.stride] = from_float<T>(scaled + parameter_at(p.bias, i, 0.0f));
    }
}

template <typename T, bool CENTRED, bool RESIDUAL>
__device__ void norm_backward_naive(const NormBackward<T>& p) {
    const int64_t row = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (row >= p.count) return;
    const T* const x = p.input + p.in.start(row);
    const T* const g = p.grad + p.g.start(row);
    const Stats stats = load_stats<CENTRED>(p.stats, row);
    CompensatedSum plain, dot;
    for (int64_t i = 0; i < p.length; ++i) {
        const float weighted = to_float(g[i * p.g.stride]) * parameter_at(p.weight, i, 1.0f);
        plain.add(weighted);
        dot.add(weighted * normalized<CENTRED>(to_float(x[i * p.in.stride]), stats));
    }
    const float length = static_cast<float>(p.length);
    const Pair means{plain.sum / length, dot.sum / length};
    T* const gi = p.grad_input + p.gi.start(row);
    for (int64_t i = 0; i < p.length; ++i) {
        const float weighted = to_float(g[i * p.g.stride]) * parameter_at(p.weight, i, 1.0f);
        const float x_hat = normalized<CENTRED>(to_float(x[i * p.in.stride]), stats);
        float value = gradient<CENTRED>(x_hat, weighted, means, stats.rstd);
        if constexpr (RESIDUAL) value += to_float(p.grad_sum[p.gs.start(row) + i * p.gs.stride]);
        gi[i * p.gi.stride] = from_float<T>(value);
    }
}

template <typename T, bool CENTRED>
__device__ void norm_weights_naive(const NormWeights<T>& w, const NormBackward<T>& p) {
    const int64_t column = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (column >= p.length) return;
    CompensatedSum weight, bias;
    for (int64_t row = 0; row < p.count; ++row) {
        const float g = to_float(p.grad[p.g.start(row) + column * p.g.stride]);
        const float x = to_float(p.input[p.in.start(row) + column * p.in.stride]);
        weight.add(g * normalized<CENTRED>(x, load_stats<CENTRED>(p.stats, row)));
        bias.add(g);
    }
    if (w.grad_weight != nullptr) w.grad_weight[column] = from_float<T>(weight.sum);
    if (w.grad_bias != nullptr) w.grad_bias[column] = from_float<T>(bias.sum);
}

// ---- block: one block a row, 16 bytes a load -------------------------------------------------------------------------

constexpr int NORM_THREADS = 512;

template <typename T, bool CENTRED, bool RESIDUAL>
__device__ void norm_block(const NormForward<T>& p) {
    __shared__ float scratch[WARP];
    constexpr int E = Vec<T>::size;
    constexpr int64_t STEP = int64_t{NORM_THREADS} * E;
    const int64_t row = blockIdx.x, begin = int64_t{threadIdx.x} * E;
    const T* x_row = p.input + p.in.start(row);
    const Rows* rows = &p.in;
    float x[E], scale[E], offset[E], sum = 0.0f;
    for (int64_t first = begin; first < p.length; first += STEP) {
        Vec<T> v = load_chunk(x_row, *rows, first, p.length, 0.0f);
        if constexpr (RESIDUAL) {
            v = add_vec(v, load_chunk(p.residual + p.res.start(row), p.res, first, p.length, 0.0f));
            store_chunk(p.sum + p.out.start(row), p.out, v, first, p.length);
        }
        unpack(v, x);
        float partial = 0.0f;
#pragma unroll
        for (int e = 0; e < E; ++e) partial += CENTRED ? x[e] : x[e] * x[e];
        sum += partial;
    }
    if constexpr (RESIDUAL) {  // each thread reads again what it wrote itself
        x_row = p.sum + p.out.start(row);
        rows = &p.out;
    }
    sum = block_reduce(sum, Sum{}, scratch);
    Stats stats = stats_of_squares(sum * p.per_element, p.eps);
    if constexpr (CENTRED) {
        const float mean = sum / static_cast<float>(p.length);
        Pair deviations{0.0f, 0.0f};
        for (int64_t first = begin; first < p.length; first += STEP) {
            unpack(load_chunk(x_row, *rows, first, p.length, 0.0f), x);
            Pair partial{0.0f, 0.0f};
#pragma unroll
            for (int e = 0; e < E; ++e) {
                const float deviation = first + e < p.length ? x[e] - mean : 0.0f;
                partial = PairSum{}(partial, {deviation, deviation * deviation});
            }
            deviations = PairSum{}(deviations, partial);
        }
        deviations.first = block_reduce(deviations.first, Sum{}, scratch);
        deviations.second = block_reduce(deviations.second, Sum{}, scratch);
        stats = stats_of_deviations(mean, deviations, p.per_element, p.eps);
    }
    if (threadIdx.x == 0) store_stats<CENTRED>(p.stats, row, stats);
    for (int64_t first = begin; first < p.length; first += STEP) {
        unpack(load_chunk(x_row, *rows, first, p.length, 0.0f), x);
        unpack(load_parameter(p.weight, p.parameter, first, p.length, 1.0f), scale);
        unpack(load_parameter(p.bias, p.parameter, first, p.length, 0.0f), offset);
#pragma unroll
        for (int e = 0; e < E; ++e) x[e] = fmaf(normalized<CENTRED>(x[e], stats), scale[e], offset[e]);
        store_chunk(p.output + p.out.start(row), p.out, pack<T>(x), first, p.length);
    }
}

template <typename T, bool CENTRED, bool RESIDUAL>
__device__ void norm_backward_block(const NormBackward<T>& p) {
    __shared__ float scratch[WARP];
    constexpr int E = Vec<T>::size;
    constexpr int64_t STEP = int64_t{NORM_THREADS} * E;
    const int64_t row = blockIdx.x, begin = int64_t{threadIdx.x} * E;
    const T* const x_row = p.input + p.in.start(row);
    const T* const g_row = p.grad + p.g.start(row);
    const Stats stats = load_stats<CENTRED>(p.stats, row);
    float x[E], g[E], scale[E], more[E];
    Pair sums{0.0f, 0.0f};
    for (int64_t first = begin; first < p.length; first += STEP) {
        unpack(load_chunk(x_row, p.in, first, p.length, 0.0f), x);
        unpack(load_chunk(g_row, p.g, first, p.length, 0.0f), g);
        unpack(load_parameter(p.weight, p.parameter, first, p.length, 1.0f), scale);
        Pair partial{0.0f, 0.0f};
#pragma unroll
        for (int e = 0; e < E; ++e) {
            const float weighted = g[e] * scale[e];
            partial = PairSum{}(partial, {weighted, weighted * normalized<CENTRED>(x[e], stats)});
        }
        sums = PairSum{}(sums, partial);
    }
    const float length = static_cast<float>(p.length);
    Pair means;
    means.first = block_reduce(sums.first, Sum{}, scratch) / length;
    means.second = block_reduce(sums.second, Sum{}, scratch) / length;
    for (int64_t first = begin; first < p.length; first += STEP) {
        unpack(load_chunk(x_row, p.in, first, p.length, 0.0f), x);
        unpack(load_chunk(g_row, p.g, first, p.length, 0.0f), g);
        unpack(load_parameter(p.weight, p.parameter, first, p.length, 1.0f), scale);
        if constexpr (RESIDUAL) {
            unpack(load_chunk(p.grad_sum + p.gs.start(row), p.gs, first, p.length, 0.0f), more);
        }
#pragma unroll
        for (int e = 0; e < E; ++e) {
            x[e] = gradient<CENTRED>(normalized<CENTRED>(x[e], stats), g[e] * scale[e], means, stats.rstd);
            if constexpr (RESIDUAL) x[e] += more[e];
        }
        store_chunk(p.grad_input + p.gi.start(row), p.gi, pack<T>(x), first, p.length);
    }
}

constexpr int COLUMN_LANES = 8;  // rows that a block of columns sums at once, a warp each

// Stage one of the weights' gradients: a block sums WARP vectors of columns over the rows of one group.
template <typename T, bool CENTRED>
__device__ void norm_weights_block(const NormWeights<T>& w, const NormBackward<T>& p) {
    constexpr int E = Vec<T>::size, SUMS = CENTRED ? 2 : 1, WIDTH = WARP * E;
    __shared__ float lanes[SUMS][COLUMN_LANES][WIDTH];
    const int64_t first = (int64_t{blockIdx.x} * WARP + threadIdx.x) * E;
    float x[E], g[E], weight[E] = {}, bias[E] = {};
    for (int64_t row = int64_t{blockIdx.y} * COLUMN_LANES + threadIdx.y; row < p.count;
         row += int64_t{gridDim.y} * COLUMN_LANES) {
        const Stats stats = load_stats<CENTRED>(p.stats, row);
        unpack(load_chunk(p.input + p.in.start(row), p.in, first, p.length, 0.0f), x);
        unpack(load_chunk(p.grad + p.g.start(row), p.g, first, p.length, 0.0f), g);
#pragma unroll
        for (int e = 0; e < E; ++e) {
            weight[e] = fmaf(g[e], normalized<CENTRED>(x[e], stats), weight[e]);
            bias[e] += g[e];
        }
    }
#pragma unroll
    for (int e = 0; e < E; ++e) {
        lanes[0][threadIdx.y][e * WARP + threadIdx.x] = weight[e];
        if constexpr (CENTRED) lanes[1][threadIdx.y][e * WARP + threadIdx.x] = bias[e];
    }
    __syncthreads();
    const int thread = threadIdx.y * WARP + threadIdx.x;
    for (int i = thread; i < SUMS * WIDTH; i += COLUMN_LANES * WARP) {
        const int sum = i / WIDTH, e = i % WIDTH / WARP, lane = i % WARP;
        const int64_t column = (int64_t{blockIdx.x} * WARP + lane) * E + e;
        float total = 0.0f;
#pragma unroll
        for (int y = 0; y < COLUMN_LANES; ++y) total += lanes[sum][y][i % WIDTH];
        if (column < p.length) w.partials[(int64_t{sum} * w.groups + blockIdx.y) * p.length + column] = total;
    }
}

// Stage two: the sums of weight and bias over the groups, blockIdx.y the one or the other.
template <typename T>
__device__ void norm_weights_sum(const NormWeights<T>& w, int64_t length) {
    begin_early();
    T* const out = blockIdx.y == 0 ? w.grad_weight : w.grad_bias;
    if (out != nullptr) sum_shares(out, w.partials + int64_t{blockIdx.y} * w.groups * length, w.groups, length);
}

}  // namespace kl
