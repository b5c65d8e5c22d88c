// matmul, eleventh step; the table of the climb stands in matmul.cuh.
//
//   split_k           where 128×256 tiles are few, smaller ones, or a cluster  the latency of the first and last bytes
//                     that shares the K of one
//
// A product of few 128×256 tiles leaves most SMs without work. Smaller tiles are more, but ask L2 for more bytes a product;
// or a cluster of 2, 4 or 8 blocks makes one tile, each from its part of K, and adds up through distributed shared memory:
// every block lays its sums in its own shared memory, and finishes its part of the columns from all of them. They are
// added in the order of K, whoever comes first, so that every run gives the same bits; and no workspace is needed in
// global memory. A count of cycles (`cycles`) says which of it all is best.
//
// Products so small take 5 µs, of which a third passes before the first bytes arrive: what stands before the first load is
// kept short, without a division.
//
// Few rows of A that lie along memory are copied to lie along k (realign.cu), under which the first stages of B arrive.
//
// Where there are wide tiles enough for every SM nothing is split: this step is `persistent`, or `stream_k` where the last
// turn would leave much of the GPU without work.

#include "../dependent.cuh"
#include "../divisor.cuh"
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
    static_assert(BM * BN * sizeof(float) <= STAGES * STAGE_BYTES, "the sums lie where the stages were");
};
using Wide = Tile<2, 192>;
using Square = Tile<2, 128>;
using Narrow = Tile<2, 64>;
using Small = Tile<1, 64>;
template <typename F>
void each_tile(F&& f) {
    f(Wide{}), f(Square{}), f(Narrow{}), f(Small{});
}
constexpr int MAX_SPLITS = 8;
constexpr int UNIT = 32;  // columns of a tile that a block finishes at once
constexpr uint16_t BOTH = 0b11;

// Which tile, and which part of K, a block makes. 2^log_blocks are a cluster: they share the K of a tile, or, a pair of
// them, the rows of A, and make two tiles beside each other. Tiles are numbered down the rows.
struct Places {
    Divisor tiles_m, tiles_n;  // pairs of columns, where rows are shared
    int log_blocks;
    bool share_rows;
    int a_panel, b_panel;  // bytes that TMA brings of a panel of each operand
    int ahead;             // stages of B to ask for before the first of A

    __device__ int rank() const { return blockIdx.x & ((1 << log_blocks) - 1); }
    __device__ int log_splits() const { return share_rows ? 0 : log_blocks; }
    __device__ void at(int* batch, int* m, int* n) const {
        const uint32_t tile = blockIdx.x >> log_blocks, column = tiles_m.quotient(tile), b = tiles_n.quotient(column);
        *batch = b, *m = tile - column * tiles_m.divisor, *n = column - b * tiles_n.divisor;
        if (share_rows) *n = *n * CLUSTER + rank();
    }
};

