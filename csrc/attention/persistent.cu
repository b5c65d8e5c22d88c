// attention, rung 6 of 7: persistent
// Idea      Persistent kernel: one block per SM. The producer prefetches the next tile of queries, keys and values while the
//           consumers finish this one. The tile scheduler orders tiles so that heads share keys and values in L2. Where a
//           mask makes tiles unequal, a counter hands them out, the longest first (FlashAttention-3,
//           hopper/tile_scheduler.hpp).
// Predicts  Prologue and epilogue of all tiles but a block's first and last overlap products.
// Limit now Tensor cores; at head dimension 64, the softmax.
// Next      `split_kv`, for few queries.
//
// It shares the mainloop of pingpong.cuh. A block's timeline over two work tiles:
//
//   producer    ├ K, V of tile a ──────────┤├ Q, K, V of tile b ──────────┤├ Q, K, V of tile c …
//   consumers      ├ mainloop a ──────────────┤├ store a ┤├ mainloop b ──────────────┤├ store b ┤
//                                              ▲ Q has been released: the loads of b ran under the end of a
//
// The producer takes the index of the next work tile and publishes it in shared memory. Consumers read it once the barrier
// of that tile's queries is full. An index past the last tile ends them.
//
// At head dimension 64 and few keys per query `wgmma` is faster, and kernel_ladder/selection/attention.py prefers it. The
// backward pass is that of `warp_specialized`, or for short sequences and above head dimension 128 that of `wgmma`
// (backward_on_hopper in that file).

#include "attention/pingpong.cuh"

