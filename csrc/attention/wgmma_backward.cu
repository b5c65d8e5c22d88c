// attention, backward pass of rung 3 of 7: wgmma. Two kernels, seven products.
// Idea      TMA loads the tiles and wgmma multiplies. The key kernel's tiles are transposed, so that weights and gradients
//           of scores stay in registers as operands of the next product.
// Predicts  The rate of wgmma instead of mma.sync for the seven products of `flash`; dO, Q, K and V need no transposed copy.
// Limit now Scores and dP are computed twice, once per kernel; products and elementwise work of a block alternate.
// Next      `warp_specialized`: one kernel and five products.
//
// The kernels are those of `flash`: preprocess, query (dQ) and key (dK, dV). Each gradient is summed in registers by one
// warpgroup, so that two runs give the same bits. One warpgroup per block; an SM holds two blocks at head dimension 128.
// Wider ones, which the forward pass of `persistent` takes, have two warpgroups a block (wgmma_backward_wide.cuh).

#include "attention/wgmma_backward_wide.cuh"

namespace kl {
namespace {

/// Head dimensions up to 128: one warpgroup a block, and several blocks an SM.
template <int HEAD_DIM_, int BLOCKS_>
struct BackwardShape : BackwardTile<HEAD_DIM_, HEAD_DIM_> {
    static constexpr int BLOCKS = BLOCKS_, THREADS = WARPGROUP;  // BLOCKS: per SM
    static constexpr int SHARED = SWIZZLE_ATOM + BackwardShape::ALL_BYTES + STAGES * STATS_BYTES + 3 * 8;
    static_assert(BLOCKS * (SHARED + 1024) <= 228 * 1024 && STAGES == 2);
};
using Backward64 = BackwardShape<64, 3>;
using Backward128 = BackwardShape<128, 2>;

#if KL_SM90A

template <typename S>
struct BackwardSmem : BackwardTiles<S> {
    using Tiles = BackwardTiles<S>;
    using Tiles::Tiles;

    __device__ uint32_t streamed(int i) const { return Tiles::streamed(stage_of(i)); }
    __device__ uint32_t streamed_other(int i) const { return Tiles::streamed_other(stage_of(i)); }
    __device__ uint32_t stats(int i) const { return this->tiles_end() + stage_of(i) * STATS_BYTES; }
    __device__ uint32_t resident_full() const { return this->tiles_end() + STAGES * STATS_BYTES; }
    __device__ uint32_t full(int i) const { return resident_full() + 8 + 8 * stage_of(i); }

