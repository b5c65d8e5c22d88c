// attention, rung 4 of 7: warp_specialized
// Idea      A producer warp keeps the pipelines of keys and values full; consumer warpgroups only compute. They meet at
//           full and empty barriers in shared memory, so that no thread waits for all others.
// Predicts  A byte from L2 serves two or three times the queries: consumers share each tile of keys and values.
// Limit now Tensor cores idle during the softmax.
// Next      `pingpong`: compute the softmax of one warpgroup under the products of another.
//
// setmaxnreg gives the consumers the registers that the producer does not need. All consumers use the same K and V:
//
//   producer       ├ K0, V0 ┤├ K1, V1 ┤  waits until stage 0 is empty  ├ K2, V2 ┤ …
//   consumer 0               ├─ S0 ─┤├─ softmax ─┤├─ O += ─┤├─ S1 ─┤├─ softmax ─┤ …    64 queries each
//   consumer 1               ├─ S0 ─┤├─ softmax ─┤├─ O += ─┤├─ S1 ─┤├─ softmax ─┤ …

#include "attention/hopper.cuh"

namespace kl {
namespace {

using Specialized64 = HopperShape<64, 128, 3, 32, 160>;
using Specialized128 = HopperShape<128, 128, 2, 24, 240>;

template <typename T, typename S>
__global__ void __launch_bounds__(S::THREADS, 1)
    attention_warp_specialized_kernel(const __grid_constant__ Result<T> outputs, float* lse,
                                      const __grid_constant__ QkvMaps maps, const __grid_constant__ Attention a) {
#if KL_SM90A
    extern __shared__ unsigned char shared_bytes[];
    const AttentionSmem<S> smem(shared_bytes);
    smem.init_barriers();
    const QueryTile<S> tile = tile_of_block<S>(a);
    const int group = warp_index() / (WARPGROUP / WARP), consumer = group - 1;
    if (group == 0) {
        registers_decrease<S::PRODUCER_REGISTERS>();
        if (warp_index() == 0 && elect_one()) producer(smem, maps, tile);
        return;
    }

    registers_increase<S::CONSUMER_REGISTERS>();
    const ThreadRows rows(tile.q0, consumer);
    const uint32_t q = smem.q + consumer * 64 * SWIZZLE_ROW;
    const float scale = a.scale * LOG2E;  // exp(x) = 2^(x · log2 e)
    float output[S::VALUE_DIM / 2];
    float scores[S::KEYS / 2];
    uint32_t weights[S::KEYS / 16][4];
    OnlineSoftmaxState<S::KEYS> softmax;

    mbarrier_wait(smem.query_full(), 0);
    for (int i = 0; i < tile.steps; ++i) {
        mbarrier_wait(smem.key_full(i), phase_of(i));
        gemm_qk<T, S>(scores, q, smem.key(i));
        wgmma_wait<0>();
        wgmma_pin(scores);
        release_stage(smem.key_empty(i));
        apply_mask<S::KEYS>(scores, a, rows, tile.first_key(i));
        softmax.update(scores, scale);
        if (i > 0) softmax.rescale_output(output);
        round_weights<T, S::KEYS>(weights, scores);
        mbarrier_wait(smem.value_full(i), phase_of(i));
        gemm_pv<T, S>(output, weights, smem.value(i), i > 0);
        wgmma_wait<0>();
        wgmma_pin(output);
        release_stage(smem.value_empty(i));
    }
    store_results<T, S>(outputs, lse, a, tile, rows, output, softmax);
#endif
}

}  // namespace

std::tuple<Tensor, Tensor> attention_warp_specialized(const Tensor& query, const Tensor& key, const Tensor& value,
                                                      const std::optional<Tensor>& attn_mask, int64_t first,
                                                      int64_t last, double scale, bool enable_gqa) {
    AttentionCall call("warp_specialized", query, key, value, attn_mask, first, last, scale, enable_gqa);
    return call.results<Specialized64, Specialized128>([&](auto zero, auto shape) {
        using T = decltype(zero);
        using S = decltype(shape);
        call.run<attention_warp_specialized_kernel<T, S>, T, S>(call.tiles<S>());
    });
}

void attention_warp_specialized_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    hopper_attributes<Specialized64, Specialized128>(
        attributes, dtype, {"attention.warp_specialized.64", "attention.warp_specialized.128"},
        [](auto zero, auto shape, const char* name) {
            using T = decltype(zero);
            using S = decltype(shape);
            return kernel_attributes<attention_warp_specialized_kernel<T, S>>(name, S::THREADS, S::SHARED);
        });
}

}  // namespace kl
