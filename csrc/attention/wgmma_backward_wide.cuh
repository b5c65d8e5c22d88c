// attention, backward pass of rung 3 of 7 at head dimensions from 129 to 256: the kernels of wgmma_backward.cu, with two
// warpgroups a block.
//
// One warpgroup cannot hold dK and dV of 64 keys by 256 columns: they fill 256 registers a thread. So each warpgroup has one
// of them, and computes one of the two products before it:
//
//   warpgroup     first product      then                            second product
//   0, weights    S = Q · Kᵀ         P, which 1 gets in float32      dV += Pᵀ · dO,  or its columns of dQ += dS · K
//   1, gradients  dP = dO · Vᵀ       dS, which 0 gets for dQ         dK += dSᵀ · Q,  or its columns of dQ += dS · K
//
// What they exchange lies in shared memory as each thread has it in registers: thread t of one reads what thread t of the
// other wrote. While one warpgroup waits or computes elementwise, the other's products run. A third loads tiles.
#pragma once

#include "attention/hopper_backward.cuh"

namespace kl {

/// Head dimensions above 128: one loading warpgroup and two that compute, one block an SM.
template <int HEAD_DIM_, int VALUE_DIM_>
struct WideBackward : BackwardTile<HEAD_DIM_, VALUE_DIM_> {
    using Tile = BackwardTile<HEAD_DIM_, VALUE_DIM_>;
    static constexpr int HEAD_DIM = HEAD_DIM_, VALUE_DIM = VALUE_DIM_, ROWS = Tile::ROWS, THREADS = 3 * WARPGROUP;
    static constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;
    static constexpr int COLUMNS = 128, OTHER_COLUMNS = HEAD_DIM - COLUMNS;  // of dQ, by warpgroup
    static constexpr int WEIGHTS_BYTES = ROWS * QUERY_TILE * 4, GRADS_BYTES = ROWS * QUERY_TILE * 2;
    static constexpr int BARRIERS = 1 + 2 * STAGES + 4;
    static constexpr int SHARED =
        SWIZZLE_ATOM + Tile::ALL_BYTES + WEIGHTS_BYTES + GRADS_BYTES + STAGES * STATS_BYTES + BARRIERS * 8;
    static_assert(SHARED <= 227 * 1024 && HEAD_DIM % PANEL == 0 && VALUE_DIM % PANEL == 0);
    static_assert(OTHER_COLUMNS % PANEL == 0);
};
using Backward192To128 = WideBackward<192, 128>;
using Backward192 = WideBackward<192, 192>;
using Backward256 = WideBackward<256, 256>;

#if KL_SM90A

/// Barriers: who arrives, and how often in a phase.
///   resident_full   the loading thread, with the bytes of the two tiles that stay
///   full[stage]     the loading thread, with the bytes of two streamed tiles and their statistics
///   empty[stage]    eight warps, whose products have read them
///   weights_full    the four warps of warpgroup 0, which have written P
///   weights_empty   the four warps of warpgroup 1, which have read it
///   grads_full      the four warps of warpgroup 1, which have written dS
///   grads_empty     the four warps of warpgroup 0, which have read it
template <typename S>
struct WideSmem : BackwardTiles<S> {
    using BackwardTiles<S>::BackwardTiles;

    __device__ uint32_t weights() const { return this->tiles_end(); }
    __device__ uint32_t grads() const { return weights() + S::WEIGHTS_BYTES; }
    __device__ uint32_t stats(int stage) const { return grads() + S::GRADS_BYTES + stage * STATS_BYTES; }
    __device__ uint32_t resident_full() const { return barrier(0); }
    __device__ uint32_t full(int stage) const { return barrier(1 + stage); }
    __device__ uint32_t empty(int stage) const { return barrier(1 + STAGES + stage); }
    __device__ uint32_t weights_full() const { return barrier(1 + 2 * STAGES); }
    __device__ uint32_t weights_empty() const { return barrier(2 + 2 * STAGES); }
    __device__ uint32_t grads_full() const { return barrier(3 + 2 * STAGES); }
    __device__ uint32_t grads_empty() const { return barrier(4 + 2 * STAGES); }

