// Attention on Hopper, its fourth step; the table of the climb stands in attention.cuh.
//
//   persistent   blocks stay, and load the next tile's queries, keys and values ahead     tensor cores
//
// Three things beside the schedule of pingpong.cuh:
//
//   - The producer goes on to the next tile of queries while the consumers end this one: no tile but a block's first
//     waits for its loads, and none for a block's start.
//   - Tiles are walked in an order that shares keys and values in L2 and leaves no block behind (TileOrder below;
//     FlashAttention-3, hopper/tile_scheduler.hpp, hands them out by a counter in memory).
//   - Where nothing is hidden, tiles of keys are longer: fewer rescalings and barriers for each key. Under a mask they
//     would be cut at its edge, and much of a longer one is made in vain.

#include "pingpong.cuh"

namespace kl {
namespace {

using Persistent64 = HopperShape<64, 128, 3, 32, 160>;
using Persistent96 = HopperShape<96, 128, 2, 24, 240>;
using Persistent128 = HopperShape<128, 128, 2, 24, 240>;
using PersistentWhole128 = HopperShape<128, 176, 2, 24, 240>;  // no key is hidden
using Persistent256 = HopperShape<256, 80, 2, 24, 240>;

// The order of tiles: by sections of heads whose keys and values fit in L2 together; in a section the last queries of
// all its heads first, which under a causal mask see the most keys. Blocks take turns back and forth, so that whoever had
// the longest tile of a round gets the shortest of the next.
struct TileOrder {
    unsigned tiles;    // of a head
    unsigned heads;    // of all batches
    unsigned section;  // heads
};

#if KL_SM90A

// The number of the tile that the block makes in its `turn`, past all tiles where it has done its share.
__device__ inline unsigned index_of(int turn) {
    return turn * gridDim.x + (turn % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
}
template <typename S>
__device__ inline QueryTile<S> tile_of(const Attention& a, const TileOrder& order, unsigned index) {
    const unsigned begin = index / (order.section * order.tiles) * order.section;
    const unsigned within = index - begin * order.tiles, beside = min(order.section, order.heads - begin);
    return {a, begin + within % beside, order.tiles - 1 - within / beside};
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
    int begin = 0;  // the place in the rings of a tile's first step
    if (group == 0) {
        registers_decrease<S::PRODUCER_REGISTERS>();
        if (warp_index() == 0 && elect_one()) {
            for (int turn = 0; index_of(turn) < order.tiles * order.heads; ++turn) {
                const QueryTile<S> tile = tile_of<S>(a, order, index_of(turn));
                produce(at, maps, tile, turn, begin);
                begin += tile.steps;
            }
        }
        return;
    }

    registers_increase<S::CONSUMER_REGISTERS>();
    begin_turns(consumer);
    for (int turn = 0; index_of(turn) < order.tiles * order.heads; ++turn) {
        const QueryTile<S> tile = tile_of<S>(a, order, index_of(turn));
        const ThreadRows rows(tile.q0, consumer);
        float output[S::HEAD_DIM / 2];
        RunningSoftmax<S::KEYS> softmax;
        attend_in_turns<T, S>(output, softmax, at, a, tile, rows, consumer, turn, begin);
        store_results<T, S>(output_pointer, lse, a, tile, rows, output, softmax);
        begin += tile.steps;
    }
#endif
}

int64_t device_attribute(cudaDeviceAttr attribute, int32_t device) {
    int value = 0;
    KL_CUDA_CHECK(cudaDeviceGetAttribute(&value, attribute, device));
    return value;
}

template <typename T, typename S>
void run_persistent(AttentionCall& call) {
    const Attention& a = call.a;
    const int64_t heads = a.batches * a.heads, tiles = call.tiles<S>();
    // Tiles are as long as each other, or the later ones longer: only then must heads be mixed.
    int64_t section = 1;
    if (a.last < a.S_k - 1 && !a.hides_left()) {
        const int64_t head_bytes = int64_t{a.S_k} * (a.D + a.D_v) * static_cast<int64_t>(sizeof(T));
        const int64_t room = device_attribute(cudaDevAttrL2CacheSize, call.launch.device) * 2 / 3;
        section = std::min(std::max<int64_t>(room / head_bytes, 1) * a.group(), heads);
    }
    const TileOrder order{static_cast<unsigned>(tiles / heads), static_cast<unsigned>(heads),
                          static_cast<unsigned>(section)};
    const int64_t blocks = device_attribute(cudaDevAttrMultiProcessorCount, call.launch.device);
    grid_size(tiles);  // what counts tiles has 32 bits
    call.run<attention_persistent_kernel<T, S>, T, S>(std::min(blocks, tiles), order);
}

}  // namespace

std::tuple<Tensor, Tensor> attention_persistent(const Tensor& query, const Tensor& key, const Tensor& value,
                                                const std::optional<Tensor>& attn_mask, int64_t first, int64_t last,
                                                double scale, bool enable_gqa) {
    AttentionCall call("persistent", query, key, value, attn_mask, first, last, scale, enable_gqa);
    const bool whole = call.a.last >= call.a.S_k - 1 && !call.a.hides_left();
    if (call.has_work()) {
        call.dispatch<Persistent64, Persistent96, Persistent128, Persistent256>([&](auto zero, auto shape) {
            using T = decltype(zero);
            using S = decltype(shape);
            if constexpr (S::HEAD_DIM == 128) {
                if (whole) return run_persistent<T, PersistentWhole128>(call);
            }
            run_persistent<T, S>(call);
        });
    }
    return {call.output, call.lse};
}

void attention_persistent_kernel_facts(std::vector<KernelFacts>& facts, ScalarType dtype) {
    if (dtype == ScalarType::Float) return;
    dispatch_16bit(dtype, "attention", [&](auto zero) {
        const auto add = [&](const char* name, auto shape) {
            using T = decltype(zero);
            using S = decltype(shape);
            facts.push_back(kernel_facts<attention_persistent_kernel<T, S>>(name, S::THREADS, S::SHARED));
        };
        add("attention.persistent.64", Persistent64{});
        add("attention.persistent.96", Persistent96{});
        add("attention.persistent.128", Persistent128{});
        add("attention.persistent.whole.128", PersistentWhole128{});
        add("attention.persistent.256", Persistent256{});
    });
}

}  // namespace kl
