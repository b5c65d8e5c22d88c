// The body of the kernels that share the K of a tile among the blocks of a cluster: matmul's and linear's `split_k`.
#pragma once

#include "core/divisor.cuh"
#include "core/pdl.cuh"
#include "matmul/hopper.cuh"
#include "sm90/cluster.cuh"

namespace kl {
namespace split_k {

constexpr int MAX_SPLITS = 8;
constexpr int UNIT = 32;  // columns of a tile that a block reduces at once

// CONSUMERS warpgroups of 64 rows each. PAIR: a cluster is two tiles side by side, not parts of one.
template <int CONSUMERS_, int BN_, bool PAIR_ = false>
struct Tile {
    static constexpr bool PAIR = PAIR_;
    static constexpr int BESIDE = PAIR ? CLUSTER : 1;  // tiles of a cluster
    static constexpr int CONSUMERS = CONSUMERS_, BM = CONSUMERS * 64, BN = BN_, THREADS = (1 + CONSUMERS) * WARPGROUP;
    static constexpr int A_BYTES = BM * SWIZZLE_ROW, STAGE_BYTES = A_BYTES + BN * SWIZZLE_ROW;
    static constexpr int STAGES = 192 * 1024 / STAGE_BYTES < 8 ? 192 * 1024 / STAGE_BYTES : 8;
    static constexpr int SHARED = STAGES * STAGE_BYTES + SWIZZLE_ATOM + (2 * STAGES + 1) * 8;
    static constexpr int UNITS = BN / UNIT, UNIT_BYTES = BM * UNIT * 4;
    static_assert(MAX_SPLITS * UNIT_BYTES <= STAGES * STAGE_BYTES, "partial sums reuse the stages' memory");
    static_assert(UNITS <= MAX_SPLITS);
    static_assert(2 * SHARED > 228 * 1024, "one block an SM: matmul_split_k_blocks_at_once asks for one tile alone");
    static_assert(!PAIR || CONSUMERS == CLUSTER, "a panel of A for each block to fetch");
};
using Wide = Tile<2, 192>;
using Square = Tile<2, 128>;
using Narrow = Tile<2, 64>;
using NarrowPair = Tile<2, 64, true>;
using Small = Tile<1, 64>;
// Those that both operations have; matmul has the pair besides.
template <typename F>
void each_tile(F&& f) {
    f(Wide{}), f(Square{}), f(Narrow{}), f(Small{});
}
constexpr int OPERANDS = 2;
template <int WIDTH>
using Width = std::integral_constant<int, WIDTH>;

// matmul's epilogue: stores the sums unchanged. `offset`: of the batch, in elements.
struct SumsUnchanged {
    template <typename T, int COLUMNS>
    __device__ void store(float (&sum)[COLUMNS / 2], T* c, int64_t offset, const Tiled& p, int m0, int n0) const {
        store_outputs<T, COLUMNS>(sum, c + offset, p, m0, n0);
    }
};

// Block index -> output tile, or pair of tiles: 2^log_blocks blocks share one. Tiles are numbered down the rows.
struct SplitKScheduler {
    Divisor tiles_m, tiles_n;
    int log_blocks;
    int a_panel, b_panel;  // bytes that TMA loads of a panel of each operand

