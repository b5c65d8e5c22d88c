// Normalised rows, for layer_norm, rms_norm and add_rms_norm: what their kernels do, step by step, and how each step is
// launched. CENTRED rows are shifted to mean zero first; with a RESIDUAL the rows are the sum of two operands.
#pragma once

#include <optional>
#include <tuple>
#include <type_traits>

#include "mma.cuh"
#include "ops.h"
#include "rows.cuh"

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
    float* const of_row = stats + row * STATS<CENTRED>;
    if constexpr (CENTRED) {
        of_row[0] = value.mean;
        of_row[1] = value.rstd;
        of_row[2] = value.shift;
    } else {
        of_row[0] = value.rstd;
    }
}

template <bool CENTRED>
__device__ float normalized(float x, const Stats& stats) {
    return CENTRED ? fmaf(x - stats.mean, stats.rstd, stats.shift) : x * stats.rstd;
}

__device__ inline Stats stats_of_squares(float squares, int64_t length, float eps) {
    return {0.0f, rsqrtf(squares / static_cast<float>(length) + eps), 0.0f};
}

// From sum and squares of the deviations from a mean that has been rounded: their sum is what the rounding lost.
__device__ inline Stats stats_of_deviations(float mean, Pair deviations, int64_t length, float eps) {
    const float lost = deviations.first / static_cast<float>(length);
    const float variance = deviations.second / static_cast<float>(length) - lost * lost;
    const float rstd = rsqrtf((variance < 0.0f ? 0.0f : variance) + eps);
    return {mean, rstd, -lost * rstd};
}

// d x = rstd · (w·dy − mean(w·dy) − x̂ · mean(w·dy·x̂)), the first of the means only of what was centred.
template <bool CENTRED>
__device__ float gradient(float x_hat, float weighted, Pair means, float rstd) {
    return fmaf(-x_hat, means.second, CENTRED ? weighted - means.first : weighted) * rstd;
}

// ---- operands ------------------------------------------------------------------------------------------------------
// weight and bias are dense, and null where absent. The rows of sum and output lie alike.

template <typename T>
struct NormForward {
    T *output, *sum;
    Rows out;
    float* stats;  // (count, STATS)
    const T *input, *residual;
    Rows in, res;
    const T *weight, *bias;
    Rows parameter;
    int64_t count, length;
    float eps;
};

