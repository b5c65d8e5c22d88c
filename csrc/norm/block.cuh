// layer_norm, rung 2 of 6: block
// rms_norm, add_rms_norm, rung 2 of 5: block
// Idea      One block per row, 16 bytes per load. The weights' gradients take two stages of fixed order: blocks of
//           columns sum groups of rows, then column_sum.cuh sums the groups.
// Predicts  A warp's load fills whole sectors: 32 / sizeof(T) times fewer of them than `naive` fetches.
// Limit now layer_norm reads a row three times, rms_norm twice; backward, input and gradient are read twice, and once
//           more for the weights.
// Next      `registers`: read the row once and keep it in registers.
#pragma once

#include "norm/norm.cuh"

namespace kl {

constexpr int NORM_THREADS = 512;

template <class Op, typename T>
__global__ void __launch_bounds__(NORM_THREADS) norm_block_kernel(__grid_constant__ const NormForward<T> p) {
    constexpr bool IS_LAYERNORM = Op::IS_LAYERNORM, HAS_RESIDUAL = Op::HAS_RESIDUAL;
    __shared__ float scratch[WARP];
    constexpr int E = Vec<T>::size;
    constexpr int64_t STEP = int64_t{NORM_THREADS} * E;
    const int64_t row = blockIdx.x, begin = int64_t{threadIdx.x} * E;
    const T* x_row = p.input + p.in.start(row);
    const Rows* rows = &p.in;
    float x[E], scale[E], offset[E], sum = 0.0f;
    for (int64_t first = begin; first < p.length; first += STEP) {
        Vec<T> v = load_chunk(x_row, *rows, first, p.length, 0.0f);
        if constexpr (HAS_RESIDUAL) {
            v = add_vec(v, load_chunk(p.residual + p.res.start(row), p.res, first, p.length, 0.0f));
            store_chunk(p.sum + p.out.start(row), p.out, v, first, p.length);
        }
        unpack(v, x);
        float partial = 0.0f;
#pragma unroll
        for (int e = 0; e < E; ++e) partial += IS_LAYERNORM ? x[e] : x[e] * x[e];
        sum += partial;
    }
    if constexpr (HAS_RESIDUAL) {  // each thread reads again what it wrote itself
        x_row = p.sum + p.out.start(row);
        rows = &p.out;
    }
    sum = block_reduce(sum, Sum{}, scratch);
    Stats stats = stats_of_squares(sum * p.per_element, p.eps);
    if constexpr (IS_LAYERNORM) {
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
    if (threadIdx.x == 0) store_stats<IS_LAYERNORM>(p.stats, row, stats);
    for (int64_t first = begin; first < p.length; first += STEP) {
        unpack(load_chunk(x_row, *rows, first, p.length, 0.0f), x);
        unpack(load_parameter(p.weight, p.parameter, first, p.length, 1.0f), scale);
        unpack(load_parameter(p.bias, p.parameter, first, p.length, 0.0f), offset);
#pragma unroll
        for (int e = 0; e < E; ++e) x[e] = fmaf(normalized<IS_LAYERNORM>(x[e], stats), scale[e], offset[e]);
        store_chunk(p.output + p.out.start(row), p.out, pack<T>(x), first, p.length);
    }
}

template <class Op, typename T>
__global__ void __launch_bounds__(NORM_THREADS) norm_backward_block_kernel(__grid_constant__ const NormBackward<T> p) {
    constexpr bool IS_LAYERNORM = Op::IS_LAYERNORM, HAS_RESIDUAL = Op::HAS_RESIDUAL;
    __shared__ float scratch[WARP];
    constexpr int E = Vec<T>::size;
    constexpr int64_t STEP = int64_t{NORM_THREADS} * E;
    const int64_t row = blockIdx.x, begin = int64_t{threadIdx.x} * E;
    const T* const x_row = p.input + p.in.start(row);
    const T* const g_row = p.grad + p.g.start(row);
    const Stats stats = load_stats<IS_LAYERNORM>(p.stats, row);
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
            partial = PairSum{}(partial, {weighted, weighted * normalized<IS_LAYERNORM>(x[e], stats)});
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
        if constexpr (HAS_RESIDUAL) {
            unpack(load_chunk(p.grad_sum + p.gs.start(row), p.gs, first, p.length, 0.0f), more);
        }
#pragma unroll
        for (int e = 0; e < E; ++e) {
            x[e] = gradient<IS_LAYERNORM>(normalized<IS_LAYERNORM>(x[e], stats), g[e] * scale[e], means, stats.rstd);
            if constexpr (HAS_RESIDUAL) x[e] += more[e];
        }
        store_chunk(p.grad_input + p.gi.start(row), p.gi, pack<T>(x), first, p.length);
    }
}

constexpr int COLUMN_LANES = 8;  // rows that a block of columns sums at once, a warp each

// Stage one of the weights' gradients: a block sums WARP vectors of columns over the rows of one group.
template <class Op, typename T>
__global__ void norm_backward_block_weights_kernel(const NormWeights<T> w, __grid_constant__ const NormBackward<T> p) {
    constexpr bool IS_LAYERNORM = Op::IS_LAYERNORM;
    constexpr int E = Vec<T>::size, SUMS = IS_LAYERNORM ? 2 : 1, WIDTH = WARP * E;
    __shared__ float lanes[SUMS][COLUMN_LANES][WIDTH];
    const int64_t first = (int64_t{blockIdx.x} * WARP + threadIdx.x) * E;
    float x[E], g[E], weight[E] = {}, bias[E] = {};
    for (int64_t row = int64_t{blockIdx.y} * COLUMN_LANES + threadIdx.y; row < p.count;
         row += int64_t{gridDim.y} * COLUMN_LANES) {
        const Stats stats = load_stats<IS_LAYERNORM>(p.stats, row);
        unpack(load_chunk(p.input + p.in.start(row), p.in, first, p.length, 0.0f), x);
        unpack(load_chunk(p.grad + p.g.start(row), p.g, first, p.length, 0.0f), g);
#pragma unroll
        for (int e = 0; e < E; ++e) {
            weight[e] = fmaf(g[e], normalized<IS_LAYERNORM>(x[e], stats), weight[e]);
            bias[e] += g[e];
        }
    }
#pragma unroll
    for (int e = 0; e < E; ++e) {
        lanes[0][threadIdx.y][e * WARP + threadIdx.x] = weight[e];
        if constexpr (IS_LAYERNORM) lanes[1][threadIdx.y][e * WARP + threadIdx.x] = bias[e];
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

// ---- host ----------------------------------------------------------------------------------------------------------

template <class Op, typename T>
void launch_block(const NormForward<T>& p, const Launch& launch) {
    norm_block_kernel<Op, T><<<grid_size(p.count), NORM_THREADS, 0, launch.stream>>>(p);
}

template <class Op, typename T>
void launch_backward_block(NormWeights<T> w, const NormBackward<T>& p, const Tensor& like, const Launch& launch) {
    if (p.grad_input != nullptr) {
        norm_backward_block_kernel<Op, T><<<grid_size(p.count), NORM_THREADS, 0, launch.stream>>>(p);
    }
    if (!w.wanted()) return;
    const int64_t columns = ceil_div(ceil_div(p.length, Vec<T>::size), WARP);
    const int64_t wanted = 4 * multiprocessors(launch.device) / columns;
    w.groups = static_cast<int>(std::clamp<int64_t>(wanted, 1, ceil_div(p.count, COLUMN_LANES)));
    const Tensor partials = empty(like, ScalarType::Float, {Op::IS_LAYERNORM ? 2 : 1, w.groups, p.length});
    w.partials = pointer<float>(partials);
    const dim3 grid(grid_size(columns), static_cast<unsigned>(w.groups));
    norm_backward_block_weights_kernel<Op, T><<<grid, dim3(WARP, COLUMN_LANES), 0, launch.stream>>>(w, p);
    launch_column_sum<Op>(w, p.length, launch);
}

}  // namespace kl
