// Normalised rows in registers of the threads that share them, on one block or a cluster: the last two steps of the climb
// of layer_norm, rms_norm and add_rms_norm.
#pragma once

#include <type_traits>

#include "norm.cuh"
#include "slots.cuh"

namespace kl {

// ---- forward -------------------------------------------------------------------------------------------------------

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

// Weight and bias wait in shared memory, in the first slots of each thread, and serve every row that it goes through.
// `gather(tile, row, live)` makes a row in registers, zeros past its end, and may need more slots.
template <typename T, bool CENTRED, bool WHOLE, bool CLUSTER, typename Gather>
__device__ void norm_registers_of(const NormForward<T>& p, const RowShare<CLUSTER>& share, const Slots<T>& slots,
                                  Gather&& gather) {
    __shared__ Mailbox<CLUSTER, float> of_sum[CENTRED ? 1 : 2];
    __shared__ Mailbox<CLUSTER, Pair> of_deviations;
    constexpr int V = ROW_VECTORS, E = Vec<T>::size, WEIGHT = 0, BIAS = V;
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
        gather(tile, row, live);
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

// Rows as they are, or with a RESIDUAL the sum of two, which is stored.
template <typename T, bool CENTRED, bool RESIDUAL, bool WHOLE, bool CLUSTER>
__device__ void norm_registers(const NormForward<T>& p) {
#if __CUDA_ARCH__ >= 800
    if (!exists_here<CLUSTER>()) return;
    extern __shared__ uint4 in_shared[];
    const RowShare<CLUSTER> share;
    const auto gather = [&](Vec<T>(&tile)[ROW_VECTORS], int64_t row, bool live) {
        load_row<WHOLE>(tile, p.input + p.in.start(row), p.in, share, live, p.length, 0.0f);
        if constexpr (RESIDUAL) {
            Vec<T> residual[ROW_VECTORS];
            load_row<WHOLE>(residual, p.residual + p.res.start(row), p.res, share, live, p.length, 0.0f);
#pragma unroll
            for (int v = 0; v < ROW_VECTORS; ++v) tile[v] = add_vec(tile[v], residual[v]);
            store_row<WHOLE>(p.sum + p.out.start(row), p.out, tile, share, live, p.length);
        }
    };
    norm_registers_of<T, CENTRED, WHOLE, CLUSTER>(p, share, Slots<T>(in_shared), gather);
#endif
}

// ---- backward ------------------------------------------------------------------------------------------------------

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
// sums of its columns in registers over all the rows that it goes through: those of the weights too where nobody wants
// them, which costs no byte and spares half of the instances.
template <typename T, bool CENTRED, bool RESIDUAL, bool WHOLE, bool CLUSTER>
__device__ void norm_backward_registers(const NormWeights<T>& w, const NormBackward<T>& p) {
#if __CUDA_ARCH__ >= 800
    if (!exists_here<CLUSTER>()) return;
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
        slots.template fetch<WHOLE>(input_slot(turn), p.input + p.in.start(row), p.in, share, live, p.length, 0.0f);
        slots.template fetch<WHOLE>(grad_slot(turn), p.grad + p.g.start(row), p.g, share, live, p.length, 0.0f);
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
                grad_weight[v][e] = fmaf(g[e], x_hat, grad_weight[v][e]);
                if constexpr (CENTRED) grad_bias[v][e] += g[e];
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
    cp_async_wait<0>();
    if (w.partials == nullptr) return;
    const int64_t group = CLUSTER ? share.row : blockIdx.x;
    float* const partials = w.partials + group * p.length;
    auto* const scratch = reinterpret_cast<float*>(in_shared);
    store_partials<WHOLE, CLUSTER, T>(partials, grad_weight, share, scratch, p.length);
    if constexpr (CENTRED) {
        store_partials<WHOLE, CLUSTER, T>(partials + w.groups * p.length, grad_bias, share, scratch, p.length);
    }
#endif
}

}  // namespace kl
