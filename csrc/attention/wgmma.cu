// Attention on Hopper, its first step; the table of the climb stands in attention.cuh.
//
//   wgmma   TMA brings tiles, wgmma multiplies from shared memory     products and softmax wait for each other
//
// One warpgroup, 64 queries. Fragments of keys and values no longer pass through registers: tensor cores read them
// where TMA has put them. One thread asks for the next tiles while all work on these. What overlaps is the work of the
// blocks that an SM holds, two of head dimension 128 and five of 64.

#include "attention/hopper.cuh"

namespace kl {
namespace {

using Wgmma64 = HopperShape<64, 64, 1>;
using Wgmma128 = HopperShape<128, 64, 1>;

template <typename T, typename S>
__global__ void __launch_bounds__(S::THREADS, 2)
    attention_wgmma_kernel(T* output_pointer, float* lse, const __grid_constant__ QkvMaps maps,
                           const __grid_constant__ Attention a) {
#if KL_SM90A
    extern __shared__ unsigned char shared_bytes[];
    const AttentionShared<S> at(shared_bytes);
    at.init_barriers();
    const QueryTile<S> tile = tile_of_block<S>(a);
    const ThreadRows rows(tile.q0, 0);
    const bool loads = warp_index() == 0 && elect_one();
    const auto load = [&](int i) {
        load_key(at, maps, tile, i, i);
        load_value(at, maps, tile, i, i);
    };
    if (loads) {
        load_query(at, maps, tile);
        load(0);
    }

    float output[S::HEAD_DIM / 2];
    float scores[S::KEYS / 2];
    uint32_t weights[S::KEYS / 16][4];
    RunningSoftmax<S::KEYS> softmax;
    const float scale = a.scale * LOG2E;  // exp(x) = 2^(x · log2 e)

    mbarrier_wait(at.query_full(), 0);
    for (int i = 0; i < tile.steps; ++i) {
        __syncthreads();  // all warps have done with tile i − 1, whose place the next one takes
        if (loads && i + 1 < tile.steps) load(i + 1);
        mbarrier_wait(at.key_full(i), phase_of(i));
        issue_scores<T, S>(scores, at.q, at.key(i));
        wgmma_wait<0>();
        wgmma_pin(scores);
        hide<S::KEYS>(scores, a, rows, tile.first_key(i));
        softmax.next(scores, scale);
        if (i > 0) softmax.rescale_output(output);
        round_weights<T, S::KEYS>(weights, scores);
        mbarrier_wait(at.value_full(i), phase_of(i));
        issue_output<T, S>(output, weights, at.value(i), i > 0);
        wgmma_wait<0>();
        wgmma_pin(output);
    }
    store_results<T, S>(output_pointer, lse, a, tile, rows, output, softmax);
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

void attention_wgmma_kernel_facts(std::vector<KernelFacts>& facts, ScalarType dtype) {
    hopper_facts<Wgmma64, Wgmma128>(facts, dtype, {"attention.wgmma.64", "attention.wgmma.128"},
                                    [](auto zero, auto shape, const char* name) {
                                        using T = decltype(zero);
                                        using S = decltype(shape);
                                        return kernel_facts<attention_wgmma_kernel<T, S>>(name, S::THREADS, S::SHARED);
                                    });
}

}  // namespace kl