namespace kl {
namespace {

using Persistent64 = HopperShape<64, 128, 3, 32, 160>;
using Persistent96 = HopperShape<96, 128, 2, 24, 240>;
using Persistent128 = HopperShape<128, 128, 2, 24, 240>;
using Persistent192To128 = HopperShape<192, 128, 2, 24, 240, 128>;
using Persistent192 = HopperShape<192, 96, 2, 24, 240>;
using Persistent256 = HopperShape<256, 80, 2, 24, 240>;

/// Order of work tiles: by sections of heads whose keys and values fit in L2 at once. Within a section the last queries of
/// all heads come first: under a causal mask they see the most keys. Four heads h of three tiles, in sections of two heads:
///
///   index     0     1     2     3     4     5   │ 6     7     8     9     10    11
///   head      h0    h1    h0    h1    h0    h1  │ h2    h3    h2    h3    h2    h3
///   tile      2     2     1     1     0     0   │ 2     2     1     1     0     0
struct TileScheduler {
    unsigned tiles;     // per head
    unsigned heads;     // batches · heads
    unsigned section;   // heads per section
    unsigned* counter;  // next tile after those that blocks start with; null: block b takes b, b + gridDim.x, …
};

#if KL_SM90A

template <typename S>
__device__ inline QueryTile<S> work_tile(unsigned index, const TileScheduler& scheduler, const Attention& a) {
    const unsigned begin = index / (scheduler.section * scheduler.tiles) * scheduler.section;
    const unsigned within = index - begin * scheduler.tiles, heads = min(scheduler.section, scheduler.heads - begin);
    return {a, begin + within % heads, scheduler.tiles - 1 - within / heads};
}

/// Producer: one thread loads work tile after work tile, as far ahead of the consumers as stages are free.
template <typename S>
__device__ inline void persistent_producer(const AttentionSmem<S>& smem, const QkvMaps& maps,
                                           const TileScheduler& scheduler, const Attention& a) {
    unsigned index = blockIdx.x;
    int iteration = 0, begin = 0;
    const auto publish = [&] { store_shared8(smem.tile_index(), index, 0); };
    for (; index < scheduler.tiles * scheduler.heads; ++iteration) {
        const QueryTile<S> tile = work_tile<S>(index, scheduler, a);
        producer(smem, maps, tile, iteration, begin, publish);
        begin += tile.steps;
        index = scheduler.counter != nullptr ? gridDim.x + atomicAdd(scheduler.counter, 1) : index + gridDim.x;
    }
    mbarrier_wait(smem.query_empty(), iteration % 2 ^ 1);
    publish();  // an index past the last tile ends the consumers
    mbarrier_arrive(smem.query_full());
}

#endif

template <typename T, typename S>
__global__ void __launch_bounds__(S::THREADS, 1)
    attention_persistent_kernel(const __grid_constant__ Result<T> outputs, float* lse,
                                const __grid_constant__ QkvMaps maps, const __grid_constant__ Attention a,
                                TileScheduler scheduler) {
#if KL_SM90A
    extern __shared__ unsigned char shared_bytes[];
    const AttentionSmem<S> smem(shared_bytes);
    smem.init_barriers();
    const int group = warp_index() / (WARPGROUP / WARP), consumer = group - 1;
    if (group == 0) {
        registers_decrease<S::PRODUCER_REGISTERS>();
        if (warp_index() == 0 && elect_one()) persistent_producer(smem, maps, scheduler, a);
        return;
    }

    registers_increase<S::CONSUMER_REGISTERS>();
    init_pingpong_barriers(consumer);
    int begin = 0;  // pipeline tile of the work tile's first step
    for (int iteration = 0;; ++iteration) {
        mbarrier_wait(smem.query_full(), iteration % 2);
        const unsigned index = load_shared(smem.tile_index());
        if (index >= scheduler.tiles * scheduler.heads) break;
        const QueryTile<S> tile = work_tile<S>(index, scheduler, a);
        const ThreadRows rows(tile.q0, consumer);
        float output[S::VALUE_DIM / 2];
        OnlineSoftmaxState<S::KEYS> softmax;
        pingpong_mainloop<T, S>(output, softmax, smem, a, tile, rows, consumer, iteration, begin);
        store_results<T, S>(outputs, lse, a, tile, rows, output, softmax);
        begin += tile.steps;
    }
#endif
}

template <typename T, typename S>
void run_persistent(AttentionCall& call) {
    const Attention& a = call.a;
    const int64_t heads = a.batches * a.heads, tiles = call.tiles<S>();
    const int64_t blocks = std::min<int64_t>(multiprocessors(call.launch.device), tiles);
    TileScheduler scheduler{static_cast<unsigned>(tiles / heads), static_cast<unsigned>(heads), 1, nullptr};
    grid_size(tiles + blocks);  // the counter has 32 bits
    std::optional<Tensor> counter;
    // Where a mask hides keys only on the right, later tiles are longer.
    if (a.last < a.S_k - 1 && !a.hides_left() && tiles > blocks) {
        const int64_t head_bytes = int64_t{a.S_k} * (a.D + a.D_v) * static_cast<int64_t>(sizeof(T));
        const int64_t room = int64_t{2} * device_attribute(cudaDevAttrL2CacheSize, call.launch.device) / 3;
        const int64_t fit = std::max<int64_t>(room / head_bytes, 1) * a.group();
        scheduler.section =
            static_cast<unsigned>(ceil_div(heads, ceil_div(heads, fit)));  // sections of nearly equal size
        counter = empty(call.query, ScalarType::Int, {1});
        fill_zero(*counter, call.launch.stream);
        scheduler.counter = static_cast<unsigned*>(counter->data_ptr());
    }
    call.run<attention_persistent_kernel<T, S>, T, S>(blocks, scheduler);
}

}  // namespace

std::tuple<Tensor, Tensor> attention_persistent(const Tensor& query, const Tensor& key, const Tensor& value,
                                                const std::optional<Tensor>& attn_mask, int64_t first, int64_t last,
                                                double scale, bool enable_gqa) {
    AttentionCall call("persistent", query, key, value, attn_mask, first, last, scale, enable_gqa);
    return call.results<Persistent64, Persistent96, Persistent128, Persistent192To128, Persistent192, Persistent256>(
        [&](auto zero, auto shape) { run_persistent<decltype(zero), decltype(shape)>(call); });
}

void attention_persistent_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    hopper_attributes<Persistent64, Persistent96, Persistent128, Persistent192To128, Persistent192, Persistent256>(
        attributes, dtype,
        {"attention.persistent.64", "attention.persistent.96", "attention.persistent.128",
         "attention.persistent.192/128", "attention.persistent.192", "attention.persistent.256"},
        [](auto zero, auto shape, const char* name) {
            using T = decltype(zero);
            using S = decltype(shape);
            return kernel_attributes<attention_persistent_kernel<T, S>>(name, S::THREADS, S::SHARED);
        });
}

}  // namespace kl
