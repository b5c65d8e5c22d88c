// layer_norm, rung 1 of 6: naive
// rms_norm, add_rms_norm, rung 1 of 5: naive
// Idea      One thread per row. Backward: one thread per row for the input's gradient, one per column for the weights'.
// Predicts  Lanes of a warp read addresses a row apart: each load fetches a 32-byte sector for one element.
// Limit now Uncoalesced reads; few rows or columns leave most of the GPU idle.
// Next      `block`: one block per row, so that lanes read neighbouring addresses.
#pragma once

#include "norm/norm.cuh"

namespace kl {

constexpr int NORM_NAIVE_THREADS = 128;

/// Normalises this thread's row. With a residual, `p.sum` receives the sum of both operands first.
template <typename T, bool IS_LAYERNORM, bool HAS_RESIDUAL>
__device__ void norm_naive(const NormForward<T>& p) {
    const int64_t row = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (row >= p.count) return;
    const T* x = p.input + p.in.start(row);
    int64_t stride = p.in.stride;
    if constexpr (HAS_RESIDUAL) {
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
    if constexpr (IS_LAYERNORM) {
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
    store_stats<IS_LAYERNORM>(p.stats, row, stats);
    T* const out = p.output + p.out.start(row);
    for (int64_t i = 0; i < p.length; ++i) {
        const float scaled = normalized<IS_LAYERNORM>(to_float(x[i * stride]), stats) * parameter_at(p.weight, i, 1.0f);
        out[i * p.out.stride] = from_float<T>(scaled + parameter_at(p.bias, i, 0.0f));
    }
}

template <class Op, typename T>
__global__ void norm_naive_kernel(__grid_constant__ const NormForward<T> p) {
    norm_naive<T, Op::IS_LAYERNORM, Op::HAS_RESIDUAL>(p);
}

template <class Op, typename T>
__global__ void norm_backward_naive_kernel(__grid_constant__ const NormBackward<T> p) {
    constexpr bool IS_LAYERNORM = Op::IS_LAYERNORM;
    const int64_t row = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (row >= p.count) return;
    const T* const x = p.input + p.in.start(row);
    const T* const g = p.grad + p.g.start(row);
    const Stats stats = load_stats<IS_LAYERNORM>(p.stats, row);
    CompensatedSum plain, dot;
    for (int64_t i = 0; i < p.length; ++i) {
        const float weighted = to_float(g[i * p.g.stride]) * parameter_at(p.weight, i, 1.0f);
        plain.add(weighted);
        dot.add(weighted * normalized<IS_LAYERNORM>(to_float(x[i * p.in.stride]), stats));
    }
    const float length = static_cast<float>(p.length);
    const Pair means{plain.sum / length, dot.sum / length};
    T* const gi = p.grad_input + p.gi.start(row);
    for (int64_t i = 0; i < p.length; ++i) {
        const float weighted = to_float(g[i * p.g.stride]) * parameter_at(p.weight, i, 1.0f);
        const float x_hat = normalized<IS_LAYERNORM>(to_float(x[i * p.in.stride]), stats);
        float value = gradient<IS_LAYERNORM>(x_hat, weighted, means, stats.rstd);
        if constexpr (Op::HAS_RESIDUAL) value += to_float(p.grad_sum[p.gs.start(row) + i * p.gs.stride]);
        gi[i * p.gi.stride] = from_float<T>(value);
    }
}

template <class Op, typename T>
__global__ void norm_backward_naive_weights_kernel(const NormWeights<T> w, __grid_constant__ const NormBackward<T> p) {
    constexpr bool IS_LAYERNORM = Op::IS_LAYERNORM;
    const int64_t column = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (column >= p.length) return;
    CompensatedSum weight, bias;
    for (int64_t row = 0; row < p.count; ++row) {
        const float g = to_float(p.grad[p.g.start(row) + column * p.g.stride]);
        const float x = to_float(p.input[p.in.start(row) + column * p.in.stride]);
        weight.add(g * normalized<IS_LAYERNORM>(x, load_stats<IS_LAYERNORM>(p.stats, row)));
        bias.add(g);
    }
    if (w.grad_weight != nullptr) w.grad_weight[column] = from_float<T>(weight.sum);
    if (w.grad_bias != nullptr) w.grad_bias[column] = from_float<T>(bias.sum);
}

// ---- host ----------------------------------------------------------------------------------------------------------

template <class Op, typename T>
void launch_naive(const NormForward<T>& p, const Launch& launch) {
    const auto grid = grid_size(ceil_div(p.count, NORM_NAIVE_THREADS));
    norm_naive_kernel<Op, T><<<grid, NORM_NAIVE_THREADS, 0, launch.stream>>>(p);
}

template <class Op, typename T>
void launch_backward_naive(const NormWeights<T>& w, const NormBackward<T>& p, const Launch& launch) {
    const auto rows = grid_size(ceil_div(p.count, NORM_NAIVE_THREADS));
    const auto columns = grid_size(ceil_div(p.length, NORM_NAIVE_THREADS));
    if (p.grad_input != nullptr) norm_backward_naive_kernel<Op, T><<<rows, NORM_NAIVE_THREADS, 0, launch.stream>>>(p);
    if (w.wanted()) norm_backward_naive_weights_kernel<Op, T><<<columns, NORM_NAIVE_THREADS, 0, launch.stream>>>(w, p);
}

}  // namespace kl