    /// All threads of the block must call it.
    __device__ void init_barriers() const {
        if (threadIdx.x == 0) {
            constexpr int WARPS = WARPGROUP / WARP;
            mbarrier_init(resident_full(), 1);
            PipelineState<STAGES>::init(full(0), empty(0), 1, 2 * WARPS);
            PipelineState<1>::init(weights_full(), weights_empty(), WARPS, WARPS);
            PipelineState<1>::init(grads_full(), grads_empty(), WARPS, WARPS);
            mbarrier_init_fence();
        }
        __syncthreads();
    }

  private:
    __device__ uint32_t barrier(int i) const { return stats(STAGES) + 8 * i; }
};

/// A thread's registers in shared memory, at `place`: 16 bytes of each thread side by side. All warps of the warpgroup call
/// it: `empty` is awaited before, `full` tells the other warpgroup.
template <typename R, int COUNT>
__device__ inline void send_registers(const R (&registers)[COUNT], uint32_t place, uint32_t full, uint32_t empty,
                                      int i) {
    static_assert(sizeof(R) == 4 && COUNT % 4 == 0);
    const uint32_t own = place + threadIdx.x % WARPGROUP * 16;
    mbarrier_wait(empty, i % 2 ^ 1);
#pragma unroll
    for (int j = 0; j < COUNT / 4; ++j) {
        uint4 x;
        memcpy(&x, registers + 4 * j, sizeof x);
        store_shared16(own + j * WARPGROUP * 16, x);
    }
    __syncwarp();
    release_stage(full);
}
template <typename R, int COUNT>
__device__ inline void receive_registers(R (&registers)[COUNT], uint32_t place, uint32_t full, uint32_t empty, int i) {
    const uint32_t own = place + threadIdx.x % WARPGROUP * 16;
    mbarrier_wait(full, i % 2);
#pragma unroll
    for (int j = 0; j < COUNT / 4; ++j) {
        const uint4 x = load_shared16(own + j * WARPGROUP * 16);
        memcpy(registers + 4 * j, &x, sizeof x);
    }
    __syncwarp();
    release_stage(empty);
}

/// A warpgroup's steps. `first(stage)` issues its first product of a step, `between(i, stage)` computes, and
/// `second(stage)` issues its second product, which runs on beside the first one of the next step.
template <typename S, int COUNT, typename First, typename Between, typename Second>
__device__ inline void walk(const WideSmem<S>& smem, int steps, float (&product)[QUERY_TILE / 2], float (&acc)[COUNT],
                            First&& first, Between&& between, Second&& second) {
    PipelineState<STAGES> state;
    wgmma_pin(acc);  // zeros before the first product, or ptxas would let every product end before the next
    for (int i = 0; i < steps; ++i, state.advance()) {
        mbarrier_wait(smem.full(state.stage), state.phase);
        first(state.stage);
        wgmma_wait<0>();
        wgmma_pin(product);
        wgmma_pin(acc);
        if (i > 0) release_stage(smem.empty(state.stage ^ 1));  // of the step before, whose products are done
        between(i, state.stage);
        second(state.stage);
    }
    wgmma_wait<0>();
    wgmma_pin(acc);
}

/// A warpgroup's part of dQ of 64 queries: columns from `panel` on.
template <typename T, typename S, int COLUMNS, bool HAS_WEIGHTS>
__device__ inline void wide_query_columns(const Result<T>& grad_query, const WideSmem<S>& smem, const float* of_tile,
                                          const QueryTile<HopperShape<S::HEAD_DIM, 64, 1>>& tile, const Attention& a,
                                          int panel) {
    constexpr int SUMMANDS = HAS_WEIGHTS ? S::HEAD_DIM : S::VALUE_DIM;  // of a score, or of an element of dP
    const ThreadRows rows(tile.q0, 0);
    const float scale = a.scale * LOG2E;
    const int first_column = panel * PANEL;
    float stat[2], acc[COLUMNS / 2] = {}, product[32];  // of a row: log2 of the weights' sum, or delta
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        stat[h] = of_tile[(HAS_WEIGHTS ? 0 : QUERY_TILE) + stat_place(rows.lane_row + 8 * h)];
    }
    uint32_t operand[4][4];
    auto& words = reinterpret_cast<uint32_t (&)[16]>(operand);
    const uint32_t own = HAS_WEIGHTS ? smem.resident : smem.resident_other();
    mbarrier_wait(smem.resident_full(), 0);
    walk(
        smem, tile.steps, product, acc,
        [&](int stage) {
            const uint32_t other = HAS_WEIGHTS ? smem.streamed(stage) : smem.streamed_other(stage);
            gemm_rows<T, SUMMANDS>(product, own, S::PANEL_BYTES, other, S::PANEL_BYTES);
        },
        [&](int i, int) {
            if (HAS_WEIGHTS) {
                apply_mask<64>(product, a, rows, tile.first_key(i));
#pragma unroll
                for (int j = 0; j < 32; ++j) {  // weights are not negative: −1 marks one that is hidden
                    const float weight = exp2_approx(fmaf(product[j], scale, -stat[j / 2 % 2]));
                    product[j] = product[j] == -INFINITE ? -1.0f : weight;
                }
                send_registers(product, smem.weights(), smem.weights_full(), smem.weights_empty(), i);
                receive_registers(words, smem.grads(), smem.grads_full(), smem.grads_empty(), i);
            } else {
                float weights[32];
                receive_registers(weights, smem.weights(), smem.weights_full(), smem.weights_empty(), i);
#pragma unroll
                for (int j = 0; j < 32; ++j) {  // 0 · ∞ is no number
                    product[j] = weights[j] < 0.0f ? 0.0f : weights[j] * (product[j] - stat[j / 2 % 2]);
                }
                round_weights<T, 64>(operand, product);
                send_registers(words, smem.grads(), smem.grads_full(), smem.grads_empty(), i);
            }
        },
        [&](int stage) {
            gemm_columns<T, COLUMNS>(acc, operand, smem.streamed(stage) + panel * S::PANEL_BYTES, S::PANEL_BYTES);
        });
    store_gradient<T, COLUMNS>(grad_query.at(tile.outer, a.heads, tile.q0) + first_column, grad_query.row,
                               a.D - first_column, a.S_q - tile.q0, acc, a.scale);
}