template <typename T>
struct NormBackward {
    T* grad_input;  // null where not wanted
    Rows gi;
    const T *grad, *grad_sum, *input;
    Rows g, gs, in;
    const float* stats;
    const T* weight;
    Rows parameter;
    int64_t count, length;
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

template <typename T>
__device__ Vec<T> load_parameter(const T* parameter, const Rows& rows, int64_t first, int64_t length, float absent) {
    if (parameter != nullptr) return load_chunk(parameter, rows, first, length, absent);
    const uint4 word = filled<T>(absent);
    return reinterpret_cast<const Vec<T>&>(word);
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
        stats = stats_of_deviations(mean, {lost.sum, squares.sum}, p.length, p.eps);
    } else {
        for (int64_t i = 0; i < p.length; ++i) squares.add(to_float(x[i * stride]) * to_float(x[i * stride]));
        stats = stats_of_squares(squares.sum, p.length, p.eps);
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
    Stats stats = stats_of_squares(sum, p.length, p.eps);
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
        stats = stats_of_deviations(mean, deviations, p.length, p.eps);
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

constexpr int GROUP_LANES = 16;  // groups that stage two sums at once, a warp each

// Stage two: the groups' sums, WARP columns a block, in an order that does not depend on timing.
template <typename T>
__device__ void norm_weights_sum(const NormWeights<T>& w, int64_t length) {
    __shared__ float lanes[GROUP_LANES][WARP];
    T* const out = blockIdx.y == 0 ? w.grad_weight : w.grad_bias;
    if (out == nullptr) return;
    const int64_t column = int64_t{blockIdx.x} * WARP + threadIdx.x;
    float sum = 0.0f;
    if (column < length) {
        for (int group = threadIdx.y; group < w.groups; group += GROUP_LANES) {
            sum += w.partials[(int64_t{blockIdx.y} * w.groups + group) * length + column];
        }
    }
    lanes[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || column >= length) return;
#pragma unroll
    for (int y = 1; y < GROUP_LANES; ++y) sum += lanes[y][threadIdx.x];
    out[column] = from_float<T>(sum);
}

// ---- registers, cluster: rows in registers, forward ------------------------------------------------------------------

// A thread's own vectors in shared memory, 16 bytes of each operand's row that it shares. Each thread fetches, and later
// reads, its own ones only, so that no barrier is needed; and cp.async needs no register until they have come.
template <typename T>
struct Slots {
    uint4* own;
    int threads;  // of the block: so far apart are a thread's slots

    __device__ explicit Slots(uint4* shared)
        : own(shared + threadIdx.y * blockDim.x + threadIdx.x), threads(blockDim.x * blockDim.y) {}

    __device__ uint4* slot(int i) const { return own + i * threads; }

    __device__ void read(int i, float (&x)[Vec<T>::size]) const {
        const uint4 word = *slot(i);
        unpack(reinterpret_cast<const Vec<T>&>(word), x);
    }

    // Vector v of a row goes to slot begin + v: zeros past the end of the row, and for a thread without one.
    template <bool WHOLE, typename Share>
    __device__ void fetch(int begin, const T* row, const Rows& rows, const Share& share, bool live,
                          int64_t length) const {
#pragma unroll
        for (int v = 0; v < ROW_VECTORS; ++v) {
            const int64_t first = int64_t{share.first + v * share.step} * Vec<T>::size;
            if constexpr (WHOLE) {
                cp_async16_if(shared_address(slot(begin + v)), row + first, live && first < length);
            } else {
                const Vec<T> loaded = load_chunk(row, rows, first, live ? length : 0, 0.0f);
                *slot(begin + v) = reinterpret_cast<const uint4&>(loaded);
            }
        }
    }

    // The same of weight or bias, which other blocks of the SM want too, and so by way of its L1.
    template <bool WHOLE, typename Share>
    __device__ void fetch_parameter(int begin, const T* parameter, const Rows& rows, const Share& share, int64_t length,
                                    float absent) const {
#pragma unroll
        for (int v = 0; v < ROW_VECTORS; ++v) {
            const int64_t first = int64_t{share.first + v * share.step} * Vec<T>::size;
            if (WHOLE && parameter != nullptr && first < length) {
                asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(shared_address(slot(begin + v))),
                             "l"(parameter + first)
                             : "memory");
            } else {
                const Vec<T> loaded = load_parameter(WHOLE ? nullptr : parameter, rows, first, length, absent);
                *slot(begin + v) = reinterpret_cast<const uint4&>(loaded);
            }
        }
    }
};

// Bytes of shared memory for a row of each of so many operands.
inline int slot_bytes(const RowLaunch& shape, int operands) {
    return static_cast<int>(shape.threads * shape.rows) * operands * ROW_VECTORS * 16;
}

// Mean and deviations in two passes over registers: as exact as it gets, and no byte moves for it.
template <bool CENTRED, bool WHOLE, bool CLUSTER, typename T, int VECTORS>
__device__ Stats row_stats(Vec<T> (&tile)[VECTORS], const RowShare<CLUSTER>& share, int64_t length, float eps,
                           Mailbox<CLUSTER, float>& of_sum, Mailbox<CLUSTER, Pair>& of_deviations) {
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
    sum = reduce_over_row<CLUSTER>(sum, Sum{}, of_sum);
    if constexpr (!CENTRED) return stats_of_squares(sum, length, eps);
    const float mean = sum / static_cast<float>(length);
    stay_packed(tile);
    Pair deviations{0.0f, 0.0f};
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        unpack(tile[v], x);
        const int64_t first = int64_t{share.first + v * share.step} * E;
        Pair partial{0.0f, 0.0f};
#pragma unroll
        for (int e = 0; e < E; ++e) {
            const float deviation = first + (WHOLE ? 0 : e) < length ? x[e] - mean : 0.0f;
            partial = {partial.first + deviation, fmaf(deviation, deviation, partial.second)};
        }
        deviations = PairSum{}(deviations, partial);
    }
    return stats_of_deviations(mean, reduce_over_row<CLUSTER>(deviations, PairSum{}, of_deviations), length, eps);
}

