// attention_varlen, rung 2 of 2: pingpong
// Idea      The ping-pong schedule of `attention`, on sequences of several lengths packed one after the other. Each block
//           looks up where its sequence begins.
// Predicts  The rate of `attention`'s pingpong on the tiles that the sequences fill.
// Limit now Short sequences: the grid has tiles for the longest one, and blocks without queries exit.
// Next      –
//
// One TMA description covers all sequences, so that the last tile of one contains the first rows of the next. Such
// queries are not stored and such scores are masked. Such values are cleared, because a weight of zero times another
// sequence's NaN would be NaN. It shares the mainloop of pingpong.cuh. Its backward pass is that of `warp_specialized`, on
// packed sequences (warp_specialized_backward.cu); at head dimensions above 128 that of `flash` (varlen_backward.cu).

#include "attention/pingpong.cuh"
#include "attention/sequences.cuh"

namespace kl {
namespace {

using Varlen64 = HopperShape<64, 128, 3, 32, 160>;
using Varlen96 = HopperShape<96, 128, 2, 24, 240>;
using Varlen128 = HopperShape<128, 128, 2, 24, 240>;
using Varlen192To128 = HopperShape<192, 128, 2, 24, 240, 128>;
using Varlen192 = HopperShape<192, 96, 2, 24, 240>;
using Varlen256 = HopperShape<256, 80, 2, 24, 240>;

#if KL_SM90A

/// Clears the rows of a tile of values from `first` on. All consumers must call it.
template <typename S>
__device__ inline void clear_rows(uint32_t values, int first) {
    const int thread = static_cast<int>(threadIdx.x) - WARPGROUP;
#pragma unroll
    for (int panel = 0; panel < S::VALUE_PANELS; ++panel) {
        for (int i = first * SWIZZLE_ROW + thread * 16; i < S::KV_PANEL; i += S::CONSUMERS * WARPGROUP * 16) {
            store_shared16(values + panel * S::KV_PANEL + i, make_uint4(0, 0, 0, 0));
        }
    }
    fence_async_shared();
    named_barrier_sync(1 + S::CONSUMERS, S::CONSUMERS * WARPGROUP);
}

#endif

template <typename T, typename S>
__global__ void __launch_bounds__(S::THREADS, 1)
    attention_varlen_pingpong_kernel(const __grid_constant__ Result<T> outputs, float* lse,
                                     const __grid_constant__ QkvMaps maps, const __grid_constant__ Attention all,
                                     const __grid_constant__ Packed packed) {
#if KL_SM90A
    const unsigned tiles = (packed.most_q + S::QUERIES - 1) / S::QUERIES, outer = blockIdx.x / tiles;
    const unsigned head = outer % all.heads;
    const PackedSequence sequence = packed.at(all, static_cast<int>(outer / all.heads));
    const Attention& a = sequence.a;
    QueryTile<S> tile(a, head, tiles - 1 - blockIdx.x % tiles);
    if (tile.q0 >= a.S_q) return;
    tile.query_row = sequence.query_row;
    tile.key_row = sequence.key_row;

    extern __shared__ unsigned char shared_bytes[];
    const AttentionSmem<S> smem(shared_bytes);
    smem.init_barriers();
    const int group = warp_index() / (WARPGROUP / WARP), consumer = group - 1;
    if (group == 0) {
        registers_decrease<S::PRODUCER_REGISTERS>();
        if (warp_index() == 0 && elect_one()) producer(smem, maps, tile);
        return;
    }

    registers_increase<S::CONSUMER_REGISTERS>();
    if (const int rest = a.S_k - tile.first_key(0); rest < S::KEYS) {
        mbarrier_wait(smem.value_full(0), phase_of(0));
        clear_rows<S>(smem.value(0), rest);
    }
    const ThreadRows rows(tile.q0, consumer);
    float output[S::VALUE_DIM / 2];
    OnlineSoftmaxState<S::KEYS> softmax;
    init_pingpong_barriers(consumer);
    pingpong_mainloop<T, S>(output, softmax, smem, a, tile, rows, consumer, 0, 0);
    store_results<T, S>(outputs.at(head, a.heads, sequence.query_row), outputs.row, lse + sequence.first_row(head), a,
                        rows, output, softmax);
#endif
}

}  // namespace

std::tuple<Tensor, Tensor> attention_varlen_pingpong(const Tensor& query, const Tensor& key, const Tensor& value,
                                                     const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
                                                     int64_t max_seqlen_q, int64_t left, int64_t right, double scale,
                                                     bool enable_gqa) {
    AttentionCall call("pingpong", query, key, value, std::nullopt, -MAX_LENGTH, MAX_LENGTH, scale, enable_gqa, true);
    const Packed packed = make_packed(query, call.a, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, call.a.S_k, left, right);
    return call.results<Varlen64, Varlen96, Varlen128, Varlen192To128, Varlen192, Varlen256>(
        [&](auto zero, auto shape) {
            using T = decltype(zero);
            using S = decltype(shape);
            const int64_t tiles = ceil_div(packed.most_q, S::QUERIES);
            call.run<attention_varlen_pingpong_kernel<T, S>, T, S>(packed.sequences * call.a.heads * tiles, packed);
        });
}

void attention_varlen_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    hopper_attributes<Varlen64, Varlen96, Varlen128, Varlen192To128, Varlen192, Varlen256>(
        attributes, dtype,
        {"attention_varlen.pingpong.64", "attention_varlen.pingpong.96", "attention_varlen.pingpong.128",
         "attention_varlen.pingpong.192/128", "attention_varlen.pingpong.192", "attention_varlen.pingpong.256"},
        [](auto zero, auto shape, const char* name) {
            using T = decltype(zero);
            using S = decltype(shape);
            return kernel_attributes<attention_varlen_pingpong_kernel<T, S>>(name, S::THREADS, S::SHARED);
        });
}

}  // namespace kl
