// matmul, eleventh step; the table of the climb stands in matmul.cuh.
//
//   split_k           where 128×256 tiles are few, smaller ones, or a cluster  the L2's bandwidth, where tiles are small
//                     that shares the K of one
//
// A product of few 128×256 tiles leaves most SMs without work. Smaller tiles are more, but ask L2 for more bytes a product,
// which a cluster of two blocks lowers again that lie side by side and share the rows of A, as in `cluster`. Or a cluster
// of 2, 4 or 8 blocks makes one tile, each from its part of K, and adds up through distributed shared memory: every block
// lays its sums in its own shared memory, and finishes its part of the columns from all of them. They are added in the
// order of K, whoever comes first, so that every run gives the same bits; and no workspace is needed in global memory. A
// count of cycles (`cycles`) says which of it all is best.
//
// Where there are wide tiles enough for every SM nothing is split: this step is `persistent`, or `stream_k` where the last
// turn would leave much of the GPU without work.

#include "../resident.cuh"
#include "hopper.cuh"

namespace kl {
namespace {

// CONSUMERS warpgroups of 64 rows each.
template <int CONSUMERS_, int BN_>
struct Tile {
    static constexpr int CONSUMERS = CONSUMERS_, BM = CONSUMERS * 64, BN = BN_, THREADS = (1 + CONSUMERS) * WARPGROUP;
    static constexpr int A_BYTES = BM * SWIZZLE_ROW, STAGE_BYTES = A_BYTES + BN * SWIZZLE_ROW;
    static constexpr int STAGES = 192 * 1024 / STAGE_BYTES < 8 ? 192 * 1024 / STAGE_BYTES : 8;
    static constexpr int SHARED = STAGES * STAGE_BYTES + SWIZZLE_ATOM + 2 * STAGES * 8;
    static constexpr bool PAIRS = CONSUMERS == 2 && BN < 256;  // wide pairs are what `persistent` makes
    static_assert(BM * BN * sizeof(float) <= STAGES * STAGE_BYTES, "the sums lie where the stages were");
};
using Wide = Tile<2, 256>;
using Square = Tile<2, 128>;
using Narrow = Tile<2, 64>;
using Small = Tile<1, 64>;
constexpr int MAX_SPLITS = 8;

// What the blocks of a cluster have in common.
struct Sharing {
    int cluster;
    bool pair;  // rows of A, of two tiles side by side; else one tile

    __host__ __device__ constexpr int splits() const { return pair ? 1 : cluster; }
};

template <typename T, Major A, Major B, typename Tile>
__global__ void __launch_bounds__(Tile::THREADS, 1)
    matmul_split_k_kernel(T* c, const __grid_constant__ TmaOperands from, Tiled p, TileOrder order, Sharing sharing) {
    constexpr int BM = Tile::BM, BN = Tile::BN, STAGES = Tile::STAGES, CONSUMERS = Tile::CONSUMERS;
    constexpr int A_BYTES = Tile::A_BYTES, STAGE_BYTES = Tile::STAGE_BYTES;
#if KL_SM90A
    const uint32_t tiles = aligned_shared(), full = tiles + STAGES * STAGE_BYTES, empty = full + STAGES * 8;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            mbarrier_init(full + s * 8, 1);
            mbarrier_init(empty + s * 8, (sharing.pair ? 2 : 1) * CONSUMERS * WARPGROUP / WARP);
        }
        mbarrier_init_fence();
        tma_prefetch(from.a);
        tma_prefetch(from.b);
    }
    const bool pair = Tile::PAIRS && sharing.pair;
    if (pair) {
        cluster_sync();  // neither block writes into the other before its barriers are there
    } else {
        __syncthreads();
    }

