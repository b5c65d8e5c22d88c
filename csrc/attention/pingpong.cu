// attention, rung 5 of 7: pingpong
// Idea      Overlap softmax with products. Within a warpgroup, wgmma runs the next scores and the current output while the
//           softmax is computed. Between warpgroups, named barriers make one warpgroup's softmax overlap the other's
//           products (FlashAttention-3, Shah et al., arXiv:2407.08608; Dao-AILab/flash-attention, hopper/).
// Predicts  max(products, softmax) instead of their sum per tile.
// Limit now Tensor cores idle where a block begins and ends.
// Next      `persistent`: load the next tile of queries under the epilogue.
//
// Weights stay in registers, as the A operand of their product. pingpong.cuh draws the schedule and has the mainloop.
// The backward pass is that of `warp_specialized`, or for short sequences that of `wgmma` (backward_on_hopper in
// kernel_ladder/selection/attention.py).

#include "attention/pingpong.cuh"

namespace kl {
namespace {

using Pingpong64 = HopperShape<64, 128, 3, 32, 160>;
using Pingpong128 = HopperShape<128, 128, 2, 24, 240>;

template <typename T, typename S>
__global__ void __launch_bounds__(S::THREADS, 1)
    attention_pingpong_kernel(const __grid_constant__ Result<T> outputs, float* lse,
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
    float output[S::VALUE_DIM / 2];
    OnlineSoftmaxState<S::KEYS> softmax;
    init_pingpong_barriers(consumer);
    pingpong_mainloop<T, S>(output, softmax, smem, a, tile, rows, consumer, 0, 0);
    store_results<T, S>(outputs, lse, a, tile, rows, output, softmax);
#endif
}

}  // namespace

std::tuple<Tensor, Tensor> attention_pingpong(const Tensor& query, const Tensor& key, const Tensor& value,
                                              const std::optional<Tensor>& attn_mask, int64_t first, int64_t last,
                                              double scale, bool enable_gqa) {
    AttentionCall call("pingpong", query, key, value, attn_mask, first, last, scale, enable_gqa);
    return call.results<Pingpong64, Pingpong128>([&](auto zero, auto shape) {
        using T = decltype(zero);
        using S = decltype(shape);
        call.run<attention_pingpong_kernel<T, S>, T, S>(call.tiles<S>());
    });
}

void attention_pingpong_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    hopper_attributes<Pingpong64, Pingpong128>(attributes, dtype, {"attention.pingpong.64", "attention.pingpong.128"},
                                               [](auto zero, auto shape, const char* name) {
                                                   using T = decltype(zero);
                                                   using S = decltype(shape);
                                                   return kernel_attributes<attention_pingpong_kernel<T, S>>(
                                                       name, S::THREADS, S::SHARED);
                                               });
}

}  // namespace kl