// Weight and bias wait in shared memory, and serve every row that the thread goes through.
template <typename T, bool CENTRED, bool RESIDUAL, bool WHOLE, bool CLUSTER>
__device__ void norm_registers(const NormForward<T>& p) {
    extern __shared__ uint4 in_shared[];
    __shared__ Mailbox<CLUSTER, float> of_sum[CENTRED ? 1 : 2];
    __shared__ Mailbox<CLUSTER, Pair> of_deviations;
    constexpr int V = ROW_VECTORS, E = Vec<T>::size, WEIGHT = 0, BIAS = V;
    const RowShare<CLUSTER> share;
    const Slots<T> slots(in_shared);
    Vec<T> tile[V];
    float x[E], scale[E], offset[E];
    slots.template fetch_parameter<WHOLE>(WEIGHT, p.weight, p.parameter, share, p.length, 1.0f);
    if constexpr (CENTRED) slots.template fetch_parameter<WHOLE>(BIAS, p.bias, p.parameter, share, p.length, 0.0f);
    cp_async_commit();
    int turn = 0;
    // As many turns for every thread of the block: those without a row join in what needs all.
    for (int64_t first_row = share.row - threadIdx.y; first_row < p.count; first_row += share.rows_at_once, ++turn) {
        const bool live = first_row + threadIdx.y < p.count;
        const int64_t row = live ? first_row + threadIdx.y : 0;
        load_row<WHOLE>(tile, p.input + p.in.start(row), p.in, share, live, p.length, 0.0f);
        if constexpr (RESIDUAL) {
            Vec<T> residual[V];
            load_row<WHOLE>(residual, p.residual + p.res.start(row), p.res, share, live, p.length, 0.0f);
#pragma unroll
            for (int v = 0; v < V; ++v) tile[v] = add_vec(tile[v], residual[v]);
            store_row<WHOLE>(p.sum + p.out.start(row), p.out, tile, share, live, p.length);
        }
        if (turn == 0) share.meet();
        const Stats stats =
            row_stats<CENTRED, WHOLE>(tile, share, p.length, p.eps, of_sum[CENTRED ? 0 : turn % 2], of_deviations);
        if (live && share.first == 0) store_stats<CENTRED>(p.stats, row, stats);
        stay_packed(tile);
        cp_async_wait<0>();
#pragma unroll
        for (int v = 0; v < V; ++v) {
            unpack(tile[v], x);
            slots.read(WEIGHT + v, scale);
            if constexpr (CENTRED) slots.read(BIAS + v, offset);
#pragma unroll
            for (int e = 0; e < E; ++e) {
                x[e] = normalized<CENTRED>(x[e], stats) * scale[e];
                if constexpr (CENTRED) x[e] += offset[e];
            }
            tile[v] = pack<T>(x);
        }
        store_row<WHOLE>(p.output + p.out.start(row), p.out, tile, share, live, p.length);
    }
}

// ---- registers, cluster: the weights' gradients in registers, backward -----------------------------------------------

// A thread's sums over the rows that it went through, as stage one of the weights' gradients. Where rows share a block
// their sums are added up in shared memory first, so that the partials stay few.
template <bool WHOLE, bool CLUSTER, typename T, int V, int E>
__device__ void store_partials(float* partials, const float (&own)[V][E], const RowShare<CLUSTER>& share,
                               float* in_shared, int64_t length) {
    if (blockDim.y == 1) {
#pragma unroll
        for (int v = 0; v < V; ++v) {
            const int64_t first = int64_t{share.first + v * share.step} * E;
            if constexpr (WHOLE) {
                float4* const to = reinterpret_cast<float4*>(partials + first);
                if (first < length) {
#pragma unroll
                    for (int e = 0; e < E; e += 4) {
                        to[e / 4] = make_float4(own[v][e], own[v][e + 1], own[v][e + 2], own[v][e + 3]);
                    }
                }
            } else {
#pragma unroll
                for (int e = 0; e < E; ++e) {
                    if (first + e < length) partials[first + e] = own[v][e];
                }
            }
        }
        return;
    }
    const int width = blockDim.x * V * E, thread = threadIdx.y * blockDim.x + threadIdx.x;
    __syncthreads();  // what stood there before has been read
#pragma unroll
    for (int v = 0; v < V; ++v) {
#pragma unroll
        for (int e = 0; e < E; ++e) in_shared[threadIdx.y * width + (share.first + v * share.step) * E + e] = own[v][e];
    }
    __syncthreads();
    for (int column = thread; column < length; column += ROW_THREADS) {
        float sum = 0.0f;
        for (int y = 0; y < static_cast<int>(blockDim.y); ++y) sum += in_shared[y * width + column];
        partials[column] = sum;
    }
}

