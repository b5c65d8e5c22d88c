// matmul, eleventh step; the table of the climb stands in matmul.cuh.
//
//   split_k           where tiles are few, a cluster shares the K of one     tiles that do not fill the last turn
//
// A product of few tiles and a long K leaves most SMs without work. Here a cluster of 2, 4 or 8 blocks makes one
// 128×256 tile, each from its part of K, and adds up through distributed shared memory: every block lays its sums in its own
// shared memory, and finishes its part of the columns from all of them. They are added in the order of K, whoever comes
// first, so that every run gives the same bits; and no workspace is needed in global memory.
//
// Where there are tiles enough for every SM nothing is split: this step is `persistent`, or `stream_k` where the last turn
// would leave much of the GPU without work.

#include "hopper.cuh"

namespace kl {
namespace {

constexpr int BM = 128, BN = 256, STAGES = 4, CONSUMERS = 2, THREADS = (1 + CONSUMERS) * WARPGROUP;
constexpr int A_BYTES = BM * SWIZZLE_ROW, B_BYTES = BN * SWIZZLE_ROW, STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int SHARED = STAGES * STAGE_BYTES + SWIZZLE_ATOM + 2 * STAGES * 8;
constexpr int MAX_SPLITS = 8;
static_assert(BM * BN * sizeof(float) <= STAGES * STAGE_BYTES, "the sums lie where the stages were");

template <typename T, Major A, Major B>
__global__ void __launch_bounds__(THREADS, 1)
    matmul_split_k_kernel(T* c, const __grid_constant__ TmaOperands from, Tiled p, TileOrder order, int splits) {
#if KL_SM90A
    const uint32_t tiles = aligned_shared(), full = tiles + STAGES * STAGE_BYTES, empty = full + STAGES * 8;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            mbarrier_init(full + s * 8, 1);
            mbarrier_init(empty + s * 8, CONSUMERS * WARPGROUP / WARP);
        }
        mbarrier_init_fence();
        tma_prefetch(from.a);
        tma_prefetch(from.b);
    }
    __syncthreads();

    int batch, tile_m, tile_n;
    order.at(blockIdx.x / splits, &batch, &tile_m, &tile_n);
    const int m0 = tile_m * BM, n0 = tile_n * BN, rank = static_cast<int>(cluster_rank());
    const int64_t all = ceil_div(p.K, BLOCK_K<T>);
    const int begin = static_cast<int>(all * rank / splits), end = static_cast<int>(all * (rank + 1) / splits);
    const int warp = warp_index(), group = warp / (WARPGROUP / WARP);
    Ring<STAGES> at;
    if (group == 0) {
        registers_decrease<40>();
        if (warp == 0 && elect_one()) {
            for (int i = begin; i < end; ++i, at.next()) {
                const uint32_t stage = tiles + at.stage * STAGE_BYTES, barrier = full + at.stage * 8;
                mbarrier_wait(empty + at.stage * 8, at.phase ^ 1);
                mbarrier_arrive_expect(barrier, STAGE_BYTES);
                load_tile<A, BM>(stage, from.a, barrier, m0, i * BLOCK_K<T>, batch * p.a_step);
                load_tile<B, BN>(stage + A_BYTES, from.b, barrier, n0, i * BLOCK_K<T>, batch * p.b_step);
            }
        }
        __syncwarp();
        cluster_sync();
        cluster_leave();
    } else {
        registers_increase<232>();
        const int half = group - 1, thread = threadIdx.x - WARPGROUP, lane = threadIdx.x % WARP;
        float sum[BN / 2];
        int before = 0;
        for (int i = begin; i < end; ++i, at.next()) {
            const uint32_t stage = tiles + at.stage * STAGE_BYTES;
            mbarrier_wait(full + at.stage * 8, at.phase);
            multiply_stage<T, A, B, BN>(sum, stage + half * PANEL_BYTES, stage + A_BYTES, i > begin);
            wgmma_wait<1>();
            if (i > begin && lane == 0) mbarrier_arrive(empty + before * 8);
            before = at.stage;
        }
        wgmma_wait<0>();
        wgmma_pin(sum);
        named_barrier_sync(1, CONSUMERS * WARPGROUP);  // both warpgroups have read the last stage: its place is free
        // Four sums of a thread, 8 columns of the tile, as 16 bytes beside those of the other threads.
        const auto place = [&](int j) { return tiles + (j * CONSUMERS * WARPGROUP + thread) * 16; };
#pragma unroll
        for (int j = 0; j < BN / 8; ++j) {
            store_shared16(place(j), make_uint4(__float_as_uint(sum[j * 4]), __float_as_uint(sum[j * 4 + 1]),
                                                __float_as_uint(sum[j * 4 + 2]), __float_as_uint(sum[j * 4 + 3])));
        }
        cluster_sync();
        const int m = m0 + half * PANEL_X + warp % 4 * 16 + lane / 4, columns = BN / 8 / splits;
        constexpr int AT_ONCE = BN / 8 / MAX_SPLITS;
#pragma unroll 1
        for (int j = rank * columns; j < (rank + 1) * columns; j += AT_ONCE) {
            float total[AT_ONCE][4] = {};
#pragma unroll 1
            for (int from_rank = 0; from_rank < splits; ++from_rank) {
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i) {
                    const float4 v = load_cluster16(cluster_address(place(j + i), from_rank));
                    total[i][0] += v.x, total[i][1] += v.y, total[i][2] += v.z, total[i][3] += v.w;
                }
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                store_eight_columns<T>(total[i], c + batch * p.c_batch, p.M, p.N, m, n0 + (j + i) * 8 + lane % 4 * 2);
            }
        }
        __syncwarp();
        cluster_leave();  // shared memory stays until the other blocks have read it
    }