#endif

/// dQ of 64 queries.
template <typename T, typename S>
__global__ void __launch_bounds__(S::THREADS, 1)
    attention_backward_wgmma_wide_query_kernel(const __grid_constant__ Result<T> grad_query, const float* stats,
                                               const __grid_constant__ BackwardMaps maps,
                                               const __grid_constant__ Attention a) {
#if KL_SM90A
    using Tile = HopperShape<S::HEAD_DIM, 64, 1>;
    extern __shared__ unsigned char shared_bytes[];
    const WideSmem<S> smem(shared_bytes);
    smem.init_barriers();
    const QueryTile<Tile> tile = tile_of_block<Tile>(a);
    const int group = warp_index() / (WARPGROUP / WARP);
    if (group == 2) {
        registers_decrease<S::PRODUCER_REGISTERS>();
        if (warp_index() % (WARPGROUP / WARP) != 0 || !elect_one()) return;
        smem.load(smem.resident, smem.resident_full(), maps.query, maps.grad, tile.q0, tile.head, tile.batch, 0);
        PipelineState<STAGES> state;
        for (int i = 0; i < tile.steps; ++i, state.advance()) {
            mbarrier_wait(smem.empty(state.stage), state.phase ^ 1);
            smem.load(smem.streamed(state.stage), smem.full(state.stage), maps.key, maps.value, tile.first_key(i),
                      tile.head_kv, tile.batch, 0);
        }
        return;
    }
    registers_increase<S::CONSUMER_REGISTERS>();
    const float* of_tile = stats_tile(stats, a, tile.batch, tile.head, tile.q0 / QUERY_TILE);
    if (group == 0) {
        wide_query_columns<T, S, S::COLUMNS, true>(grad_query, smem, of_tile, tile, a, 0);
    } else {
        wide_query_columns<T, S, S::OTHER_COLUMNS, false>(grad_query, smem, of_tile, tile, a, S::COLUMNS / PANEL);
    }
#endif
}