// One read of input and gradient, one write: while a row is worked on the next one arrives, and every thread keeps the
// sums of its columns in registers over all the rows that it goes through.
template <typename T, bool CENTRED, bool RESIDUAL, bool WEIGHTS, bool WHOLE, bool CLUSTER>
__device__ void norm_backward_registers(const NormWeights<T>& w, const NormBackward<T>& p) {
    using Sums = std::conditional_t<CENTRED, Pair, float>;
    using Add = std::conditional_t<CENTRED, PairSum, Sum>;
    extern __shared__ uint4 in_shared[];
    __shared__ Mailbox<CLUSTER, Sums> mailbox[2];
    constexpr int V = ROW_VECTORS, E = Vec<T>::size, WEIGHT = 4 * V;
    const RowShare<CLUSTER> share;
    const Slots<T> slots(in_shared);  // input and gradient of one row, of the next one, and the weight
    const auto input_slot = [](int turn) { return 2 * V * turn; };
    const auto grad_slot = [](int turn) { return 2 * V * turn + V; };
    const auto fetch = [&](int64_t first_row, int turn) {
        const bool live = first_row + threadIdx.y < p.count;
        const int64_t row = live ? first_row + threadIdx.y : 0;
        slots.template fetch<WHOLE>(input_slot(turn), p.input + p.in.start(row), p.in, share, live, p.length);
        slots.template fetch<WHOLE>(grad_slot(turn), p.grad + p.g.start(row), p.g, share, live, p.length);
        cp_async_commit();
        return live ? load_stats<CENTRED>(p.stats, row) : Stats{0.0f, 0.0f, 0.0f};
    };
    slots.template fetch_parameter<WHOLE>(WEIGHT, p.weight, p.parameter, share, p.length, 1.0f);
    float grad_weight[V][E] = {}, grad_bias[V][E] = {};
    float x[E], g[E], scale[E];

    int64_t first_row = share.row - threadIdx.y;
    Stats stats = fetch(first_row, 0), next = fetch(first_row + share.rows_at_once, 1);
    share.meet();
    for (int turn = 0; first_row < p.count; first_row += share.rows_at_once, turn ^= 1) {
        const bool live = first_row + threadIdx.y < p.count;
        const int64_t row = live ? first_row + threadIdx.y : 0;
        Vec<T> more[V];
        if constexpr (RESIDUAL) {
            load_row<WHOLE>(more, p.grad_sum + p.gs.start(row), p.gs, share, live, p.length, 0.0f);
        }
        cp_async_wait<1>();
        Sums sums{};
#pragma unroll
        for (int v = 0; v < V; ++v) {
            slots.read(input_slot(turn) + v, x);
            slots.read(grad_slot(turn) + v, g);
            slots.read(WEIGHT + v, scale);
            Pair partial{0.0f, 0.0f};
#pragma unroll
            for (int e = 0; e < E; ++e) {
                const float x_hat = normalized<CENTRED>(x[e], stats), weighted = g[e] * scale[e];
                if constexpr (WEIGHTS) grad_weight[v][e] = fmaf(g[e], x_hat, grad_weight[v][e]);
                if constexpr (WEIGHTS && CENTRED) grad_bias[v][e] += g[e];
                partial = {partial.first + weighted, fmaf(weighted, x_hat, partial.second)};
            }
            if constexpr (CENTRED) sums = PairSum{}(sums, partial);
            if constexpr (!CENTRED) sums += partial.second;
        }
        if (p.grad_input != nullptr) {
            sums = reduce_over_row<CLUSTER>(sums, Add{}, mailbox[turn]);
            Pair means{0.0f, 0.0f};
            if constexpr (CENTRED) means.first = sums.first / static_cast<float>(p.length);
            if constexpr (CENTRED) means.second = sums.second / static_cast<float>(p.length);
            if constexpr (!CENTRED) means.second = sums / static_cast<float>(p.length);
            T* const gi_row = p.grad_input + p.gi.start(row);
#pragma unroll
            for (int v = 0; v < V; ++v) {
                slots.read(input_slot(turn) + v, x);
                slots.read(grad_slot(turn) + v, g);
                slots.read(WEIGHT + v, scale);
#pragma unroll
                for (int e = 0; e < E; ++e) {
                    x[e] = gradient<CENTRED>(normalized<CENTRED>(x[e], stats), g[e] * scale[e], means, stats.rstd);
                }
                if constexpr (RESIDUAL) {
                    unpack(more[v], g);
#pragma unroll
                    for (int e = 0; e < E; ++e) x[e] += g[e];
                }
                store_part<WHOLE>(gi_row, p.gi, pack<T>(x), v, share, live, p.length);
            }
        }
        stats = next;
        next = fetch(first_row + 2 * share.rows_at_once, turn);
    }
    if constexpr (WEIGHTS) {
        cp_async_wait<0>();
        const int64_t group = CLUSTER ? share.row : blockIdx.x;
        float* const partials = w.partials + group * p.length;
        auto* const scratch = reinterpret_cast<float*>(in_shared);
        store_partials<WHOLE, CLUSTER, T>(partials, grad_weight, share, scratch, p.length);
        if constexpr (CENTRED) {
            store_partials<WHOLE, CLUSTER, T>(partials + w.groups * p.length, grad_bias, share, scratch, p.length);
        }
    }
}

