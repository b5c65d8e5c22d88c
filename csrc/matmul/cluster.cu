// matmul, rung 12 of 16: cluster
// Idea      A cluster of two blocks shares what both read: each loads half of it and TMA multicasts it to both.
// Predicts  Bytes that a block reads from the L2 per stage: 16 + 32 / 2 = 32 KiB instead of 48.
// Limit now Tensor cores idle while a block starts and ends.
// Next      `persistent`: blocks stay and load the next tile under the epilogue.
//
// The cluster computes 256×256 outputs, one tile below the other, from the same columns of B. With few rows it computes
// 128×512 and shares A. Both blocks fill a stage, so the consumer warps of both must have left it: each tells both.

#include "matmul/hopper.cuh"

namespace kl {
namespace {

namespace cluster {
constexpr int BM = 128, BN = 256, STAGES = 4, CONSUMERS = 2, BLOCK_THREADS = (1 + CONSUMERS) * WARPGROUP;
constexpr int A_BYTES = BM * SWIZZLE_ROW, B_BYTES = BN * SWIZZLE_ROW, STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int SHARED = STAGES * STAGE_BYTES + SWIZZLE_ATOM + 2 * STAGES * 8;
}  // namespace cluster

template <typename T, Major A, Major B>
__global__ void __launch_bounds__(cluster::BLOCK_THREADS, 1)
    matmul_cluster_kernel(T* c, const __grid_constant__ TmaOperands from, Tiled p, ClusterRaster order) {
#if KL_SM90A
    using namespace cluster;
    const uint32_t tiles = aligned_shared(), full = tiles + STAGES * STAGE_BYTES, empty = full + STAGES * 8;
    if (threadIdx.x == 0) {
        PipelineState<STAGES>::init(full, empty, 1, CLUSTER * CONSUMERS * WARPGROUP / WARP);
        mbarrier_init_fence();
        from.prefetch();
    }
    cluster_sync();  // neither block writes into the other before its barriers are there

    int batch, m0, n0;
    order.at<BM, BN>(blockIdx.x / CLUSTER, cluster_rank(), &batch, &m0, &n0);
    const int k_tiles = static_cast<int>(ceil_div(p.K, BLOCK_K<T>));
    const int warp = warp_index(), group = warp / (WARPGROUP / WARP);
    PipelineState<STAGES> at;
    if (group == 0) {
        registers_decrease<PRODUCER_REGISTERS>();
        if (warp == 0 && elect_one()) {
            for (int i = 0; i < k_tiles; ++i, at.advance()) {
                const uint32_t stage = tiles + at.stage * STAGE_BYTES, barrier = full + at.stage * 8;
                mbarrier_wait(empty + at.stage * 8, at.phase ^ 1);
                mbarrier_arrive_expect_tx(barrier, STAGE_BYTES);  // what this block's TMA and the other's bring
                load_pair<A, B, BM, BN>(stage, from, barrier, order.below, m0, n0, i * BLOCK_K<T>, batch * p.a_step,
                                        batch * p.b_step);
            }
        }
        __syncwarp();
        cluster_sync_relaxed();
    } else {
        registers_increase<CONSUMER_REGISTERS>();
        const int half = group - 1;
        float sum[BN / 2];
        int before = 0;
        for (int i = 0; i < k_tiles; ++i, at.advance()) {
            const uint32_t stage = tiles + at.stage * STAGE_BYTES;
            mbarrier_wait(full + at.stage * 8, at.phase);
            multiply_stage<T, A, B, BN>(sum, stage + half * PANEL_BYTES, stage + A_BYTES, i > 0);
            wgmma_wait<1>();
            if (i > 0 && threadIdx.x % WARP < CLUSTER) mbarrier_arrive_at(empty + before * 8, threadIdx.x % WARP);
            before = at.stage;
        }
        wgmma_wait<0>();
        wgmma_pin(sum);
        cluster_arrive_relaxed();
        store_outputs<T, BN>(sum, c + batch * p.c_batch, p, m0 + half * PANEL_X, n0);
        __syncwarp();
        cluster_wait();  // shared memory stays until the other block writes and arrives no more
    }
#endif
}

}  // namespace

Tensor matmul_cluster(const Tensor& input, const Tensor& other, bool allow_tf32) {
    using namespace cluster;
    const ScalarType dtype = input.scalar_type();
    return run_hopper(input, other, allow_tf32, "cluster", [&](const HopperCall& call, const Launch& on) {
        const ClusterRaster order = pair_order(call.tiled, BM, BN);
        const int blocks = CLUSTER * tile_count(order.tiles, call.tiled);
        dispatch_hopper(call, dtype, [&](auto zero, auto a_major, auto b_major) {
            using T = decltype(zero);
            static DeviceSet asked;
            launch_hopper(matmul_cluster_kernel<T, a_major(), b_major()>, "matmul.cluster",
                          {blocks, CLUSTER, BLOCK_THREADS, SHARED}, on, asked, static_cast<T*>(call.c), call.operands(),
                          call.tiled, order);
        });
    });
}

void matmul_cluster_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    using namespace cluster;
    dispatch(dtype, "matmul", [&](auto zero) {
        using T = decltype(zero);
        constexpr Major B = sizeof(T) == 2 ? Major::MN : Major::K;
        attributes.push_back(
            kernel_attributes<matmul_cluster_kernel<T, Major::K, B>>("matmul.cluster", BLOCK_THREADS, SHARED));
    });
}

}  // namespace kl