    int batch, tile_m, tile_n;
    order.at(blockIdx.x / sharing.cluster, &batch, &tile_m, &tile_n);
    const int rank = sharing.cluster > 1 ? static_cast<int>(cluster_rank()) : 0;
    const int m0 = tile_m * BM, n0 = (pair ? tile_n * 2 + rank : tile_n) * BN;
    const int splits = sharing.splits(), part = pair ? 0 : rank;
    const int64_t all = ceil_div(p.K, BLOCK_K<T>);
    const int begin = static_cast<int>(all * part / splits), end = static_cast<int>(all * (part + 1) / splits);
    const int warp = warp_index(), group = warp / (WARPGROUP / WARP);
    Ring<STAGES> at;
    if (group == 0) {
        if constexpr (CONSUMERS > 1) registers_decrease<40>();
        if (warp == 0 && elect_one()) {
            for (int i = begin; i < end; ++i, at.next()) {
                const uint32_t stage = tiles + at.stage * STAGE_BYTES, barrier = full + at.stage * 8;
                mbarrier_wait(empty + at.stage * 8, at.phase ^ 1);
                mbarrier_arrive_expect(barrier, STAGE_BYTES);
                const int k = i * BLOCK_K<T>, a_batch = batch * p.a_step, b_batch = batch * p.b_step;
                if constexpr (Tile::PAIRS) {
                    if (pair) {
                        load_pair<A, B, BM, BN>(stage, from, barrier, false, m0, n0, k, a_batch, b_batch);
                        continue;
                    }
                }
                load_tile<A, BM>(stage, from.a, barrier, m0, k, a_batch);
                load_tile<B, BN>(stage + A_BYTES, from.b, barrier, n0, k, b_batch);
            }
        }
        __syncwarp();
        if (sharing.cluster == 1) return;
        if (!pair) cluster_sync();
        cluster_leave();
    } else {
        if constexpr (CONSUMERS > 1) registers_increase<232>();
        const int half = group - 1, thread = threadIdx.x - WARPGROUP, lane = threadIdx.x % WARP;
        float sum[BN / 2];
        int before = 0;
        for (int i = begin; i < end; ++i, at.next()) {
            const uint32_t stage = tiles + at.stage * STAGE_BYTES;
            mbarrier_wait(full + at.stage * 8, at.phase);
            multiply_stage<T, A, B, BN>(sum, stage + half * PANEL_BYTES, stage + A_BYTES, i > begin);
            wgmma_wait<1>();
            if (pair) {
                if (i > begin && lane < 2) mbarrier_arrive_at(empty + before * 8, lane);
            } else {
                if (i > begin && lane == 0) mbarrier_arrive(empty + before * 8);
            }
            before = at.stage;
        }
        wgmma_wait<0>();
        wgmma_pin(sum);
        if (splits == 1) {
            if (pair) cluster_arrive_relaxed();
            store_outputs<T, BN>(sum, c + batch * p.c_batch, p.M, p.N, m0 + half * PANEL_X, n0);
            __syncwarp();
            if (pair) cluster_wait();  // shared memory stays until the other block writes and arrives no more
            return;
        }
        named_barrier_sync(1, CONSUMERS * WARPGROUP);  // all have read the last stage: its place is free
        // Four sums of a thread, 8 columns of the tile, as 16 bytes beside those of the other threads.
        const auto place = [&](int j) { return tiles + (j * CONSUMERS * WARPGROUP + thread) * 16; };
#pragma unroll
        for (int j = 0; j < BN / 8; ++j) {
            store_shared16(place(j), make_uint4(__float_as_uint(sum[j * 4]), __float_as_uint(sum[j * 4 + 1]),
                                                __float_as_uint(sum[j * 4 + 2]), __float_as_uint(sum[j * 4 + 3])));
        }
        cluster_sync();
        const int m = m0 + half * PANEL_X + warp % 4 * 16 + lane / 4, columns = BN / 8 / splits;
#pragma unroll 1
        for (int j = rank * columns; j < (rank + 1) * columns; ++j) {
            float4 part[MAX_SPLITS];  // all under way at once: another block's memory is far
#pragma unroll
            for (int r = 0; r < MAX_SPLITS; ++r) {
                if (r < splits) part[r] = load_cluster16(cluster_address(place(j), r));
            }
            float total[4] = {};
#pragma unroll
            for (int r = 0; r < MAX_SPLITS; ++r) {
                if (r >= splits) break;
                total[0] += part[r].x, total[1] += part[r].y, total[2] += part[r].z, total[3] += part[r].w;
            }
            store_eight_columns<T>(total, c + batch * p.c_batch, p.M, p.N, m, n0 + j * 8 + lane % 4 * 2);
        }
        __syncwarp();
        cluster_leave();  // shared memory stays until the other blocks have read it
    }
#endif
}

// A shape of tiles, and what the blocks of a cluster share; a tile of no columns: nothing yet.
struct Plan {
    int rows = 0, columns = 0;
    Sharing sharing{};
    int64_t cycles = std::numeric_limits<int64_t>::max();

    template <typename Tile>
    bool is() const {
        return rows == Tile::BM && columns == Tile::BN;
    }
};

// About how many cycles a product takes, from what an SM does in one: 2048 multiply-adds of 16-bit elements, and 48 bytes
// from L2. The constants are what it takes to begin, to end, and to meet.
template <typename Tile>
int64_t cycles(const Tiled& p, int64_t k_tiles, Sharing sharing, int blocks_at_once) {
    constexpr int64_t BEGIN = 3000, MEET = 8000, BYTES = 48, END = Tile::BM * Tile::BN / 16;
    const int64_t bytes = Tile::STAGE_BYTES - (sharing.pair ? Tile::A_BYTES / 2 : 0);
    const int64_t step = std::max<int64_t>(Tile::BM * Tile::BN * 64 / 2048, bytes / BYTES);
    const int64_t columns = ceil_div(p.N, sharing.pair ? 2 * Tile::BN : Tile::BN);
    const int64_t blocks = ceil_div(p.M, Tile::BM) * columns * p.batches * sharing.cluster;
    const int64_t turns = ceil_div(blocks, blocks_at_once), splits = sharing.splits();
    return BEGIN + turns * (ceil_div(k_tiles, splits) * step + END + (splits > 1 ? MEET : 0));
}