// ---- host ----------------------------------------------------------------------------------------------------------

// Calls f with std::true_type or std::false_type, so that a choice made here is a constant there.
template <typename F>
void with_constant(bool value, F&& f) {
    value ? f(std::true_type{}) : f(std::false_type{});
}

template <typename T>
const T* optional_pointer(const std::optional<Tensor>& tensor) {
    return tensor.has_value() ? pointer<T>(*tensor) : nullptr;
}

inline void check_parameter(const std::optional<Tensor>& parameter, const Tensor& input, const char* op,
                            const char* name) {
    if (!parameter.has_value()) return;
    check_like(*parameter, input, op, name);
    KL_CHECK(parameter->dim() == 1 && parameter->size(0) == input.size(-1) && parameter->is_contiguous(), op,
             ": argument `", name, "` must be dense and as long as a row");
}

// The row of the parameters that are there.
inline Rows parameter_rows(const std::optional<Tensor>& weight, const std::optional<Tensor>& bias) {
    const bool whole = (!weight.has_value() || is_aligned16(weight->data_ptr())) &&
                       (!bias.has_value() || is_aligned16(bias->data_ptr()));
    return Rows{Strided{}, 1, whole};
}

inline int multiprocessors(const Launch& launch) {
    int count = 0;
    KL_CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, launch.device));
    return count;
}

inline RowLaunch norm_launch(int64_t chunks, NormStep step) {
    const RowLaunch shape = row_launch(chunks, step == NormStep::cluster);
    KL_CHECK(shape.vectors == ROW_VECTORS, "a row of ", chunks, " vectors of 16 bytes is longer than fits");
    return shape;
}

// Blocks for the forward pass. Where there are rows for many waves of blocks, a block goes through several, for the sake
// of weight and bias; not where that would leave SMs idle at the end.
inline unsigned forward_grid(const RowLaunch& shape, int64_t count, const Launch& launch) {
    constexpr int64_t WAVES = 8, MAX_TURNS = 8, THREADS_PER_SM = 1024;
    const int64_t at_once = multiprocessors(launch) * THREADS_PER_SM / (shape.threads * shape.rows);
    const int64_t turns = std::clamp<int64_t>(shape.grid(count) / (WAVES * at_once), 1, MAX_TURNS);
    return grid_size(ceil_div(ceil_div(count, shape.rows), turns) * shape.cluster);
}

constexpr int NORM_NAIVE_THREADS = 128;
constexpr int BACKWARD_OPERANDS = 5;  // input and gradient of two rows, and the weight

