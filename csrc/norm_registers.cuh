// Normalised rows in registers of the threads that share them, on one block or a cluster: the last two steps of the climb
// of layer_norm, rms_norm and add_rms_norm.
#pragma once

#include <type_traits>

#include "norm.cuh"
#include "slots.cuh"

namespace kl {

// ---- forward -------------------------------------------------------------------------------------------------------

// Mean and deviations in two passes over registers: as exact as it gets, and no byte moves for it. What rounding the mean
// loses shows in float32 alone: of 16-bit elements it is far below their own spacing.
template <typename T>
constexpr bool SHIFTED = sizeof(T) == 4;
template <typename T>
using Deviations = std::conditional_t<SHIFTED<T>, Pair, float>;  // their sum and squares, or the squares

template <bool CENTRED, bool WHOLE, bool CLUSTER, typename T, int VECTORS>
__device__ Stats row_stats(Vec<T> (&tile)[VECTORS], const RowShare<CLUSTER>& share, const NormForward<T>& p,
                           Mailbox<CLUSTER, float>& of_sum, Mailbox<CLUSTER, Deviations<T>>& of_deviations, int turn) {
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
    sum = reduce_over_row<CLUSTER>(sum, Sum{}, of_sum, turn);
    if constexpr (!CENTRED) return stats_of_squares(sum * p.per_element, p.eps);
    const float mean = sum * p.per_element;
    stay_packed(tile);
    Deviations<T> deviations{};
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        unpack(tile[v], x);
        const int first = (share.first + v * share.step) * E;
        const float centre =
            first < static_cast<int>(p.length) ? mean : 0.0f;  // past the end there are zeros, which are not to deviate
        float lost = 0.0f, squares = 0.0f;
#pragma unroll
        for (int e = 0; e < E; ++e) {
            const float deviation = x[e] - (WHOLE || first + e < static_cast<int>(p.length) ? centre : 0.0f);
            if constexpr (SHIFTED<T>) lost += deviation;
            squares = fmaf(deviation, deviation, squares);
        }
        if constexpr (SHIFTED<T>) {
            deviations = PairSum{}(deviations, {lost, squares});
        } else {
            deviations += squares;
        }
    }
    if constexpr (SHIFTED<T>) {
        deviations = reduce_over_row<CLUSTER>(deviations, PairSum{}, of_deviations, turn);
        return stats_of_deviations(mean, deviations, p.per_element, p.eps);
    } else {
        deviations = reduce_over_row<CLUSTER>(deviations, Sum{}, of_deviations, turn);
        return {mean, rsqrtf(deviations * p.per_element + p.eps), 0.0f};
    }
}

// `gather(tile, share, row, live)` makes a row in registers, zeros past its end. Weight and bias come when they are needed,
// from the L1: every row of the SM wants the same.
template <typename T, bool CENTRED, int V, bool WHOLE, bool CLUSTER, typename Gather>
__device__ void norm_registers_of(const NormForward<T>& p, Gather&& gather) {
    __shared__ Mailbox<CLUSTER, float> of_sum[CENTRED ? 1 : 2];
    __shared__ Mailbox<CLUSTER, Deviations<T>> of_deviations;
    constexpr int E = Vec<T>::size, TURNS = CENTRED ? 1 : 2;
    const RowShare<CLUSTER> share;
    share.open(of_sum[0], of_sum[TURNS - 1], of_deviations);
    share.template each_row<STAYS<WHOLE, CLUSTER>>(p.count, [&](int64_t row, bool live, int turn) {
        Vec<T> tile[V];
        gather(tile, share, row, live);
        if (turn == 0) share.meet();
        const Stats stats =
            row_stats<CENTRED, WHOLE>(tile, share, p, of_sum[turn % TURNS], of_deviations, turn / TURNS);
        if (live && share.first == 0) store_stats<CENTRED>(p.stats, row, stats);
        stay_packed(tile);
        T* const out = p.output + p.out.start(row);
#pragma unroll
        for (int v = 0; v < V; ++v) {
            const int first = (share.first + v * share.step) * E;
            if (first >= static_cast<int>(p.length)) break;
            float x[E], scale[E], offset[E];
            unpack(tile[v], x);
            unpack(load_parameter<WHOLE>(p.weight, p.parameter, first, p.length, 1.0f), scale);
            if constexpr (CENTRED) unpack(load_parameter<WHOLE>(p.bias, p.parameter, first, p.length, 0.0f), offset);
#pragma unroll
            for (int e = 0; e < E; ++e) {
                x[e] = normalized<CENTRED, SHIFTED<T>>(x[e], stats);
                x[e] = CENTRED ? fmaf(x[e], scale[e], offset[e]) : x[e] * scale[e];
            }
            store_part<WHOLE>(out, p.out, pack<T>(x), v, share, live, p.length);
        }
    });
}

// Rows as they are, or with a RESIDUAL the sum of two, which is stored.
template <typename T, bool CENTRED, bool RESIDUAL, int V, bool WHOLE, bool CLUSTER>
__device__ void norm_registers(const NormForward<T>& p) {
    if (!exists_here<CLUSTER>()) return;
    const auto gather = [&](Vec<T>(&tile)[V], const RowShare<CLUSTER>& share, int64_t row, bool live) {
        load_row<WHOLE>(tile, p.input + p.in.start(row), p.in, share, live, p.length, 0.0f);
        if constexpr (RESIDUAL) {
            Vec<T> residual[V];
            load_row<WHOLE>(residual, p.residual + p.res.start(row), p.res, share, live, p.length, 0.0f);
#pragma unroll
            for (int v = 0; v < V; ++v) tile[v] = add_vec(tile[v], residual[v]);
            store_row<WHOLE>(p.sum + p.out.start(row), p.out, tile, share, live, p.length);
        }
    };
    norm_registers_of<T, CENTRED, V, WHOLE, CLUSTER>(p, gather);
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
            const int first = (share.first + v * share.step) * E;
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
    share.open(mailbox[0], mailbox[1]);
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
    for (int count = 0; first_row < p.count; first_row += share.rows_at_once, ++count) {
        const int turn = count % 2;
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
            sums = reduce_over_row<CLUSTER, /*ALONE=*/false>(sums, Add{}, mailbox[turn], count / 2);
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
