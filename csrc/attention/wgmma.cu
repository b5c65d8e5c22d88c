// attention, rung 3 of 7: wgmma
// Idea      TMA loads the tiles and wgmma multiplies from shared memory: keys and values no longer pass through registers.
//           One thread requests the next tiles while all others compute.
// Predicts  The tensor-core rate of wgmma, which mma.sync does not reach on Hopper, less the time of the softmax.
// Limit now Products and softmax of a block alternate; only other blocks on the SM overlap them.
// Next      `warp_specialized`: separate loading from computing, and share tiles among warpgroups.
//
// One warpgroup per block, 64 queries. An SM holds two blocks at head dimension 128 and five at 64. A block's timeline:
//
//   TMA            ├─ K1, V1 ─────────────────────┤├─ K2, V2 ─────────────────────┤
//   tensor cores   ├─ S0 ─┤             ├─ O += ──┤├─ S1 ─┤             ├─ O += ──┤
//   CUDA cores             ├─ softmax ──┤                  ├─ softmax ──┤

#include "attention/hopper.cuh"

namespace kl {
namespace {

using Wgmma64 = HopperShape<64, 64, 1>;
using Wgmma128 = HopperShape<128, 64, 1>;

template <typename T, typename S>
__global__ void __launch_bounds__(S::THREADS, 2)
    attention_wgmma_kernel(const __grid_constant__ Result<T> outputs, float* lse, const __grid_constant__ QkvMaps maps,
                           const __grid_constant__ Attention a) {
#if KL_SM90A
    extern __shared__ unsigned char shared_bytes[];
    const AttentionSmem<S> smem(shared_bytes);
    smem.init_barriers();
    const QueryTile<S> tile = tile_of_block<S>(a);
    const ThreadRows rows(tile.q0, 0);
    const bool loads = warp_index() == 0 && elect_one();
    const auto load = [&](int i) {
        load_key(smem, maps, tile, i, i);
        load_value(smem, maps, tile, i, i);
    };
    if (loads) {
        load_query(smem, maps, tile);
        load(0);
    }

    float output[S::VALUE_DIM / 2];
    float scores[S::KEYS / 2];
    uint32_t weights[S::KEYS / 16][4];
    OnlineSoftmaxState<S::KEYS> softmax;
    const float scale = a.scale * LOG2E;  // exp(x) = 2^(x · log2 e)

    mbarrier_wait(smem.query_full(), 0);
    for (int i = 0; i < tile.steps; ++i) {
        __syncthreads();  // all warps have released tile i − 1, whose stage the next tile takes
        if (loads && i + 1 < tile.steps) load(i + 1);
        mbarrier_wait(smem.key_full(i), phase_of(i));
        gemm_qk<T, S>(scores, smem.q, smem.key(i));
        wgmma_wait<0>();
        wgmma_pin(scores);
        apply_mask<S::KEYS>(scores, a, rows, tile.first_key(i));
        softmax.update(scores, scale);
        if (i > 0) softmax.rescale_output(output);
        round_weights<T, S::KEYS>(weights, scores);
        mbarrier_wait(smem.value_full(i), phase_of(i));
        gemm_pv<T, S>(output, weights, smem.value(i), i > 0);
        wgmma_wait<0>();
        wgmma_pin(output);
    }
    store_results<T, S>(outputs, lse, a, tile, rows, output, softmax);
#endif
}

}  // namespace

std::tuple<Tensor, Tensor> attention_wgmma(const Tensor& query, const Tensor& key, const Tensor& value,
                                           const std::optional<Tensor>& attn_mask, int64_t first, int64_t last,
                                           double scale, bool enable_gqa) {
    AttentionCall call("wgmma", query, key, value, attn_mask, first, last, scale, enable_gqa);
    return call.results<Wgmma64, Wgmma128>([&](auto zero, auto shape) {
        using T = decltype(zero);
        using S = decltype(shape);
        call.run<attention_wgmma_kernel<T, S>, T, S>(call.tiles<S>());
    });
}

void attention_wgmma_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    hopper_attributes<Wgmma64, Wgmma128>(
        attributes, dtype, {"attention.wgmma.64", "attention.wgmma.128"}, [](auto zero, auto shape, const char* name) {
            using T = decltype(zero);
            using S = decltype(shape);
            return kernel_attributes<attention_wgmma_kernel<T, S>>(name, S::THREADS, S::SHARED);
        });
}

}  // namespace kl