// Output, sum of input and residual (the output again where there is none), and what the backward pass needs of rows.
template <typename Op>
std::tuple<Tensor, Tensor, Tensor> norm_forward(const Tensor& input, const std::optional<Tensor>& residual,
                                                const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                                                double eps, NormStep step) {
    constexpr bool CENTRED = Op::CENTRED;
    check_cuda(input, Op::NAME, "input");
    KL_CHECK(input.dim() > 0, Op::NAME, ": argument `input` must have at least one dimension");
    if (residual.has_value()) check_like(*residual, input, Op::NAME, "residual");
    if (residual.has_value()) check_same_shape(*residual, input, Op::NAME, "residual");
    check_parameter(weight, input, Op::NAME, "weight");
    check_parameter(bias, input, Op::NAME, "bias");
    const Launch launch(input);
    const RowLayout layout(input, -1, Op::NAME);
    Tensor output = layout.dense.allocate(input);
    Tensor sum = residual.has_value() ? layout.dense.allocate(input) : output;
    Tensor stats = empty(input, ScalarType::Float, {layout.count, STATS<CENTRED>});
    if (input.numel() == 0) return {output, sum, stats};
    dispatch(input.scalar_type(), Op::NAME, [&](auto zero) {
        using T = decltype(zero);
        NormForward<T> p{};
        p.output = pointer<T>(output);
        p.sum = pointer<T>(sum);
        p.out = layout.rows(output, Op::NAME);
        p.stats = pointer<float>(stats);
        p.input = pointer<T>(input);
        p.in = layout.rows(input, Op::NAME);
        p.residual = optional_pointer<T>(residual);
        p.res = residual.has_value() ? layout.rows(*residual, Op::NAME) : p.in;
        p.weight = optional_pointer<T>(weight);
        p.bias = optional_pointer<T>(bias);
        p.parameter = parameter_rows(weight, bias);
        p.count = layout.count;
        p.length = layout.length;
        p.eps = static_cast<float>(eps);
        if (step == NormStep::naive) {
            const auto grid = grid_size(ceil_div(p.count, NORM_NAIVE_THREADS));
            Op::template naive<T>()<<<grid, NORM_NAIVE_THREADS, 0, launch.stream>>>(p);
        } else if (step == NormStep::block) {
            Op::template block<T>()<<<grid_size(p.count), NORM_THREADS, 0, launch.stream>>>(p);
        } else {
            const RowLaunch shape = norm_launch(layout.chunks<T>(), step);
            const bool whole = p.in.template vectors<T>(p.length) && p.res.template vectors<T>(p.length) &&
                               p.out.template vectors<T>(p.length) && p.parameter.whole;
            with_constant(whole, [&](auto w) {
                with_constant(shape.cluster > 1, [&](auto c) {
                    constexpr auto kernel = Op::template registers<T, decltype(w)::value, decltype(c)::value>();
                    static DeviceSet asked;
                    constexpr int PARAMETERS = CENTRED ? 2 : 1;
                    allow_shared(kernel, slot_bytes({ROW_THREADS, 1, 1, ROW_VECTORS}, PARAMETERS), launch.device,
                                 asked);
                    launch_rows(kernel, shape, forward_grid(shape, p.count, launch), slot_bytes(shape, PARAMETERS),
                                launch, p);
                });
            });
        }
    });
    KL_LAUNCH_CHECK();
    return {output, sum, stats};
}

struct NormNeeds {
    bool input, weight, bias;
};

// Stage two, of what stage one left of `groups` groups of rows.
template <auto* KERNEL, typename T>
void sum_partials(const NormWeights<T>& w, int64_t length, const Launch& launch) {
    const dim3 grid(grid_size(ceil_div(length, WARP)), w.grad_bias == nullptr ? 1 : 2);
    KERNEL<<<grid, dim3(WARP, GROUP_LANES), 0, launch.stream>>>(w, length);
}

template <typename Op, typename T>
void norm_backward_block(NormWeights<T> w, const NormBackward<T>& p, bool weights, int64_t chunks, const Tensor& like,
                         const Launch& launch) {
    if (p.grad_input != nullptr) {
        Op::template backward_block<T>()<<<grid_size(p.count), NORM_THREADS, 0, launch.stream>>>(p);
    }
    if (!weights) return;
    const int64_t columns = ceil_div(chunks, WARP), wanted = 4 * multiprocessors(launch) / columns;
    w.groups = static_cast<int>(std::clamp<int64_t>(wanted, 1, ceil_div(p.count, COLUMN_LANES)));
    const Tensor partials = empty(like, ScalarType::Float, {Op::CENTRED ? 2 : 1, w.groups, p.length});
    w.partials = pointer<float>(partials);
    const dim3 grid(grid_size(columns), static_cast<unsigned>(w.groups));
    Op::template backward_block_weights<T>()<<<grid, dim3(WARP, COLUMN_LANES), 0, launch.stream>>>(w, p);
    sum_partials<Op::template backward_block_sum<T>()>(w, p.length, launch);
}