template <typename T, Major A, Major B, typename Tile>
__global__ void __launch_bounds__(Tile::THREADS, 1)
    matmul_split_k_kernel(T* c, const __grid_constant__ TmaOperands from, Tiled p,
                          const __grid_constant__ Places places) {
    constexpr int BM = Tile::BM, BN = Tile::BN, STAGES = Tile::STAGES, CONSUMERS = Tile::CONSUMERS;
    constexpr int A_BYTES = Tile::A_BYTES, STAGE_BYTES = Tile::STAGE_BYTES;
#if KL_SM90A
    const uint32_t tiles = aligned_shared(), full = tiles + STAGES * STAGE_BYTES, empty = full + STAGES * 8;
    if (threadIdx.x == 0) {
        tma_prefetch(from.a);
        tma_prefetch(from.b);
        for (int s = 0; s < STAGES; ++s) {
            mbarrier_init(full + s * 8, 1);
            mbarrier_init(empty + s * 8, CONSUMERS * WARPGROUP / WARP * (places.share_rows ? CLUSTER : 1));
        }
        mbarrier_init_fence();
    }
    int batch, tile_m, tile_n;
    places.at(&batch, &tile_m, &tile_n);
    const bool share_rows = places.share_rows;
    const int log_splits = places.log_splits(), splits = 1 << log_splits;
    const int m0 = tile_m * BM, n0 = tile_n * BN, rank = places.rank(), part = share_rows ? 0 : rank;
    const int all = static_cast<int>(ceil_div(p.K, BLOCK_K<T>));
    const int begin = all * part >> log_splits, end = all * (part + 1) >> log_splits;
    share_rows ? cluster_sync() : __syncthreads();

    const int warp = warp_index(), group = warp / (WARPGROUP / WARP);
    Ring<STAGES> at;
    if (group == 0) {
        if constexpr (CONSUMERS > 1) registers_decrease<40>();
        if (warp == 0 && elect_one()) {
            // What lies outside is not asked for, whatever rows and columns it would be of: they are not stored.
            const int a_panels = min(BM, p.M - m0 + PANEL_X - 1) / PANEL_X;
            const int b_panels = min(BN, p.N - n0 + PANEL_X - 1) / PANEL_X;
            const int bytes = a_panels * places.a_panel + b_panels * places.b_panel;
            Ring<STAGES> of_b;
            for (int i = begin, asked = begin; i < end; ++i, at.next()) {
                const int until = min(end, i == begin ? begin + places.ahead : i + 1);
                for (; asked < until; ++asked, of_b.next()) {
                    const uint32_t stage = tiles + of_b.stage * STAGE_BYTES, barrier = full + of_b.stage * 8;
                    mbarrier_wait(empty + of_b.stage * 8, of_b.phase ^ 1);
                    mbarrier_arrive_expect(barrier, bytes);
                    load_tile<B, BN>(stage + A_BYTES, from.b, barrier, n0, asked * BLOCK_K<T>, batch * p.b_step,
                                     b_panels);
                }
                if (i == begin) wait_for_previous();  // for A, where that is a copy
                const uint32_t stage = tiles + at.stage * STAGE_BYTES, barrier = full + at.stage * 8;
                if (!share_rows) {
                    load_tile<A, BM>(stage, from.a, barrier, m0, i * BLOCK_K<T>, batch * p.a_step, a_panels);
                } else if (rank < a_panels) {  // the other panel comes from the other block
                    load_tile_multicast<A, PANEL_X>(stage + rank * PANEL_BYTES, from.a, barrier, BOTH,
                                                    m0 + rank * PANEL_X, i * BLOCK_K<T>, batch * p.a_step);
                }
            }
        }
        __syncwarp();
        if (splits > 1) cluster_sync();
        if (splits > 1 || share_rows) cluster_leave();
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
            if (i > begin && share_rows && lane < CLUSTER) mbarrier_arrive_at(empty + before * 8, lane);
            if (i > begin && !share_rows && lane == 0) mbarrier_arrive(empty + before * 8);
            before = at.stage;
        }
        wgmma_wait<0>();
        wgmma_pin(sum);
        c += batch * p.c_batch;
        if (splits == 1) {
            if (share_rows) cluster_arrive_relaxed();
            store_outputs<T, BN>(sum, c, p.M, p.N, m0 + half * PANEL_X, n0);
            __syncwarp();
            if (share_rows) cluster_wait();  // shared memory stays until the other block writes and arrives no more
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
        for (int unit = rank; unit < BN / UNIT; unit += splits) {
            float total[UNIT / 2] = {};
            for (int r = 0; r < splits; r += 2) {
                float4 part[2][UNIT / 8];  // all under way at once: another block's memory is far
#pragma unroll
                for (int i = 0; i < UNIT / 4; ++i) {
                    const int j = i % (UNIT / 8);
                    part[i / (UNIT / 8)][j] =
                        load_cluster16(cluster_address(place(unit * (UNIT / 8) + j), r + i / (UNIT / 8)));
                }
#pragma unroll
                for (int i = 0; i < UNIT / 4; ++i) {
                    const float4 x = part[i / (UNIT / 8)][i % (UNIT / 8)];
                    float* const to = total + i % (UNIT / 8) * 4;
                    to[0] += x.x, to[1] += x.y, to[2] += x.z, to[3] += x.w;
                }
            }
            store_outputs<T, UNIT>(total, c, p.M, p.N, m0 + half * PANEL_X, n0 + unit * UNIT);
        }
        __syncwarp();
        cluster_leave();  // shared memory stays until the other blocks have read it
    }
#endif
}

// A shape of tiles, and how many blocks share the K of one, or a pair its rows.
struct Plan {
    int rows = 0, columns = 0, log_blocks = 0;
    bool share_rows = false;
    int64_t cycles = std::numeric_limits<int64_t>::max();
};

// About how many cycles a product takes: an SM multiplies, and its stages but those that are asked for at the beginning
// wait for L2; all wait for memory, under which the most of the rest is hidden. The constants (to begin; multiply-adds and
// bytes a cycle; to meet; outputs a cycle) are fitted to the times of ten products in a hundred ways on an H200, which they
// tell to a tenth.
constexpr int64_t BEGIN = 3000, MULTIPLIED = 2000, FROM_L2 = 55, FROM_MEMORY = 1900, MEET = 6500, PAIR = 2000,
                  STORED = 5;

int64_t cycles(const Tiled& p, int64_t k_tiles, int64_t blocks) {
    const int64_t rows = (p.a_step ? p.batches : 1) * int64_t{p.M}, columns = (p.b_step ? p.batches : 1) * int64_t{p.N};
    const int64_t memory = BEGIN + (rows + columns) * k_tiles * SWIZZLE_ROW / FROM_MEMORY;
    return std::max(blocks, memory) + std::min(blocks, memory) * 3 / 8;
}

