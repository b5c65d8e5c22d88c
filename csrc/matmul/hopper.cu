// Host code that the rungs on Hopper share.

#include "matmul/hopper.cuh"

#include "matmul/chunked_copy.h"

namespace kl {

namespace {

// Compile-time test: a raster visits every tile once. Sizes: a group that divides the rows, one that does not, one row,
// one column, fewer rows than a group, several batches.
constexpr bool visits_every_tile_once(TileRaster order, int batches) {
    bool seen[64] = {};
    const int tiles = order.per_batch() * batches;
    for (int i = 0; i < tiles; ++i) {
        int batch = 0, m = 0, n = 0;
        order.at(i, &batch, &m, &n);
        if (m < 0 || m >= order.tiles_m || n < 0 || n >= order.tiles_n || batch < 0 || batch >= batches) return false;
        bool& here = seen[(batch * order.tiles_m + m) * order.tiles_n + n];
        if (here) return false;
        here = true;
    }
    return true;
}
static_assert(visits_every_tile_once({8, 5, 4}, 1) && visits_every_tile_once({7, 5, 3}, 1) &&
              visits_every_tile_once({1, 9, 4}, 2) && visits_every_tile_once({9, 1, 4}, 3) &&
              visits_every_tile_once({3, 7, 16}, 2) && visits_every_tile_once({5, 4, 1}, 3));

// Compile-time test of stream-K: workers compute every k-tile of every tile once. Of a worker's work tiles only the
// first ends a tile that another begins, and only the last shared one leaves a tile to others. So no two workers wait
// for each other.
constexpr bool shares_everything_once(int tiles, int k_tiles, int workers) {
    int made[128] = {};
    const StreamKSchedule schedule{tiles, shared_tiles(tiles, k_tiles, workers), k_tiles, workers};
    for (int worker = 0; worker < workers; ++worker) {
        StreamKScheduler scheduler(schedule, worker);
        WorkTile work{};
        for (bool first = true, left = false; scheduler.next(&work); first = false) {
            if (work.begin >= work.end || work.end > k_tiles || work.tile >= tiles) return false;
            if ((work.begin > 0 && !first) || (left && work.tile < schedule.shared)) return false;
            left = work.end < k_tiles;
            for (int k = work.begin; k < work.end; ++k) made[work.tile * k_tiles + k] += 1;
        }
    }
    for (int i = 0; i < tiles * k_tiles; ++i) {
        if (made[i] != 1) return false;
    }
    return true;
}
static_assert(shares_everything_once(7, 5, 4) && shares_everything_once(8, 3, 4) && shares_everything_once(1, 9, 4) &&
              shares_everything_once(3, 2, 8) && shares_everything_once(13, 7, 5) && shares_everything_once(1, 1, 3));

// An operand as TMA reads it, memory along `inner`; batches in a third dimension.
TmaTensor described(ScalarType dtype, const void* data, int64_t inner, int64_t inner_stride, int64_t outer,
                    int64_t outer_stride, int64_t batches, int64_t batch_stride) {
    const int row = static_cast<int>(SWIZZLE_ROW / (dtype == ScalarType::Float ? sizeof(float) : sizeof(half)));
    const bool shared =
        batch_stride == 0;  // one matrix for all: TMA has no stride of zero, the kernel stays at batch 0
    return {dtype,
            3,
            data,
            {inner, outer, shared ? 1 : batches},
            {inner_stride, outer_stride, batch_stride},
            {row, PANEL_X, 1}};
}

}  // namespace

bool readable(ScalarType dtype, const void* data, int64_t X, int64_t stride_x, int64_t K, int64_t stride_k,
              int64_t batches, int64_t batch_stride, TmaTensor* tensor, Major* major) {
    *major = Major::K;
    *tensor = described(dtype, data, K, stride_k, X, stride_x, batches, batch_stride);
    if (tma_can_address(*tensor)) return true;
    if (dtype == ScalarType::Float) return false;
    *major = Major::MN;
    *tensor = described(dtype, data, X, stride_x, K, stride_k, batches, batch_stride);
    return tma_can_address(*tensor);
}

TileRaster tile_order(const Tiled& p, int BM, int BN) {
    return {static_cast<int>(ceil_div(p.M, BM)), static_cast<int>(ceil_div(p.N, BN)), 2048 / BM};
}

ClusterRaster pair_order(const Tiled& p, int BM, int BN) {
    const auto [tiles_m, tiles_n, rows] = tile_order(p, BM, BN);
    const bool below = tiles_m % CLUSTER == 0 || tiles_n % CLUSTER != 0;
    if (below) return {{static_cast<int>(ceil_div(tiles_m, CLUSTER)), tiles_n, rows / CLUSTER}, true};
    return {{tiles_m, static_cast<int>(ceil_div(tiles_n, CLUSTER)), rows}, false};
}

int tile_count(const TileRaster& order, const Tiled& p) {
    const int64_t count = int64_t{order.tiles_m} * order.tiles_n * p.batches;
    KL_CHECK(count * 2 <= std::numeric_limits<int32_t>::max(), "matmul: too many tiles for 32 bits: ", count);
    return static_cast<int>(count);
}

bool worth_sharing(const Tiled& p, int64_t k_tiles, int64_t workers) {
    const int64_t pairs = tile_count(pair_order(p, PART_TILE_M, PART_TILE_N).tiles, p);
    return shared_stages(pairs, k_tiles, workers) < ceil_div(pairs, workers) * k_tiles;
}

bool sharing_pays(const Tiled& p, int64_t k_tiles, int64_t workers) {
    constexpr int64_t FIXUP_STAGES = 19, NEAR_STAGES = 128;  // 20,000 cycles of 1,048 a stage
    const int64_t pairs = tile_count(pair_order(p, PART_TILE_M, PART_TILE_N).tiles, p);
    if (pairs < workers) return false;
    const int64_t unshared = ceil_div(pairs, workers) * k_tiles;
    const int64_t saved = unshared - ceil_div(pairs * k_tiles, workers);
    const int shared = shared_tiles(static_cast<int>(pairs), static_cast<int>(k_tiles), static_cast<int>(workers));
    const int64_t far = std::max<int64_t>(0, shared * k_tiles / workers - NEAR_STAGES);
    return saved > FIXUP_STAGES + far * 4 / 7 + unshared / 32;  // of a small gain the model is not sure
}

TmaTensor output_tensor(const HopperCall& call) {
    const Product& p = call.product;
    return {call.output.scalar_type(), 3, call.c, {p.N, p.M, p.batches}, {1, call.tiled.c_row, call.tiled.c_batch},
            {PANEL_X, PANEL_X, 1}};
}

HopperCall prepare_hopper(const Call& prepared, const Tensor& input, const Tensor& other, bool allow_tf32,
                          const char* op, const char* step) {
    const auto& [p, output] = prepared;
    const ScalarType dtype = input.scalar_type();
    KL_CHECK(dtype != ScalarType::Float || allow_tf32, op,
             ": float32 on tensor cores needs tf32, which is not allowed");
    HopperCall call{p, output};
    call.a_data = input.data_ptr();
    call.b_data = other.data_ptr();
    call.c = output.data_ptr();
    KL_CHECK(is_hopper(input.get_device_index()), op, ": ", step, " needs a GPU of compute capability 9.0");
    if (p.batches * p.M * p.N == 0) return call;
    if (p.K == 0) {
        const Launch on(input);
        const int64_t size = p.batches * p.M * p.N * (dtype == ScalarType::Float ? 4 : 2);
        KL_CUDA_CHECK(cudaMemsetAsync(output.data_ptr(), 0, static_cast<size_t>(size), on.stream));
        return call;
    }
    KL_CHECK(std::max({p.M, p.N, p.K, p.batches}) <= TMA_LARGEST_SIZE, op, ": sizes must be below 2^31");
    call.tiled.c_row = p.N;
    call.tiled.c_batch = p.M * p.N;
    describe(&call, dtype);
    return call;
}

void describe(HopperCall* call, ScalarType dtype) {
    const Product& p = call->product;
    const int64_t a_batch = p.batch_dims > 0 ? p.a_batch[0] : 0, b_batch = p.batch_dims > 0 ? p.b_batch[0] : 0;
    call->tiled = {static_cast<int>(p.M), static_cast<int>(p.N), static_cast<int>(p.K), static_cast<int>(p.batches),
                   a_batch != 0,          b_batch != 0,          call->tiled.c_batch,   call->tiled.c_row};
    // TMA walks one dimension of batches.
    call->a_by_tma = p.batch_dims <= 1 && readable(dtype, call->a_data, p.M, p.a_m, p.K, p.a_k, p.batches, a_batch,
                                                   &call->a, &call->a_major);
    call->b_by_tma = p.batch_dims <= 1 && readable(dtype, call->b_data, p.N, p.b_n, p.K, p.b_k, p.batches, b_batch,
                                                   &call->b, &call->b_major);
}

}  // namespace kl