template <typename Op, typename T>
void norm_backward_registers(NormWeights<T> w, const NormBackward<T>& p, bool weights, bool whole, RowLaunch shape,
                             const Tensor& like, const Launch& launch) {
    shape.rows = ROW_THREADS / shape.threads;  // a block fills an SM, for the sake of few partials
    with_constant(whole, [&](auto a) {
        with_constant(shape.cluster > 1, [&](auto b) {
            with_constant(weights, [&](auto c) {
                constexpr bool WHOLE = decltype(a)::value, CLUSTER = decltype(b)::value, WEIGHTS = decltype(c)::value;
                constexpr auto kernel = Op::template backward_registers<T, WEIGHTS, WHOLE, CLUSTER>();
                static DeviceSet asked;
                static Resident resident;
                const int bytes = slot_bytes(shape, BACKWARD_OPERANDS);
                allow_shared(kernel, bytes, launch.device, asked);
                const int64_t most = resident.clusters(kernel, shape, bytes, launch);
                w.groups = static_cast<int>(std::min(ceil_div(p.count, shape.rows), most));
                std::optional<Tensor> partials;
                if (WEIGHTS) {
                    partials = empty(like, ScalarType::Float, {Op::CENTRED ? 2 : 1, w.groups, p.length});
                    w.partials = pointer<float>(*partials);
                }
                launch_rows(kernel, shape, w.groups * shape.cluster, bytes, launch, w, p);
                if (WEIGHTS) sum_partials<Op::template backward_registers_sum<T>()>(w, p.length, launch);
            });
        });
    });
}

// Gradients of input, weight and bias; what is not wanted comes back empty.
template <typename Op>
std::tuple<Tensor, Tensor, Tensor> norm_backward(const Tensor& grad, const std::optional<Tensor>& grad_sum,
                                                 const Tensor& input, const std::optional<Tensor>& weight,
                                                 const Tensor& stats, NormNeeds needs, NormStep step) {
    constexpr const char* NAME = Op::BACKWARD_NAME;
    check_cuda(grad, NAME, "grad");
    check_like(input, grad, NAME, "input");
    check_same_shape(input, grad, NAME, "input");
    if (grad_sum.has_value()) check_like(*grad_sum, grad, NAME, "grad_sum");
    if (grad_sum.has_value()) check_same_shape(*grad_sum, grad, NAME, "grad_sum");
    check_parameter(weight, input, NAME, "weight");
    const Launch launch(input);
    const RowLayout layout(input, -1, NAME);
    KL_CHECK(stats.scalar_type() == ScalarType::Float && stats.is_contiguous() &&
                 stats.numel() == layout.count * STATS<Op::CENTRED>,
             NAME, ": argument `stats` must be what the forward pass gave");
    const ScalarType dtype = input.scalar_type();
    Tensor grad_input = needs.input ? layout.dense.allocate(input) : empty(input, dtype, {0});
    Tensor grad_weight = empty(input, dtype, {needs.weight ? layout.length : 0});
    Tensor grad_bias = empty(input, dtype, {needs.bias ? layout.length : 0});
    const bool weights = needs.weight || needs.bias;
    dispatch(dtype, NAME, [&](auto zero) {
        using T = decltype(zero);
        NormWeights<T> w{};
        if (needs.weight) w.grad_weight = pointer<T>(grad_weight);
        if (needs.bias) w.grad_bias = pointer<T>(grad_bias);
        if (input.numel() == 0) {  // no rows: sums of nothing
            if (weights && layout.length > 0) {
                sum_partials<Op::template backward_block_sum<T>()>(w, layout.length, launch);
            }
            return;
        }
        NormBackward<T> p{};
        if (needs.input) p.grad_input = pointer<T>(grad_input);
        p.in = layout.rows(input, NAME);
        p.gi = needs.input ? layout.rows(grad_input, NAME) : p.in;
        p.grad = pointer<T>(grad);
        p.g = layout.rows(grad, NAME);
        p.grad_sum = optional_pointer<T>(grad_sum);
        p.gs = grad_sum.has_value() ? layout.rows(*grad_sum, NAME) : p.g;
        p.input = pointer<T>(input);
        p.stats = pointer<float>(stats);
        p.weight = optional_pointer<T>(weight);
        p.parameter = parameter_rows(weight, std::nullopt);
        p.count = layout.count;
        p.length = layout.length;
        if (step == NormStep::naive) {
            const auto rows = grid_size(ceil_div(p.count, NORM_NAIVE_THREADS));
            const auto columns = grid_size(ceil_div(p.length, NORM_NAIVE_THREADS));
            if (needs.input) Op::template backward_naive<T>()<<<rows, NORM_NAIVE_THREADS, 0, launch.stream>>>(p);
            if (weights) {
                Op::template backward_naive_weights<T>()<<<columns, NORM_NAIVE_THREADS, 0, launch.stream>>>(w, p);
            }
        } else if (step == NormStep::block) {
            norm_backward_block<Op>(w, p, weights, layout.chunks<T>(), input, launch);
        } else if (needs.input || weights) {
            const bool whole = p.in.template vectors<T>(p.length) && p.g.template vectors<T>(p.length) &&
                               p.gs.template vectors<T>(p.length) && p.gi.template vectors<T>(p.length) &&
                               p.parameter.whole;
            norm_backward_registers<Op>(w, p, weights, whole, norm_launch(layout.chunks<T>(), step), input, launch);
        }
    });
    KL_LAUNCH_CHECK();
    return {grad_input, grad_weight, grad_bias};
}

