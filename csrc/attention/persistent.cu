// Attention on Hopper, its fourth step; the table of the climb stands in attention.cuh.
//
//   persistent   blocks stay, and load the next tile's queries, keys and values ahead     tensor cores
//
// Three things beside the schedule of pingpong.cuh:
//
//   - The producer goes on to the next tile of queries while the consumers end this one: no tile but a block's first
//     waits for its loads, and none for a block's start.
//   - Tiles are walked in an order that shares keys and values in L2, and where they differ in length are handed out by a
//     counter, the longest first (TileOrder below; FlashAttention-3, hopper/tile_scheduler.hpp).

#include "attention/pingpong.cuh"

namespace kl {
namespace {

using Persistent64 = HopperShape<64, 128, 3, 32, 160>;
using Persistent96 = HopperShape<96, 128, 2, 24, 240>;
using Persistent128 = HopperShape<128, 128, 2, 24, 240>;
using Persistent256 = HopperShape<256, 80, 2, 24, 240>;

// The order of tiles: by sections of heads whose keys and values fit in L2 together; in a section the last queries of
// all its heads first, which under a causal mask see the most keys.
struct TileOrder {
    unsigned tiles;     // of a head
    unsigned heads;     // of all batches
    unsigned section;   // heads
    unsigned* counter;  // of tiles handed out after each block's first; null where block b takes b, b + blocks, …
};

#if KL_SM90A

template <typename S>
__device__ inline QueryTile<S> tile_numbered(unsigned number, const TileOrder& order, const Attention& a) {
    const unsigned begin = number / (order.section * order.tiles) * order.section;
    const unsigned within = number - begin * order.tiles, beside = min(order.section, order.heads - begin);
    return {a, begin + within % beside, order.tiles - 1 - within / beside};
}

// The producer's one thread: from tile to tile, as far ahead of the consumers as there is room.
template <typename S>
__device__ inline void produce_all(const AttentionShared<S>& at, const QkvMaps& maps, const TileOrder& order,
                                   const Attention& a) {
    unsigned number = blockIdx.x;
    int turn = 0, begin = 0;
    const auto announce = [&] { store_shared8(at.number(), number, 0); };
    for (; number < order.tiles * order.heads; ++turn) {
        const QueryTile<S> tile = tile_numbered<S>(number, order, a);
        produce(at, maps, tile, turn, begin, announce);
        begin += tile.steps;
        number = order.counter != nullptr ? gridDim.x + atomicAdd(order.counter, 1) : number + gridDim.x;
    }
    mbarrier_wait(at.query_empty(), turn % 2 ^ 1);
    announce();  // that there is none
    mbarrier_arrive(at.query_full());
}

#endif

template <typename T, typename S>
__global__ void __launch_bounds__(S::THREADS, 1)
    attention_persistent_kernel(T* output_pointer, float* lse, const __grid_constant__ QkvMaps maps,
                                const __grid_constant__ Attention a, TileOrder order) {
#if KL_SM90A
    extern __shared__ unsigned char shared_bytes[];
    const AttentionShared<S> at(shared_bytes);
    at.init_barriers();
    const int group = warp_index() / (WARPGROUP / WARP), consumer = group - 1;
    if (group == 0) {
        registers_decrease<S::PRODUCER_REGISTERS>();
        if (warp_index() == 0 && elect_one()) produce_all(at, maps, order, a);
        return;
    }

    registers_increase<S::CONSUMER_REGISTERS>();
    begin_turns(consumer);
    int begin = 0;  // the place in the rings of a tile's first step
    for (int turn = 0;; ++turn) {
        mbarrier_wait(at.query_full(), turn % 2);
        const unsigned number = load_shared(at.number());
        if (number >= order.tiles * order.heads) break;
        const QueryTile<S> tile = tile_numbered<S>(number, order, a);
        const ThreadRows rows(tile.q0, consumer);
        float output[S::HEAD_DIM / 2];
        RunningSoftmax<S::KEYS> softmax;
        attend_in_turns<T, S>(output, softmax, at, a, tile, rows, consumer, turn, begin);
        store_results<T, S>(output_pointer, lse, a, tile, rows, output, softmax);
        begin += tile.steps;
    }
#endif
}

template <typename T, typename S>
void run_persistent(AttentionCall& call) {
    const Attention& a = call.a;
    const int64_t heads = a.batches * a.heads, tiles = call.tiles<S>();
    const int64_t blocks = std::min<int64_t>(multiprocessors(call.launch.device), tiles);
    TileOrder order{static_cast<unsigned>(tiles / heads), static_cast<unsigned>(heads), 1, nullptr};
    grid_size(tiles + blocks);  // what counts tiles has 32 bits
    std::optional<Tensor> counter;
    // Where a mask hides keys on the right alone, tiles are the longer the later.
    if (a.last < a.S_k - 1 && !a.hides_left() && tiles > blocks) {
        const int64_t head_bytes = int64_t{a.S_k} * (a.D + a.D_v) * static_cast<int64_t>(sizeof(T));
        const int64_t room = int64_t{2} * device_attribute(cudaDevAttrL2CacheSize, call.launch.device) / 3;
        const int64_t fit = std::max<int64_t>(room / head_bytes, 1) * a.group();
        order.section = static_cast<unsigned>(ceil_div(heads, ceil_div(heads, fit)));  // all of one size, almost
        counter = empty(call.query, ScalarType::Int, {1});
        fill_zero(*counter, call.launch.stream);
        order.counter = static_cast<unsigned*>(counter->data_ptr());
    }
    call.run<attention_persistent_kernel<T, S>, T, S>(blocks, order);
}

}  // namespace

std::tuple<Tensor, Tensor> attention_persistent(const Tensor& query, const Tensor& key, const Tensor& value,
                                                const std::optional<Tensor>& attn_mask, int64_t first, int64_t last,
                                                double scale, bool enable_gqa) {
    AttentionCall call("persistent", query, key, value, attn_mask, first, last, scale, enable_gqa);
    return call.results<Persistent64, Persistent96, Persistent128, Persistent256>([&](auto zero, auto shape) {
        using T = decltype(zero);
        using S = decltype(shape);
        run_persistent<T, S>(call);
    });
}

void attention_persistent_kernel_facts(std::vector<KernelFacts>& facts, ScalarType dtype) {
    hopper_facts<Persistent64, Persistent96, Persistent128, Persistent256>(
        facts, dtype,
        {"attention.persistent.64", "attention.persistent.96", "attention.persistent.128", "attention.persistent.256"},
        [](auto zero, auto shape, const char* name) {
            using T = decltype(zero);
            using S = decltype(shape);
            return kernel_facts<attention_persistent_kernel<T, S>>(name, S::THREADS, S::SHARED);
        });
}

}  // namespace kl