#endif
}

// How many blocks share a tile: as many as there are SMs for, and at most one for each tile of K.
int splits_of(int tiles, int64_t k_tiles, int sms) {
    int splits = 1;
    while (splits < MAX_SPLITS && tiles * splits * 2 <= sms && splits * 2 <= k_tiles) splits *= 2;
    return splits;
}

// Whether a last turn of `persistent` costs more than sharing it does: on average so many stages for each pair of blocks
// as add up to about the time in which 128 KiB a block are laid down and added up.
bool worth_sharing(const Tiled& p, int64_t k_tiles, int sms) {
    constexpr int64_t STAGES_OF_SHARING = 16;
    const int pairs = tile_count(pair_order(p, BM, BN).tiles, p), workers = sms / CLUSTER;
    const int64_t idle = ceil_div(pairs, workers) * workers - pairs;
    return idle * k_tiles >= STAGES_OF_SHARING * workers;
}

}  // namespace

Tensor matmul_split_k(const Tensor& input, const Tensor& other, bool allow_tf32) {
    const ScalarType dtype = input.scalar_type();
    return run_hopper(input, other, allow_tf32, "split_k", [&](const HopperCall& call, const Launch& on) {
        const Tiled& p = call.tiled;
        const TileOrder order{static_cast<int>(ceil_div(p.M, BM)), static_cast<int>(ceil_div(p.N, BN)), 2048 / BM};
        const int tiles = tile_count(order, p);
        dispatch_hopper(call, dtype, [&](auto zero, auto a_major, auto b_major) {
            using T = decltype(zero);
            const int sms = multiprocessors(on.device);
            const int64_t k_tiles = ceil_div(p.K, BLOCK_K<T>);
            const int splits = splits_of(tiles, k_tiles, sms);
            if (splits == 1) return launch_persistent(call, dtype, on, worth_sharing(p, k_tiles, sms));
            static DeviceSet asked;
            launch_hopper(matmul_split_k_kernel<T, a_major(), b_major()>, "matmul.split_k", tiles * splits, splits,
                          THREADS, SHARED, on, asked, static_cast<T*>(call.output.data_ptr()), call.operands(), p,
                          order, splits);
        });
    });
}

void matmul_split_k_facts(std::vector<KernelFacts>& facts, ScalarType dtype) {
    dispatch(dtype, "matmul", [&](auto zero) {
        using T = decltype(zero);
        constexpr Major B = sizeof(T) == 2 ? Major::MN : Major::K;
        facts.push_back(kernel_facts<matmul_split_k_kernel<T, Major::K, B>>("matmul.split_k", THREADS, SHARED));
    });
}

}  // namespace kl