    /// All threads of the block must call it.
    __device__ void init_barriers() const {
        if (threadIdx.x == 0) {
            for (int i = 0; i < 1 + STAGES; ++i) mbarrier_init(resident_full() + 8 * i, 1);
            mbarrier_init_fence();
        }
        __syncthreads();
    }
};

#endif

template <typename T>
__global__ void __launch_bounds__(PREPROCESS_THREADS)
    attention_backward_wgmma_preprocess_kernel(float* stats, const float* lse, const float* grad_lse,
                                               const __grid_constant__ View<T> output,
                                               const __grid_constant__ View<T> grad,
                                               const __grid_constant__ Attention a) {
    preprocess_tile(stats, lse, grad_lse, output, grad, a);
}

/// dQ of 64 queries. Statistics of a thread's two rows stay in registers.
template <typename T, typename S>
__global__ void __launch_bounds__(WARPGROUP, S::BLOCKS)
    attention_backward_wgmma_query_kernel(const __grid_constant__ Result<T> grad_query, const float* stats,
                                          const __grid_constant__ BackwardMaps maps,
                                          const __grid_constant__ Attention a) {
#if KL_SM90A
    using Tile = HopperShape<S::HEAD_DIM, 64, 1>;
    extern __shared__ unsigned char shared_bytes[];
    const BackwardSmem<S> smem(shared_bytes);
    smem.init_barriers();
    const QueryTile<Tile> tile = tile_of_block<Tile>(a);
    const ThreadRows rows(tile.q0, 0);
    const bool loads = warp_index() == 0 && elect_one();
    const auto load = [&](int i) {
        smem.load(smem.streamed(i), smem.full(i), maps.key, maps.value, tile.first_key(i), tile.head_kv, tile.batch, 0);
    };
    if (loads) {
        smem.load(smem.resident, smem.resident_full(), maps.query, maps.grad, tile.q0, tile.head, tile.batch, 0);
        load(0);
    }

    const float* of_tile = stats_tile(stats, a, tile.batch, tile.head, tile.q0 / QUERY_TILE);
    float log_sum[2], delta[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        log_sum[h] = of_tile[stat_place(rows.lane_row + 8 * h)];
        delta[h] = of_tile[QUERY_TILE + stat_place(rows.lane_row + 8 * h)];
    }
    const float scale = a.scale * LOG2E;
    float acc[S::HEAD_DIM / 2] = {}, scores[32], grads[32];
    uint32_t operand[4][4];

    mbarrier_wait(smem.resident_full(), 0);
    for (int i = 0; i < tile.steps; ++i) {
        __syncthreads();  // all warps have released tile i − 1, whose stage the next tile takes
        if (loads && i + 1 < tile.steps) load(i + 1);
        mbarrier_wait(smem.full(i), phase_of(i));
        gemm_rows<T, S::HEAD_DIM>(scores, smem.resident, S::PANEL_BYTES, smem.streamed(i), S::PANEL_BYTES);
        gemm_rows<T, S::HEAD_DIM>(grads, smem.resident_other(), S::PANEL_BYTES, smem.streamed_other(i), S::PANEL_BYTES);
        wgmma_wait<0>();
        wgmma_pin(scores);
        wgmma_pin(grads);
        apply_mask<64>(scores, a, rows, tile.first_key(i));
#pragma unroll
        for (int j = 0; j < 32; ++j) {
            const int h = j / 2 % 2;
            const bool hidden = scores[j] == -INFINITE;  // 0 · ∞ is no number
            const float weight = exp2_approx(fmaf(scores[j], scale, -log_sum[h]));
            grads[j] = hidden ? 0.0f : weight * (grads[j] - delta[h]);
        }
        round_weights<T, 64>(operand, grads);
        gemm_columns<T, S::HEAD_DIM>(acc, operand, smem.streamed(i), S::PANEL_BYTES);
        wgmma_wait<0>();
        wgmma_pin(acc);
    }
    store_gradient<T, S::HEAD_DIM>(grad_query.at(tile.outer, a.heads, tile.q0), grad_query.row, a.D, a.S_q - tile.q0,
                                   acc, a.scale);
#endif
}

/// dK and dV of 64 keys, over the queries of all heads that share them.
template <typename T, typename S>
__global__ void __launch_bounds__(WARPGROUP, S::BLOCKS)
    attention_backward_wgmma_key_kernel(const __grid_constant__ Result<T> grad_key,
                                        const __grid_constant__ Result<T> grad_value, const float* stats,
                                        const __grid_constant__ BackwardMaps maps,
                                        const __grid_constant__ Attention a) {
#if KL_SM90A
    extern __shared__ unsigned char shared_bytes[];
    const BackwardSmem<S> smem(shared_bytes);
    smem.init_barriers();
    const unsigned tiles = (a.S_k + S::ROWS - 1) / S::ROWS;
    const KeyTile<S::ROWS> tile(a, blockIdx.x / tiles,
                                blockIdx.x % tiles);  // under a causal mask the longest start first
    const int steps = tile.steps();
    const bool loads = warp_index() == 0 && elect_one();
    StepCursor next(tile), step(tile);
    const auto load = [&](int i) {
        smem.load(smem.streamed(i), smem.full(i), maps.query, maps.grad, next.tile * QUERY_TILE, next.head, tile.batch,
                  STATS_BYTES);
        load_stats(smem.stats(i), stats_tile(stats, a, tile.batch, next.head, next.tile), smem.full(i));
        next.advance(tile);
    };
    if (loads && steps > 0) {
        smem.load(smem.resident, smem.resident_full(), maps.key, maps.value, tile.k0, tile.head_kv, tile.batch, 0);
        load(0);
    }

    const float scale = a.scale * LOG2E;
    float acc_key[S::HEAD_DIM / 2] = {}, acc_value[S::HEAD_DIM / 2] = {}, weights[32], grads[32];
    uint32_t of_value[4][4], of_key[4][4];

    if (steps > 0) mbarrier_wait(smem.resident_full(), 0);
    for (int i = 0; i < steps; ++i, step.advance(tile)) {
        __syncthreads();  // all warps have released tile i − 1, whose stage the next tile takes
        if (loads && i + 1 < steps) load(i + 1);
        mbarrier_wait(smem.full(i), phase_of(i));
        const uint32_t q = smem.streamed(i), grad = smem.streamed_other(i);
        gemm_rows<T, S::HEAD_DIM>(weights, smem.resident, S::PANEL_BYTES, q, S::PANEL_BYTES);
        gemm_rows<T, S::HEAD_DIM>(grads, smem.resident_other(), S::PANEL_BYTES, grad, S::PANEL_BYTES);
        const int q0 = step.tile * QUERY_TILE;
        wgmma_wait<1>();
        wgmma_pin(weights);
        scores_to_weights(weights, smem.stats(i), scale);
        apply_mask_transposed(weights, a, tile.k0, q0);
        round_weights<T, 64>(of_value, weights);
        gemm_columns<T, S::HEAD_DIM>(acc_value, of_value, grad, S::PANEL_BYTES);
        wgmma_wait<1>();  // dP; the product of dV still runs
        wgmma_pin(grads);
        grad_of_scores(grads, weights, smem.stats(i));
        apply_mask_transposed(grads, a, tile.k0, q0);
        round_weights<T, 64>(of_key, grads);
        gemm_columns<T, S::HEAD_DIM>(acc_key, of_key, q, S::PANEL_BYTES);
        wgmma_wait<0>();
        wgmma_pin(acc_value);
        wgmma_pin(acc_key);
    }
    const unsigned outer = tile.batch * a.heads_kv + tile.head_kv;
    store_gradient<T, S::HEAD_DIM>(grad_key.at(outer, a.heads_kv, tile.k0), grad_key.row, a.D, a.S_k - tile.k0, acc_key,
                                   a.scale);
    store_gradient<T, S::HEAD_DIM>(grad_value.at(outer, a.heads_kv, tile.k0), grad_value.row, a.D_v, a.S_k - tile.k0,
                                   acc_value, 1.0f);
#endif
}

/// The kernels of a shape.
template <typename T, typename S>
constexpr auto* query_kernel() {
    if constexpr (S::THREADS == WARPGROUP) {
        return attention_backward_wgmma_query_kernel<T, S>;
    } else {
        return attention_backward_wgmma_wide_query_kernel<T, S>;
    }
}
template <typename T, typename S>
constexpr auto* key_kernel() {
    if constexpr (S::THREADS == WARPGROUP) {
        return attention_backward_wgmma_key_kernel<T, S>;
    } else {
        return attention_backward_wgmma_wide_key_kernel<T, S>;
    }
}

template <typename T, typename S>
void run_backward(BackwardCall& call) {
    const Attention& a = call.a;
    const Launch& launch = call.launch;
    constexpr auto of_query = query_kernel<T, S>();
    constexpr auto of_key = key_kernel<T, S>();
    call.prepare<of_query>(S::SHARED);
    call.prepare<of_key>(S::SHARED);
    const BackwardMaps maps = call.maps(S::ROWS, S::ROWS);
    run_preprocess<T>(attention_backward_wgmma_preprocess_kernel<T>, call);
    const auto grad_query = Result<T>(call.grad_query);
    const auto grad_key = Result<T>(call.grad_key), grad_value = Result<T>(call.grad_value);
    const auto query_grid = grid_size(a.batches * a.heads * call.query_tiles());
    of_query<<<query_grid, S::THREADS, S::SHARED, launch.stream>>>(grad_query, call.stats_pointer(), maps, a);
    KL_LAUNCH_CHECK();
    const auto key_grid = grid_size(a.batches * a.heads_kv * ceil_div(a.S_k, S::ROWS));
    of_key<<<key_grid, S::THREADS, S::SHARED, launch.stream>>>(grad_key, grad_value, call.stats_pointer(), maps, a);
    KL_LAUNCH_CHECK();
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> attention_backward_wgmma(const Tensor& grad, const std::optional<Tensor>& grad_lse,
                                                            const Tensor& query, const Tensor& key, const Tensor& value,
                                                            const Tensor& output, const Tensor& lse,
                                                            const std::optional<Tensor>& attn_mask, int64_t first,
                                                            int64_t last, double scale, bool enable_gqa) {
    BackwardCall call("wgmma", grad, grad_lse, query, key, value, output, lse, attn_mask, first, last, scale,
                      enable_gqa);
    return call.results<Backward64, Backward128, Backward192To128, Backward192, Backward256>(
        [&](auto zero, auto shape) {
            using T = decltype(zero);
            using S = decltype(shape);
            run_backward<T, S>(call);
        });
}

void attention_wgmma_backward_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    if (dtype == ScalarType::Float) return;
    dispatch_16bit(dtype, "attention_backward", [&](auto zero) {
        using T = decltype(zero);
        attributes.push_back(kernel_attributes<attention_backward_wgmma_preprocess_kernel<T>>(
            "attention_backward.wgmma.preprocess", PREPROCESS_THREADS));
    });
    hopper_attributes<Backward64, Backward128, Backward192To128, Backward192, Backward256>(
        attributes, dtype,
        {"attention_backward.wgmma.query.64", "attention_backward.wgmma.query.128",
         "attention_backward.wgmma.query.192/128", "attention_backward.wgmma.query.192",
         "attention_backward.wgmma.query.256"},
        [](auto zero, auto shape, const char* name) {
            using S = decltype(shape);
            return kernel_attributes<query_kernel<decltype(zero), S>()>(name, S::THREADS, S::SHARED);
        });
    hopper_attributes<Backward64, Backward128, Backward192To128, Backward192, Backward256>(
        attributes, dtype,
        {"attention_backward.wgmma.key.64", "attention_backward.wgmma.key.128", "attention_backward.wgmma.key.192/128",
         "attention_backward.wgmma.key.192", "attention_backward.wgmma.key.256"},
        [](auto zero, auto shape, const char* name) {
            using S = decltype(shape);
            return kernel_attributes<key_kernel<decltype(zero), S>()>(name, S::THREADS, S::SHARED);
        });
}

}  // namespace kl