template <typename Tile>
int64_t split_cycles(const Tiled& p, int64_t k_tiles, int splits, bool share_rows, int blocks_at_once) {
    constexpr int64_t MULTIPLY = Tile::BM * Tile::BN * 64 / MULTIPLIED;
    const int64_t load = (Tile::STAGE_BYTES - (share_rows ? Tile::A_BYTES / 2 : 0)) / FROM_L2;
    const int64_t tiles = ceil_div(p.M, Tile::BM) * ceil_div(p.N, Tile::BN) * p.batches;
    const int64_t turns = ceil_div(tiles * splits, blocks_at_once), steps = ceil_div(k_tiles, splits);
    const int64_t waiting = std::max<int64_t>(0, steps - Tile::STAGES) * std::max<int64_t>(0, load - MULTIPLY);
    const int64_t end = Tile::BM * Tile::BN / STORED * (p.N % 8 == 0 ? 1 : 4);  // store_outputs
    const int64_t meet = splits > 1 ? MEET : share_rows ? PAIR : 0;
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
    for (int log_splits = 0; 1 << log_splits <= std::min<int64_t>(MAX_SPLITS, k_tiles); ++log_splits) {
        const int splits = 1 << log_splits;
        // Not every SM, of clusters: one lies within a group of SMs.
        const int at_once = splits == 1
                                ? multiprocessors(on.device)
                                : splits * resident.clusters(kernel, dim3(Tile::THREADS), splits, Tile::SHARED, on);
        const int64_t count = split_cycles<Tile>(p, k_tiles, splits, false, at_once);
        if (count < best.cycles) best = {Tile::BM, Tile::BN, log_splits, false, count};
    }
    if (Tile::CONSUMERS < CLUSTER || p.M <= PANEL_X || ceil_div(p.N, Tile::BN) % CLUSTER != 0) return;
    const int at_once = CLUSTER * resident.clusters(kernel, dim3(Tile::THREADS), CLUSTER, Tile::SHARED, on);
    const int64_t count = split_cycles<Tile>(p, k_tiles, 1, true, at_once);
    if (count < best.cycles) best = {Tile::BM, Tile::BN, 1, true, count};
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
void launch_split(const HopperCall& call, const Plan& plan, const Launch& on) {
    static DeviceSet asked;
    const Tiled& p = call.tiled;
    const TileOrder tiles = tile_order(p, Tile::BM, Tile::BN);
    const TmaTensor a = low<A>(call.a), b = low<B>(call.b);
    const int columns = plan.share_rows ? tiles.tiles_n / CLUSTER : tiles.tiles_n, cluster = 1 << plan.log_blocks;
    Places places{Divisor(tiles.tiles_m), Divisor(columns), plan.log_blocks, plan.share_rows};
    places.a_panel = a.box[1] * SWIZZLE_ROW, places.b_panel = b.box[1] * SWIZZLE_ROW;
    places.ahead = on.early ? Tile::STAGES : 1;
    const int blocks = tile_count(tiles, p) * (plan.share_rows ? 1 : cluster);
    launch_hopper(matmul_split_k_kernel<T, A, B, Tile>, "matmul.split_k", blocks, cluster, Tile::THREADS, Tile::SHARED,
                  on, asked, static_cast<T*>(call.output.data_ptr()), TmaOperands{tensor_map(a), tensor_map(b)}, p,
                  places);
}

}  // namespace

Tensor matmul_split_k(const Tensor& input, const Tensor& other, bool allow_tf32) {
    const ScalarType dtype = input.scalar_type();
    return run_hopper(input, other, allow_tf32, "split_k", [&](HopperCall call, Launch on) {
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
                consider<decltype(tile), T, A, B>(plan, call.tiled, k_tiles, on);
            };
            const auto launch_tile = [&](auto tile) {
                using Tile = decltype(tile);
                if (plan.rows != Tile::BM || plan.columns != Tile::BN) return;
                launch_split<Tile, T, A, B>(call, plan, on);
            };
            each_tile(consider_tile);
            if (plan.rows == 0) return launch_persistent(call, dtype, on, share);
            on.early = copy.has_value();
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
            facts.push_back(
                kernel_facts<matmul_split_k_kernel<T, Major::K, B, Tile>>(name, Tile::THREADS, Tile::SHARED));
        };
        add("matmul.split_k 128x192", Wide{});
        add("matmul.split_k 128x128", Square{});
        add("matmul.split_k 128x64", Narrow{});
        add("matmul.split_k 64x64", Small{});
    });
}

}  // namespace kl