template <typename Tile, typename T, Major A, Major B>
void consider(Plan& best, const Tiled& p, int64_t k_tiles, const Launch& on) {
    constexpr auto kernel = matmul_split_k_kernel<T, A, B, Tile>;
    static DeviceSet asked;
    static Resident resident;
    allow_shared(kernel, Tile::SHARED, on.device, asked);  // or none would fit
    const auto weigh = [&](Sharing sharing) {
        // Not every SM, of clusters: one lies within a group of SMs.
        const int at_once =
            sharing.cluster == 1
                ? multiprocessors(on.device)
                : sharing.cluster * resident.clusters(kernel, dim3(Tile::THREADS), sharing.cluster, Tile::SHARED, on);
        const int64_t count = cycles<Tile>(p, k_tiles, sharing, at_once);
        if (count < best.cycles) best = {Tile::BM, Tile::BN, sharing, count};
    };
    for (int splits = 1; splits <= MAX_SPLITS && splits <= k_tiles; splits *= 2) weigh({splits, false});
    if (Tile::PAIRS && p.N > Tile::BN) weigh({2, true});
}

// The same of `stream_k`, where no turn is left unfilled: its workers are pairs of blocks, and share what they meet for.
int64_t cycles_shared(const Tiled& p, int64_t k_tiles, int sms) {
    constexpr int64_t BEGIN = 3000, SHARE = 16000;  // 128 KiB a block are laid down and added up
    const int64_t pairs = tile_count(pair_order(p, Wide::BM, Wide::BN).tiles, p), workers = sms / CLUSTER;
    constexpr int64_t STEP = Wide::BM * Wide::BN * 64 / 2048, END = Wide::BM * Wide::BN / 16;
    return BEGIN + ceil_div(pairs * k_tiles, workers) * STEP + ceil_div(pairs, workers) * END + SHARE;
}

template <typename Tile, typename T, Major A, Major B>
void launch_split(const HopperCall& call, Sharing sharing, const Launch& on) {
    static DeviceSet asked;
    const Tiled& p = call.tiled;
    const TileOrder order{static_cast<int>(ceil_div(p.M, Tile::BM)),
                          static_cast<int>(ceil_div(p.N, sharing.pair ? 2 * Tile::BN : Tile::BN)), 2048 / Tile::BM};
    launch_hopper(matmul_split_k_kernel<T, A, B, Tile>, "matmul.split_k", tile_count(order, p) * sharing.cluster,
                  sharing.cluster, Tile::THREADS, Tile::SHARED, on, asked, static_cast<T*>(call.output.data_ptr()),
                  call.operands(), p, order, sharing);
}

}  // namespace

Tensor matmul_split_k(const Tensor& input, const Tensor& other, bool allow_tf32) {
    const ScalarType dtype = input.scalar_type();
    return run_hopper(input, other, allow_tf32, "split_k", [&](const HopperCall& call, const Launch& on) {
        dispatch_hopper(call, dtype, [&](auto zero, auto a_major, auto b_major) {
            using T = decltype(zero);
            constexpr Major A = a_major(), B = b_major();
            const int sms = multiprocessors(on.device);
            const int64_t k_tiles = ceil_div(call.tiled.K, BLOCK_K<T>);
            Plan plan;
            consider<Wide, T, A, B>(plan, call.tiled, k_tiles, on);
            consider<Square, T, A, B>(plan, call.tiled, k_tiles, on);
            consider<Narrow, T, A, B>(plan, call.tiled, k_tiles, on);
            consider<Small, T, A, B>(plan, call.tiled, k_tiles, on);
            const int64_t shared = cycles_shared(call.tiled, k_tiles, sms);
            const bool share = shared < plan.cycles - plan.cycles / 16;  // a count so rough must promise something
            const auto launch = [&](auto tile) {
                if (plan.is<decltype(tile)>()) launch_split<decltype(tile), T, A, B>(call, plan.sharing, on);
            };
            if (share || (plan.is<Wide>() && plan.sharing.cluster == 1)) {
                return launch_persistent(call, dtype, on, share);
            }
            launch(Wide{});
            launch(Square{});
            launch(Narrow{});
            launch(Small{});
        });
    });
}

void matmul_split_k_facts(std::vector<KernelFacts>& facts, ScalarType dtype) {
    dispatch(dtype, "matmul", [&](auto zero) {
        using T = decltype(zero);
        constexpr Major B = sizeof(T) == 2 ? Major::MN : Major::K;
        const auto add = [&](const char* name, auto tile) {
            using Tile = decltype(tile);
            facts.push_back(
                kernel_facts<matmul_split_k_kernel<T, Major::K, B, Tile>>(name, Tile::THREADS, Tile::SHARED));
        };
        add("matmul.split_k", Wide{});
        add("matmul.split_k 128x128", Square{});
        add("matmul.split_k 128x64", Narrow{});
        add("matmul.split_k 64x64", Small{});
    });
}

}  // namespace kl
