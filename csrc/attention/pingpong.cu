// Attention on Hopper, its third step; the table of the climb stands in attention.cuh.
//
//   pingpong   one warpgroup's softmax under the other's products     tensor cores idle where a block begins and ends
//
// FlashAttention-3 (Shah et al., arXiv:2407.08608; Dao-AILab/flash-attention, hopper/). To loads under all of the rest,
// which the step before had, two things are added (pingpong.cuh):
//
//   - Within a warpgroup, the products of the next tile's scores and of this tile's values are issued together, and run
//     while the softmax of the next tile is made. Weights stay in registers, as the first operand of their product.
//   - Between warpgroups, products are issued in turn, by named barriers: so one's softmax falls under the other's
//     products, and not beside it.

#include "attention/pingpong.cuh"

namespace kl {
namespace {

using Pingpong64 = HopperShape<64, 128, 3, 32, 160>;
using Pingpong128 = HopperShape<128, 128, 2, 24, 240>;

template <typename T, typename S>
__global__ void __launch_bounds__(S::THREADS, 1)
    attention_pingpong_kernel(T* output_pointer, float* lse, const __grid_constant__ QkvMaps maps,
                              const __grid_constant__ Attention a) {
#if KL_SM90A
    extern __shared__ unsigned char shared_bytes[];
    const AttentionShared<S> at(shared_bytes);
    at.init_barriers();
    const QueryTile<S> tile = tile_of_block<S>(a);
    const int group = warp_index() / (WARPGROUP / WARP), consumer = group - 1;
    if (group == 0) {
        registers_decrease<S::PRODUCER_REGISTERS>();
        if (warp_index() == 0 && elect_one()) produce(at, maps, tile);
        return;
    }

    registers_increase<S::CONSUMER_REGISTERS>();
    const ThreadRows rows(tile.q0, consumer);
    float output[S::HEAD_DIM / 2];
    RunningSoftmax<S::KEYS> softmax;
    begin_turns(consumer);
    attend_in_turns<T, S>(output, softmax, at, a, tile, rows, consumer, 0, 0);
    store_results<T, S>(output_pointer, lse, a, tile, rows, output, softmax);
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

void attention_pingpong_kernel_facts(std::vector<KernelFacts>& facts, ScalarType dtype) {
    hopper_facts<Pingpong64, Pingpong128>(
        facts, dtype, {"attention.pingpong.64", "attention.pingpong.128"}, [](auto zero, auto shape, const char* name) {
            using T = decltype(zero);
            using S = decltype(shape);
            return kernel_facts<attention_pingpong_kernel<T, S>>(name, S::THREADS, S::SHARED);
        });
}

}  // namespace kl