// What the compiler made of an operation's kernels, with a residual or without, for operands of one dtype.
template <typename Op>
void norm_kernel_facts(std::vector<KernelFacts>& facts, ScalarType dtype) {
    const std::string forward = std::string(Op::NAME) + ".", backward = std::string(Op::BACKWARD_NAME) + ".";
    const auto add = [&](const std::string& name, KernelFacts fact) {
        fact.name = name;
        facts.push_back(fact);
    };
    dispatch(dtype, "kernels", [&](auto zero) {
        using T = decltype(zero);
        constexpr int COLUMNS = WARP * COLUMN_LANES, LANES = WARP * GROUP_LANES;
        add(forward + "naive", kernel_facts<Op::template naive<T>()>("", NORM_NAIVE_THREADS));
        add(forward + "block", kernel_facts<Op::template block<T>()>("", NORM_THREADS));
        const RowLaunch small{WARP, MIN_BLOCK / WARP, 1, ROW_VECTORS}, large{ROW_THREADS, 1, 1, ROW_VECTORS};
        constexpr int PARAMETERS = Op::CENTRED ? 2 : 1;
        add(forward + "registers",
            kernel_facts<Op::template registers<T, true, false>()>("", MIN_BLOCK, slot_bytes(small, PARAMETERS)));
        add(forward + "cluster",
            kernel_facts<Op::template registers<T, true, true>()>("", ROW_THREADS, slot_bytes(large, PARAMETERS)));
        add(backward + "naive", kernel_facts<Op::template backward_naive<T>()>("", NORM_NAIVE_THREADS));
        add(backward + "naive (weights)",
            kernel_facts<Op::template backward_naive_weights<T>()>("", NORM_NAIVE_THREADS));
        add(backward + "block", kernel_facts<Op::template backward_block<T>()>("", NORM_THREADS));
        add(backward + "block (weights)", kernel_facts<Op::template backward_block_weights<T>()>("", COLUMNS));
        add(backward + "block (sum)", kernel_facts<Op::template backward_block_sum<T>()>("", LANES));
        add(backward + "registers", kernel_facts<Op::template backward_registers<T, true, true, false>()>(
                                        "", ROW_THREADS, slot_bytes(large, BACKWARD_OPERANDS)));
        add(backward + "registers (sum)", kernel_facts<Op::template backward_registers_sum<T>()>("", LANES));
        add(backward + "cluster", kernel_facts<Op::template backward_registers<T, true, true, true>()>(
                                      "", ROW_THREADS, slot_bytes(large, BACKWARD_OPERANDS)));
    });
}

}  // namespace kl