/// dK and dV of 64 keys, over the queries of all heads that share them.
template <typename T, typename S>
__global__ void __launch_bounds__(S::THREADS, 1)
    attention_backward_wgmma_wide_key_kernel(const __grid_constant__ Result<T> grad_key,
                                             const __grid_constant__ Result<T> grad_value, const float* stats,
                                             const __grid_constant__ BackwardMaps maps,
                                             const __grid_constant__ Attention a) {
#if KL_SM90A
    extern __shared__ unsigned char shared_bytes[];
    const WideSmem<S> smem(shared_bytes);
    smem.init_barriers();
    const unsigned tiles = (a.S_k + S::ROWS - 1) / S::ROWS;
    const KeyTile<S::ROWS> tile(a, blockIdx.x / tiles, blockIdx.x % tiles);
    const int group = warp_index() / (WARPGROUP / WARP), steps = tile.steps();
    StepCursor step(tile);
    if (group == 2) {
        registers_decrease<S::PRODUCER_REGISTERS>();
        if (steps == 0 || warp_index() % (WARPGROUP / WARP) != 0 || !elect_one()) return;
        smem.load(smem.resident, smem.resident_full(), maps.key, maps.value, tile.k0, tile.head_kv, tile.batch, 0);
        PipelineState<STAGES> state;
        for (int i = 0; i < steps; ++i, state.advance(), step.advance(tile)) {
            mbarrier_wait(smem.empty(state.stage), state.phase ^ 1);
            smem.load(smem.streamed(state.stage), smem.full(state.stage), maps.query, maps.grad, step.tile * QUERY_TILE,
                      step.head, tile.batch, STATS_BYTES);
            load_stats(smem.stats(state.stage), stats_tile(stats, a, tile.batch, step.head, step.tile),
                       smem.full(state.stage));
        }
        return;
    }

    registers_increase<S::CONSUMER_REGISTERS>();
    const unsigned outer = tile.batch * a.heads_kv + tile.head_kv;
    const float scale = a.scale * LOG2E;
    float product[32];
    uint32_t operand[4][4];
    if (steps > 0) mbarrier_wait(smem.resident_full(), 0);
    if (group == 0) {
        float acc[S::VALUE_DIM / 2] = {};
        walk(
            smem, steps, product, acc,
            [&](int stage) {
                gemm_rows<T, S::HEAD_DIM>(product, smem.resident, S::PANEL_BYTES, smem.streamed(stage), S::PANEL_BYTES);
            },
            [&](int i, int stage) {
                scores_to_weights(product, smem.stats(stage), scale);
                apply_mask_transposed(product, a, tile.k0, step.tile * QUERY_TILE);
                step.advance(tile);
                send_registers(product, smem.weights(), smem.weights_full(), smem.weights_empty(), i);
                round_weights<T, 64>(operand, product);
            },
            [&](int stage) {
                gemm_columns<T, S::VALUE_DIM>(acc, operand, smem.streamed_other(stage), S::PANEL_BYTES);
            });
        store_gradient<T, S::VALUE_DIM>(grad_value.at(outer, a.heads_kv, tile.k0), grad_value.row, a.D_v,
                                        a.S_k - tile.k0, acc, 1.0f);
    } else {
        float acc[S::HEAD_DIM / 2] = {};
        walk(
            smem, steps, product, acc,
            [&](int stage) {
                gemm_rows<T, S::VALUE_DIM>(product, smem.resident_other(), S::PANEL_BYTES, smem.streamed_other(stage),
                                           S::PANEL_BYTES);
            },
            [&](int i, int stage) {
                float weights[32];
                receive_registers(weights, smem.weights(), smem.weights_full(), smem.weights_empty(), i);
                grad_of_scores(product, weights, smem.stats(stage));
                apply_mask_transposed(product, a, tile.k0, step.tile * QUERY_TILE);
                step.advance(tile);
                round_weights<T, 64>(operand, product);
            },
            [&](int stage) { gemm_columns<T, S::HEAD_DIM>(acc, operand, smem.streamed(stage), S::PANEL_BYTES); });
        store_gradient<T, S::HEAD_DIM>(grad_key.at(outer, a.heads_kv, tile.k0), grad_key.row, a.D, a.S_k - tile.k0, acc,
                                       a.scale);
    }
#endif
}

}  // namespace kl
