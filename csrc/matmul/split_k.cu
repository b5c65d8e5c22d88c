// matmul, eleventh step; the table of the climb stands in matmul.cuh.
//
//   split_k           where 128×256 tiles are few, smaller ones, or a cluster  the latency of the first and last bytes
//                     that shares the K of one
//
// A product of few 128×256 tiles leaves most SMs without work. Smaller tiles are more, but ask L2 for more bytes a product;
// or a cluster of 2, 4 or 8 blocks makes one tile, each from its part of K, and adds up through distributed shared memory:
// every block finishes its part of the columns, and is sent what the others have of them. The sums are added in the order
// of K, whoever comes first, so that every run gives the same bits; and no workspace is needed in global memory. A count of
// cycles (`cycles`) says which of it all is best.
//
// Or two blocks side by side fetch half of their rows of A each, for both (multicast): what L2 gives is power, which is at
// its limit where 128 rows are multiplied as fast as the other operand comes from memory. Only where rows lie along memory:
// of rows along k each is 128 bytes of another line of memory, and two parts of K are faster.
//
// Products so small take 5 µs, of which a third passes before the first bytes arrive: what stands before the first load is
// kept short, without a division.
//
// Few rows of A that lie along memory are copied to lie along k (realign.cu), under which the first stages of B arrive.
//
// Where there are wide tiles enough for every SM nothing is split: this step is `persistent`, or `stream_k` where the last
// turn would leave much of the GPU without work.

#include "core/divisor.cuh"
#include "core/occupancy.cuh"
#include "core/pdl.cuh"
#include "matmul/hopper.cuh"
#include "sm90/cluster.cuh"

namespace kl {
namespace {

constexpr int MAX_SPLITS = 8;
constexpr int UNIT = 32;  // columns of a tile that a block finishes at once

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
    static_assert(MAX_SPLITS * UNIT_BYTES <= STAGES * STAGE_BYTES, "the others' sums lie where the stages were");
    static_assert(UNITS <= MAX_SPLITS);
    static_assert(!PAIR || CONSUMERS == CLUSTER, "a panel of A for each block to fetch");
};
using Wide = Tile<2, 192>;
using Square = Tile<2, 128>;
using Narrow = Tile<2, 64>;
using NarrowPair = Tile<2, 64, true>;
using Small = Tile<1, 64>;
template <typename Tile, Major A>
constexpr bool SUITS = !Tile::PAIR || A == Major::MN;
template <typename F>
void each_tile(F&& f) {
    f(Wide{}), f(Square{}), f(Narrow{}), f(NarrowPair{}), f(Small{});
}
constexpr int OPERANDS = 2;
template <int WIDTH>
using Width = std::integral_constant<int, WIDTH>;

// Which tile, or pair of tiles, a block has a part of: 2^log_blocks blocks share one, and they are numbered down the rows.
struct Places {
    Divisor tiles_m, tiles_n;
    int log_blocks;
    int a_panel, b_panel;  // bytes that TMA brings of a panel of each operand

    __device__ int part() const { return blockIdx.x & ((1 << log_blocks) - 1); }
    __device__ void at(int* batch, int* m, int* n) const {
        const uint32_t tile = blockIdx.x >> log_blocks, column = tiles_m.quotient(tile), b = tiles_n.quotient(column);
        *batch = b, *m = tiles_m.remainder(tile), *n = tiles_n.remainder(column);
    }
};

#if KL_SM90A
// Of a tile that 2^log_splits blocks have a part of each: every so-manieth unit of columns is finished by this block, and
// the others' sums of it come here, where the stages were, counted at `sums`. By the threads that have sums.
template <typename T, typename Tile>
__device__ void store_sum_of_parts(const float (&sum)[Tile::BN / 2], T* c, const Tiled& p, int m0, int n0,
                                   uint32_t stages, uint32_t sums, int rank, int log_splits) {
    const int splits = 1 << log_splits, thread = threadIdx.x - WARPGROUP;
    const int turns = (Tile::UNITS + splits - 1 - rank) >> log_splits;
    const auto place = [&](int unit, int part, int j) {  // of 16 bytes, which are a thread's of 8 columns
        const int slot = (unit >> log_splits << log_splits) + part;
        return stages + slot * Tile::UNIT_BYTES + (j * Tile::CONSUMERS * WARPGROUP + thread) * 16;
    };
    if (thread == 0) mbarrier_arrive_expect(sums, turns * (splits - 1) * Tile::UNIT_BYTES);
    __syncwarp();
    cluster_leave();  // all have read their last stage
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
        store_outputs<T, UNIT>(total, c, p, m0, n0 + mine * UNIT);
    }
}
#endif

