// attention_varlen, rung 1 of 1: pingpong
// Idea      The ping-pong schedule of `attention`, on sequences of several lengths packed one after the other. Each block
//           looks up where its sequence begins.
// Predicts  The rate of `attention`'s pingpong on the tiles that the sequences fill.
// Limit now Short sequences: the grid has tiles for the longest one, and blocks without queries exit.
// Next      –
//
// One TMA description covers all sequences, so that the last tile of one contains the first rows of the next. Such
// queries are not stored and such scores are masked. Such values are cleared, because a weight of zero times another
// sequence's NaN would be NaN. It shares the mainloop of pingpong.cuh. It has no backward pass.

#include "attention/pingpong.cuh"

namespace kl {
namespace {

using Varlen64 = HopperShape<64, 128, 3, 32, 160>;
using Varlen128 = HopperShape<128, 128, 2, 24, 240>;

struct Packed {
    const int32_t *cu_seqlens_q, *cu_seqlens_k;
    unsigned tiles;   // of the longest sequence
    int left, right;  // of the band around the diagonal that ends at the lower right
};

#if KL_SM90A

/// Clears the rows of a tile of values from `first` on. All consumers must call it.
template <typename S>
__device__ inline void clear_rows(uint32_t values, int first) {
    const int thread = static_cast<int>(threadIdx.x) - WARPGROUP;
#pragma unroll
    for (int panel = 0; panel < S::PANELS; ++panel) {
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
    attention_varlen_pingpong_kernel(T* output_pointer, float* lse, const __grid_constant__ QkvMaps maps,
                                     const __grid_constant__ Attention all, const __grid_constant__ Packed packed) {
#if KL_SM90A
    const unsigned outer = blockIdx.x / packed.tiles, head = outer % all.heads, sequence = outer / all.heads;
    // Clamps the offsets: a sequence lies inside the tensors and has at least zero rows, whatever they say.
    const int query_row = min(max(packed.cu_seqlens_q[sequence], 0), all.S_q);
    const int key_row = min(max(packed.cu_seqlens_k[sequence], 0), all.S_k);
    Attention a = all;
    a.S_q = min(max(packed.cu_seqlens_q[sequence + 1], query_row), all.S_q) - query_row;
    a.S_k = min(max(packed.cu_seqlens_k[sequence + 1], key_row), all.S_k) - key_row;
    a.first = max(a.S_k - a.S_q - packed.left, -a.S_q);
    a.last = min(a.S_k - a.S_q + packed.right, a.S_k);
    QueryTile<S> tile(a, head, packed.tiles - 1 - blockIdx.x % packed.tiles);
    if (tile.q0 >= a.S_q) return;
    tile.query_row = query_row;
    tile.key_row = key_row;

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
    float output[S::HEAD_DIM / 2];
    OnlineSoftmaxState<S::KEYS> softmax;
    init_pingpong_barriers(consumer);
    pingpong_mainloop<T, S>(output, softmax, smem, a, tile, rows, consumer, 0, 0);
    const int64_t stride = int64_t{a.heads} * a.D_v;  // from query to query
    store_results<T, S>(output_pointer + query_row * stride + head * a.D_v, stride,
                        lse + int64_t{head} * all.S_q + query_row, a, rows, output, softmax);
#endif
}

void check_offsets(const Tensor& offsets, const Tensor& query, const char* name) {
    KL_CHECK(offsets.is_cuda() && offsets.get_device_index() == query.get_device_index() &&
                 offsets.scalar_type() == ScalarType::Int && offsets.dim() == 1 && offsets.is_contiguous(),
             "attention_varlen: argument `", name, "` must be a dense vector of int32 on the device of `query`");
}

}  // namespace

std::tuple<Tensor, Tensor> attention_varlen_pingpong(const Tensor& query, const Tensor& key, const Tensor& value,
                                                     const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
                                                     int64_t max_seqlen_q, int64_t left, int64_t right, double scale,
                                                     bool enable_gqa) {
    check_offsets(cu_seqlens_q, query, "cu_seqlens_q");
    check_offsets(cu_seqlens_k, query, "cu_seqlens_k");
    const int64_t sequences = cu_seqlens_q.numel() - 1;
    KL_CHECK(sequences > 0 && cu_seqlens_k.numel() == sequences + 1,
             "attention_varlen: arguments `cu_seqlens_q` and `cu_seqlens_k` must hold as many offsets, two or more");
    AttentionCall call("pingpong", query, key, value, std::nullopt, -MAX_LENGTH, MAX_LENGTH, scale, enable_gqa, true);
    KL_CHECK(call.a.batches == 1, "attention_varlen: sequences are packed in one batch, got ", call.a.batches);
    const auto reach = [](int64_t window) {
        return static_cast<int>(window < 0 ? MAX_LENGTH : std::min<int64_t>(window, MAX_LENGTH));
    };
    return call.results<Varlen64, Varlen128>([&](auto zero, auto shape) {
        using T = decltype(zero);
        using S = decltype(shape);
        const int64_t longest = std::max<int64_t>(std::min<int64_t>(max_seqlen_q, call.a.S_q), 1);
        const auto tiles = static_cast<unsigned>(ceil_div(longest, S::QUERIES));
        const Packed packed{static_cast<const int32_t*>(cu_seqlens_q.data_ptr()),
                            static_cast<const int32_t*>(cu_seqlens_k.data_ptr()), tiles, reach(left), reach(right)};
        call.run<attention_varlen_pingpong_kernel<T, S>, T, S>(sequences * call.a.heads * tiles, packed);
    });
}

void attention_varlen_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    hopper_attributes<Varlen64, Varlen128>(
        attributes, dtype, {"attention_varlen.pingpong.64", "attention_varlen.pingpong.128"},
        [](auto zero, auto shape, const char* name) {
            using T = decltype(zero);
            using S = decltype(shape);
            return kernel_attributes<attention_varlen_pingpong_kernel<T, S>>(name, S::THREADS, S::SHARED);
        });
}

}  // namespace kl
