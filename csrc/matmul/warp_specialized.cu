// matmul, rung 11 of 16: warp_specialized
// Idea      A producer warp loads, two consumer warpgroups multiply. They meet at two barriers per stage: `full` (the
//           bytes have arrived) and `empty` (every consumer warp has read them). Neither waits for more than it needs.
// Predicts  Tiles of 128x256 instead of 128x128: bytes from the L2 per output fall from 1/64 to 3/256 of K, by 1/4.
// Limit now Each block reads from the L2 for itself.
// Next      `cluster`: two blocks share what both read.
//
// A consumer warpgroup holds 64×256 sums, 128 registers per thread. It takes them from the producer warpgroup, which
// needs few (setmaxnreg).

#include "matmul/hopper.cuh"

namespace kl {
namespace {

namespace warp_specialized {
constexpr int BM = 128, BN = 256, STAGES = 4, CONSUMERS = 2, BLOCK_THREADS = (1 + CONSUMERS) * WARPGROUP;
constexpr int A_BYTES = BM * SWIZZLE_ROW, B_BYTES = BN * SWIZZLE_ROW, STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int SHARED = STAGES * STAGE_BYTES + SWIZZLE_ATOM + 2 * STAGES * 8;
}  // namespace warp_specialized

template <typename T, Major A, Major B>
__global__ void __launch_bounds__(warp_specialized::BLOCK_THREADS, 1)
    matmul_warp_specialized_kernel(T* c, const __grid_constant__ TmaOperands from, Tiled p, TileRaster order) {
#if KL_SM90A
    using namespace warp_specialized;
    const uint32_t tiles = aligned_shared(), full = tiles + STAGES * STAGE_BYTES, empty = full + STAGES * 8;
    if (threadIdx.x == 0) {
        PipelineState<STAGES>::init(full, empty, 1, CONSUMERS * WARPGROUP / WARP);
        mbarrier_init_fence();
        from.prefetch();
    }
    __syncthreads();

    int batch, tile_m, tile_n;
    order.at(blockIdx.x, &batch, &tile_m, &tile_n);
    const int m0 = tile_m * BM, n0 = tile_n * BN, k_tiles = static_cast<int>(ceil_div(p.K, BLOCK_K<T>));
    const int warp = warp_index(), group = warp / (WARPGROUP / WARP);
    PipelineState<STAGES> at;
    if (group == 0) {
        registers_decrease<PRODUCER_REGISTERS>();
        if (warp == 0 && elect_one()) {
            for (int i = 0; i < k_tiles; ++i, at.advance()) {
                const uint32_t stage = tiles + at.stage * STAGE_BYTES, barrier = full + at.stage * 8;
                mbarrier_wait(empty + at.stage * 8, at.phase ^ 1);
                mbarrier_arrive_expect_tx(barrier, STAGE_BYTES);
                load_tile<A, BM>(stage, from.a, barrier, m0, i * BLOCK_K<T>, batch * p.a_step);
                load_tile<B, BN>(stage + A_BYTES, from.b, barrier, n0, i * BLOCK_K<T>, batch * p.b_step);
            }
        }
    } else {
        registers_increase<CONSUMER_REGISTERS>();
        const int half = group - 1;  // of the tile's rows
        float sum[BN / 2];
        int before = 0;
        for (int i = 0; i < k_tiles; ++i, at.advance()) {
            const uint32_t stage = tiles + at.stage * STAGE_BYTES;
            mbarrier_wait(full + at.stage * 8, at.phase);
            multiply_stage<T, A, B, BN>(sum, stage + half * PANEL_BYTES, stage + A_BYTES, i > 0);
            wgmma_wait<1>();  // these products go on while those of the stage before are done, and it is given back
            if (i > 0 && threadIdx.x % WARP == 0) mbarrier_arrive(empty + before * 8);
            before = at.stage;
        }
        wgmma_wait<0>();
        wgmma_pin(sum);
        store_outputs<T, BN>(sum, c + batch * p.c_batch, p, m0 + half * PANEL_X, n0);
    }
#endif
}

}  // namespace

Tensor matmul_warp_specialized(const Tensor& input, const Tensor& other, bool allow_tf32) {
    using namespace warp_specialized;
    const ScalarType dtype = input.scalar_type();
    return run_hopper(input, other, allow_tf32, "warp_specialized", [&](const HopperCall& call, const Launch& on) {
        const Tiled& p = call.tiled;
        const TileRaster order = tile_order(p, BM, BN);
        const int blocks = tile_count(order, p);
        dispatch_hopper(call, dtype, [&](auto zero, auto a_major, auto b_major) {
            using T = decltype(zero);
            static DeviceSet asked;
            launch_hopper(matmul_warp_specialized_kernel<T, a_major(), b_major()>, "matmul.warp_specialized",
                          {blocks, 1, BLOCK_THREADS, SHARED}, on, asked, static_cast<T*>(call.c), call.operands(), p,
                          order);
        });
    });
}

void matmul_warp_specialized_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    using namespace warp_specialized;
    dispatch(dtype, "matmul", [&](auto zero) {
        using T = decltype(zero);
        constexpr Major B = sizeof(T) == 2 ? Major::MN : Major::K;
        attributes.push_back(kernel_attributes<matmul_warp_specialized_kernel<T, Major::K, B>>(
            "matmul.warp_specialized", BLOCK_THREADS, SHARED));
    });
}

}  // namespace kl