    __device__ int part() const { return blockIdx.x & ((1 << log_blocks) - 1); }
    __device__ void at(int* batch, int* m, int* n) const {
        const uint32_t tile = blockIdx.x >> log_blocks, column = tiles_m.quotient(tile), b = tiles_n.quotient(column);
        *batch = b, *m = tiles_m.remainder(tile), *n = tiles_n.remainder(column);
    }
};

#if KL_SM90A
// Reduces a tile over the 2^log_splits blocks of the cluster and stores it. Block `rank` reduces every n-th unit of
// columns, n the number of splits. Peers write their partial sums of it into the shared memory that held the stages;
// barrier `sums` counts the bytes. Called by consumer threads only.
template <typename T, typename Tile, typename Epilogue>
__device__ void reduce_and_store(const float (&sum)[Tile::BN / 2], T* c, int64_t offset, const Tiled& p,
                                 const Epilogue& epilogue, int m0, int n0, uint32_t stages, uint32_t sums, int rank,
                                 int log_splits) {
    const int splits = 1 << log_splits, thread = threadIdx.x - WARPGROUP;
    const int units = (Tile::UNITS + splits - 1 - rank) >> log_splits;
    const auto place = [&](int unit, int part, int j) {  // of a thread's 16 bytes of 8 columns
        const int slot = (unit >> log_splits << log_splits) + part;
        return stages + slot * Tile::UNIT_BYTES + (j * Tile::CONSUMERS * WARPGROUP + thread) * 16;
    };
    if (thread == 0) mbarrier_arrive_expect_tx(sums, units * (splits - 1) * Tile::UNIT_BYTES);
    __syncwarp();
    cluster_sync_relaxed();  // every block has read its last stage
#pragma unroll
    for (int unit = 0; unit < Tile::UNITS; ++unit) {
        const int to = unit & (splits - 1);
        if (to == rank) continue;
#pragma unroll
        for (int j = 0; j < UNIT / 8; ++j) {
            const float* const x = sum + unit * (UNIT / 2) + j * 4;
            cluster::send(place(unit, rank, j), make_float4(x[0], x[1], x[2], x[3]), sums, to);
        }
    }
    mbarrier_wait(sums, 0);
    for (int mine = rank; mine < Tile::UNITS; mine += splits) {
        float own[UNIT / 2] = {}, total[UNIT / 2] = {};
#pragma unroll
        for (int unit = 0; unit < Tile::UNITS; ++unit) {
#pragma unroll
            for (int e = 0; e < UNIT / 2; ++e) own[e] = unit == mine ? sum[unit * (UNIT / 2) + e] : own[e];
        }
        for (int part = 0; part < splits; ++part) {
#pragma unroll
            for (int j = 0; j < UNIT / 8; ++j) {
                const uint4 other = part == rank ? uint4{} : load_shared16(place(mine, part, j));
                const float* const sent = reinterpret_cast<const float*>(&other);
#pragma unroll
                for (int e = 0; e < 4; ++e) total[j * 4 + e] += part == rank ? own[j * 4 + e] : sent[e];
            }
        }
        epilogue.template store<T, UNIT>(total, c, offset, p, m0, n0 + mine * UNIT);
    }
}
#endif

// The kernels' body: a block multiplies its part of K of one tile.
template <typename T, Major A, Major B, typename Tile, typename Epilogue>
__device__ __forceinline__ void multiply_part(T* c, const TmaOperands& from, const Tiled& p,
                                              const SplitKScheduler& scheduler, const Epilogue& epilogue) {
#if KL_SM90A
    constexpr int BM = Tile::BM, BN = Tile::BN, STAGES = Tile::STAGES, CONSUMERS = Tile::CONSUMERS;
    constexpr int A_BYTES = Tile::A_BYTES, STAGE_BYTES = Tile::STAGE_BYTES;
    const uint32_t tiles = aligned_shared(), full = tiles + STAGES * STAGE_BYTES, empty = full + STAGES * 8;
    const uint32_t sums = empty + STAGES * 8;  // barrier: partial sums of the peers have arrived
    if (threadIdx.x == 0) {
        from.prefetch();
        PipelineState<STAGES>::init(full, empty, OPERANDS, Tile::BESIDE * CONSUMERS * WARPGROUP / WARP);
        mbarrier_init(sums, 1);
        mbarrier_init_fence();
    }
    int batch, tile_m, tile_n;
    scheduler.at(&batch, &tile_m, &tile_n);
    const int rank = scheduler.part(), log_splits = Tile::PAIR ? 0 : scheduler.log_blocks, splits = 1 << log_splits;
    const int m0 = tile_m * BM, n0 = (tile_n * Tile::BESIDE + (Tile::PAIR ? rank : 0)) * BN;
    const int all = static_cast<int>(ceil_div(p.K, BLOCK_K<T>)), part = Tile::PAIR ? 0 : rank;
    const int begin = all * part >> log_splits, end = all * (part + 1) >> log_splits;
    __syncthreads();
    if constexpr (Tile::PAIR) cluster_sync_relaxed();  // neither writes into the other before its barriers are there

    const int warp = warp_index(), group = warp / (WARPGROUP / WARP);
    PipelineState<STAGES> at;
    if (group == 0) {
        if constexpr (CONSUMERS > 1) registers_decrease<PRODUCER_REGISTERS>();
        // One producer warp per operand: with small tiles a single warp would issue a stage's loads more slowly than
        // the bytes arrive.
        const auto bring = [&](auto major, auto width, const CUtensorMap& map, uint32_t to, int x, int size, int step,
                               int panel_bytes) {
            // Panels outside the operand are not loaded: their rows and columns are not stored.
            const int panels = min(width(), size - x + PANEL_X - 1) / PANEL_X, bytes = panels * panel_bytes;
            for (int i = begin; i < end; ++i, at.advance()) {
                const uint32_t barrier = full + at.stage * 8;
                mbarrier_wait(empty + at.stage * 8, at.phase ^ 1);
                mbarrier_arrive_expect_tx(barrier, bytes);
                const uint32_t stage = to + at.stage * STAGE_BYTES;
                if constexpr (Tile::PAIR && width() == BM) {
                    if (rank >= panels) continue;
                    load_tile_multicast<major(), PANEL_X>(stage + rank * PANEL_BYTES, map, barrier, 0b11,
                                                          x + rank * PANEL_X, i * BLOCK_K<T>, batch * step);
                } else {
                    load_tile<major(), width()>(stage, map, barrier, x, i * BLOCK_K<T>, batch * step, panels);
                }
            }
        };
        if (warp == 0 && elect_one()) {
            bring(MajorOf<B>{}, Width<BN>{}, from.b, tiles + A_BYTES, n0, p.N, p.b_step, scheduler.b_panel);
        } else if (warp == 1 && elect_one()) {
            // Where A is a copy (PDL). B was there before the copy began, which does not use PDL itself, and nothing is
            // stored before A arrives: so no other thread waits.
            griddepcontrol_wait();
            bring(MajorOf<A>{}, Width<BM>{}, from.a, tiles, m0, p.M, p.a_step, scheduler.a_panel);
        }
        __syncwarp();
        if (Tile::PAIR || splits > 1) cluster_sync_relaxed();
    } else {
        if constexpr (CONSUMERS > 1) registers_increase<CONSUMER_REGISTERS>();
        const int half = group - 1, lane = threadIdx.x % WARP;
        float sum[BN / 2];
        int before = 0;
        for (int i = begin; i < end; ++i, at.advance()) {
            const uint32_t stage = tiles + at.stage * STAGE_BYTES;
            mbarrier_wait(full + at.stage * 8, at.phase);
            multiply_stage<T, A, B, BN>(sum, stage + half * PANEL_BYTES, stage + A_BYTES, i > begin);
            wgmma_wait<1>();
            if (i > begin && lane < Tile::BESIDE) {
                if constexpr (Tile::PAIR) mbarrier_arrive_at(empty + before * 8, lane);
                if constexpr (!Tile::PAIR) mbarrier_arrive(empty + before * 8);
            }
            before = at.stage;
        }
        wgmma_wait<0>();
        wgmma_pin(sum);
        const int64_t offset = batch * p.c_batch;
        if (splits > 1) {
            return reduce_and_store<T, Tile>(sum, c, offset, p, epilogue, m0 + half * PANEL_X, n0, tiles, sums, rank,
                                             log_splits);
        }
        if constexpr (Tile::PAIR) cluster_arrive_relaxed();
        epilogue.template store<T, BN>(sum, c, offset, p, m0 + half * PANEL_X, n0);
        if constexpr (Tile::PAIR) {
            __syncwarp();
            cluster_wait();  // shared memory must live until the other block's last write and arrival
        }
    }
#endif
}

// Lowers the TMA box of a K-major operand that has fewer rows than a panel. Each row of a box outside the operand costs
// TMA four cycles or more. In an MN-major operand the rows of a box are k, which must arrive as zeros.
template <Major MAJOR>
TmaTensor low(TmaTensor operand) {
    const int64_t rows = ceil_div(operand.sizes[1], 8) * 8;  // the swizzle goes by eight
    if (MAJOR == Major::K && rows < PANEL_X) operand.box[1] = static_cast<int>(rows);
    return operand;
}

// Launches a kernel whose first four arguments are those of `multiply_part`; `more` are the others.
template <auto KERNEL, typename Tile, typename T, Major A, Major B, typename... More>
void launch_tiles(const char* name, const HopperCall& call, int log_splits, bool pdl, const Launch& on,
                  const More&... more) {
    static DeviceSet asked;
    const Tiled& p = call.tiled;
    const TileRaster tiles = tile_order(p, Tile::BM, Tile::BESIDE * Tile::BN);
    const TmaTensor a = low<A>(call.a), b = low<B>(call.b);
    const int log_blocks = Tile::PAIR ? 1 : log_splits, blocks = 1 << log_blocks;
    const SplitKScheduler scheduler{Divisor(tiles.tiles_m), Divisor(tiles.tiles_n), log_blocks, a.box[1] * SWIZZLE_ROW,
                                    b.box[1] * SWIZZLE_ROW};
    const HopperGrid grid{tile_count(tiles, p) * blocks, blocks, Tile::THREADS, Tile::SHARED, pdl};
    launch_hopper(KERNEL, name, grid, on, asked, static_cast<T*>(call.c), TmaOperands{tensor_map(a), tensor_map(b)}, p,
                  scheduler, more...);
}

inline int log2_of(int64_t x) {
    int log = 0;
    while (int64_t{1} << log < x) ++log;
    return log;
}

// `splits` of a call: 1, 2, 4 or 8, no more than tiles of K.
inline void check_splits(const char* op, int64_t splits, int64_t k_tiles) {
    KL_CHECK(splits == 1 || splits == 2 || splits == 4 || splits == MAX_SPLITS, op,
             ": split_k needs `splits` of 1, 2, 4 or 8, got ", splits);
    KL_CHECK(splits <= k_tiles, op, ": split_k has more splits than tiles of K");
}

}  // namespace split_k
}  // namespace kl