template <typename T, Major A, Major B, typename Tile>
__global__ void __launch_bounds__(Tile::THREADS, 1)
    matmul_split_k_kernel(T* c, const __grid_constant__ TmaOperands from, Tiled p,
                          const __grid_constant__ Places places) {
    constexpr int BM = Tile::BM, BN = Tile::BN, STAGES = Tile::STAGES, CONSUMERS = Tile::CONSUMERS;
    constexpr int A_BYTES = Tile::A_BYTES, STAGE_BYTES = Tile::STAGE_BYTES;
#if KL_SM90A
    const uint32_t tiles = aligned_shared(), full = tiles + STAGES * STAGE_BYTES, empty = full + STAGES * 8;
    const uint32_t sums = empty + STAGES * 8;  // the others' are here
    if (threadIdx.x == 0) {
        from.prefetch();
        Ring<STAGES>::init(full, empty, OPERANDS, Tile::BESIDE * CONSUMERS * WARPGROUP / WARP);
        mbarrier_init(sums, 1);
        mbarrier_init_fence();
    }
    int batch, tile_m, tile_n;
    places.at(&batch, &tile_m, &tile_n);
    const int rank = places.part(), log_splits = Tile::PAIR ? 0 : places.log_blocks, splits = 1 << log_splits;
    const int m0 = tile_m * BM, n0 = (tile_n * Tile::BESIDE + (Tile::PAIR ? rank : 0)) * BN;
    const int all = static_cast<int>(ceil_div(p.K, BLOCK_K<T>)), part = Tile::PAIR ? 0 : rank;
    const int begin = all * part >> log_splits, end = all * (part + 1) >> log_splits;
    __syncthreads();
    if constexpr (Tile::PAIR) cluster_leave();  // neither block writes into the other before its barriers are there

    const int warp = warp_index(), group = warp / (WARPGROUP / WARP);
    Ring<STAGES> at;
    if (group == 0) {
        if constexpr (CONSUMERS > 1) registers_decrease<40>();
        // A warp for each operand: of small tiles one alone would take longer to ask for a stage than its bytes to come.
        const auto bring = [&](auto major, auto width, const CUtensorMap& map, uint32_t to, int x, int size, int step,
                               int panel_bytes) {
            // What lies outside is not asked for, whatever rows and columns it would be of: they are not stored.
            const int panels = min(width(), size - x + PANEL_X - 1) / PANEL_X, bytes = panels * panel_bytes;
            for (int i = begin; i < end; ++i, at.next()) {
                const uint32_t barrier = full + at.stage * 8;
                mbarrier_wait(empty + at.stage * 8, at.phase ^ 1);
                mbarrier_arrive_expect(barrier, bytes);
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
            bring(MajorOf<B>{}, Width<BN>{}, from.b, tiles + A_BYTES, n0, p.N, p.b_step, places.b_panel);
        } else if (warp == 1 && elect_one()) {
            wait_for_previous();  // where A is a copy; nothing is stored before it is here
            bring(MajorOf<A>{}, Width<BM>{}, from.a, tiles, m0, p.M, p.a_step, places.a_panel);
        }
        __syncwarp();
        if (Tile::PAIR || splits > 1) cluster_leave();
    } else {
        if constexpr (CONSUMERS > 1) registers_increase<232>();
        const int half = group - 1, lane = threadIdx.x % WARP;
        float sum[BN / 2];
        int before = 0;
        for (int i = begin; i < end; ++i, at.next()) {
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
        c += batch * p.c_batch;
        if (splits > 1) {
            return store_sum_of_parts<T, Tile>(sum, c, p, m0 + half * PANEL_X, n0, tiles, sums, rank, log_splits);
        }
        if constexpr (Tile::PAIR) cluster_arrive_relaxed();
        store_outputs<T, BN>(sum, c, p, m0 + half * PANEL_X, n0);
        if constexpr (Tile::PAIR) {
            __syncwarp();
            cluster_wait();  // shared memory stays until the other block writes and arrives no more
        }
    }
#endif
}

// A shape of tiles, and how many blocks share the K of one.
struct Plan {
    int rows = 0, columns = 0, log_splits = 0;
    bool pair = false;
    int64_t cycles = std::numeric_limits<int64_t>::max();
};

// About how many cycles a product takes: an SM multiplies, and its stages but those that are asked for at the beginning
// wait for L2; all wait for memory, under which the most of the rest is hidden. The constants (to begin; multiply-adds and
// bytes a cycle; to meet; outputs a cycle) are fitted to the times of ten products in a hundred ways on an H200, which they
// tell to a tenth; but for that of a pair, which leaves it to products of few rows.
constexpr int64_t BEGIN = 3000, MULTIPLIED = 2000, FROM_L2 = 55, FROM_MEMORY = 1900, MEET = 6500, PAIR_UP = 2000,
                  STORED = 5;

int64_t cycles(const Tiled& p, int64_t k_tiles, int64_t blocks) {
    const int64_t rows = (p.a_step ? p.batches : 1) * int64_t{p.M}, columns = (p.b_step ? p.batches : 1) * int64_t{p.N};
    const int64_t memory = BEGIN + (rows + columns) * k_tiles * SWIZZLE_ROW / FROM_MEMORY;
    return std::max(blocks, memory) + std::min(blocks, memory) * 3 / 8;
}

template <typename Tile>
int64_t split_cycles(const Tiled& p, int64_t k_tiles, int splits, int blocks_at_once) {
    constexpr int64_t MULTIPLY = Tile::BM * Tile::BN * 64 / MULTIPLIED;
    constexpr int64_t LOAD = (Tile::STAGE_BYTES - Tile::A_BYTES + Tile::A_BYTES / Tile::BESIDE) / FROM_L2;
    const int64_t clusters = ceil_div(p.M, Tile::BM) * ceil_div(p.N, Tile::BESIDE * Tile::BN) * p.batches;
    const int64_t turns = ceil_div(clusters * Tile::BESIDE * splits, blocks_at_once), steps = ceil_div(k_tiles, splits);
    const int64_t waiting = std::max<int64_t>(0, steps - Tile::STAGES) * std::max<int64_t>(0, LOAD - MULTIPLY);
    const int64_t end = Tile::BM * Tile::BN / STORED * (p.N % 8 == 0 ? 1 : 4);  // store_outputs
    const int64_t meet = Tile::PAIR ? PAIR_UP : splits > 1 ? MEET : 0;
    return cycles(p, k_tiles, turns * (BEGIN + steps * MULTIPLY + waiting + end + meet));
}

// The same of `persistent` and `stream_k`, of whose tiles each worker, a pair of blocks, makes a pair at once. The first
// goes by turns, the second leaves none unfilled, but lays down and adds up 128 KiB a block.
constexpr int WHOLE_BM = 128, WHOLE_BN = 256;

int64_t whole_cycles(const Tiled& p, int64_t k_tiles, int64_t pairs, int64_t workers, bool share) {
    constexpr int64_t OUTPUTS = WHOLE_BM * WHOLE_BN, SHARE = 25000, STEP = OUTPUTS * 64 / MULTIPLIED;
    const int64_t steps = share ? ceil_div(pairs * k_tiles, workers) : ceil_div(pairs, workers) * k_tiles;
    return cycles(p, k_tiles, BEGIN + 2000 + steps * STEP + OUTPUTS / STORED + (share ? SHARE : 0));
}

template <typename Tile, typename T, Major A, Major B>
void consider(Plan& best, const Tiled& p, int64_t k_tiles, const Launch& on) {
    constexpr auto kernel = matmul_split_k_kernel<T, A, B, Tile>;
    static DeviceSet asked;
    static Resident resident;
    allow_shared(kernel, Tile::SHARED, on.device, asked);  // or none would fit
    const int64_t most = Tile::PAIR ? 1 : std::min<int64_t>(MAX_SPLITS, k_tiles);
    for (int log_splits = 0; 1 << log_splits <= most; ++log_splits) {
        const int splits = 1 << log_splits, blocks = Tile::BESIDE * splits;
        // Not every SM, of clusters: one lies within a group of SMs.
        const int at_once = blocks == 1
                                ? multiprocessors(on.device)
                                : blocks * resident.clusters(kernel, dim3(Tile::THREADS), blocks, Tile::SHARED, on);
        const int64_t count = split_cycles<Tile>(p, k_tiles, splits, at_once);
        if (count < best.cycles) best = {Tile::BM, Tile::BN, log_splits, Tile::PAIR, count};
    }
}

// An operand of fewer rows (columns) than a panel has, along k, with a box no higher: TMA takes four cycles or more for each
// row of a box that lies outside. Along the other dimension what lies outside is k, and must come as zeros.
template <Major MAJOR>
TmaTensor low(TmaTensor operand) {
    const int64_t rows = ceil_div(operand.sizes[1], 8) * 8;  // the swizzle goes by eight
    if (MAJOR == Major::K && rows < PANEL_X) operand.box[1] = static_cast<int>(rows);
    return operand;
}

template <typename Tile, typename T, Major A, Major B>
void launch_split(const HopperCall& call, int log_splits, bool early, const Launch& on) {
    static DeviceSet asked;
    const Tiled& p = call.tiled;
    const TileOrder tiles = tile_order(p, Tile::BM, Tile::BESIDE * Tile::BN);
    const TmaTensor a = low<A>(call.a), b = low<B>(call.b);
    const int log_blocks = Tile::PAIR ? 1 : log_splits, blocks = 1 << log_blocks;
    const Places places{Divisor(tiles.tiles_m), Divisor(tiles.tiles_n), log_blocks, a.box[1] * SWIZZLE_ROW,
                        b.box[1] * SWIZZLE_ROW};
    const HopperGrid grid{tile_count(tiles, p) * blocks, blocks, Tile::THREADS, Tile::SHARED, early};
    launch_hopper(matmul_split_k_kernel<T, A, B, Tile>, "matmul.split_k", grid, on, asked, static_cast<T*>(call.c),
                  TmaOperands{tensor_map(a), tensor_map(b)}, p, places);
}

}  // namespace

Tensor matmul_split_k(const Tensor& input, const Tensor& other, bool allow_tf32) {
    const ScalarType dtype = input.scalar_type();
    return run_hopper(input, other, allow_tf32, "split_k", [&](HopperCall call, const Launch& on) {
        const std::optional<Tensor> copy = turn_few_rows(&call, dtype, on);
        dispatch_hopper(call, dtype, [&](auto zero, auto a_major, auto b_major) {
            using T = decltype(zero);
            constexpr Major A = a_major(), B = b_major();
            const int64_t k_tiles = ceil_div(call.tiled.K, BLOCK_K<T>);
            const int64_t pairs = tile_count(pair_order(call.tiled, WHOLE_BM, WHOLE_BN).tiles, call.tiled);
            const int64_t workers = multiprocessors(on.device) / CLUSTER;
            const int64_t whole = whole_cycles(call.tiled, k_tiles, pairs, workers, false);
            const int64_t shared = whole_cycles(call.tiled, k_tiles, pairs, workers, true);
            const bool share = pairs >= workers && shared < whole - whole / 128;
            Plan plan;
            plan.cycles = share ? shared : whole;
            const auto consider_tile = [&](auto tile) {
                using Tile = decltype(tile);
                if constexpr (SUITS<Tile, A>) consider<Tile, T, A, B>(plan, call.tiled, k_tiles, on);
            };
            const auto launch_tile = [&](auto tile) {
                using Tile = decltype(tile);
                if (plan.rows != Tile::BM || plan.columns != Tile::BN || plan.pair != Tile::PAIR) return;
                if constexpr (SUITS<Tile, A>) launch_split<Tile, T, A, B>(call, plan.log_splits, copy.has_value(), on);
            };
            each_tile(consider_tile);
            if (plan.rows == 0) return launch_persistent(call, dtype, on, share);
            each_tile(launch_tile);
        });
    });
}

void matmul_split_k_facts(std::vector<KernelFacts>& facts, ScalarType dtype) {
    dispatch(dtype, "matmul", [&](auto zero) {
        using T = decltype(zero);
        constexpr Major B = sizeof(T) == 2 ? Major::MN : Major::K;
        const auto add = [&](const char* name, auto tile) {
            using Tile = decltype(tile);
            constexpr Major A = Tile::PAIR ? Major::MN : Major::K;
            facts.push_back(kernel_facts<matmul_split_k_kernel<T, A, B, Tile>>(name, Tile::THREADS, Tile::SHARED));
        };
        add("matmul.split_k 128x192", Wide{});
        add("matmul.split_k 128x128", Square{});
        add("matmul.split_k 128x64", Narrow{});
        if constexpr (sizeof(T) == 2) add("matmul.split_k 128x64, in pairs", NarrowPair{});
        add("matmul.split_k 64x64", Small{});
    });
}

}  // namespace kl
