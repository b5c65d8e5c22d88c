// matmul, rung 9 of 16: wgmma
// Idea      TMA puts both operands in shared memory, and wgmma reads them there. One thread issues the loads: no warp
//           computes addresses or swizzles, and operands never pass through registers.
// Predicts  Four instructions per stage and warpgroup, each 64x128 outputs over 32 bytes of k, instead of the ldmatrix
//           and mma.sync of every 16x8 square.
// Limit now All warps wait for each other at every stage.
// Next      `warp_specialized`: one warp loads, two warpgroups multiply.
//
// A block computes 128×128 outputs with two warpgroups of 64×128, three stages ahead. Two blocks fit on an SM: one
// multiplies while the other waits.

#include "matmul/hopper.cuh"

namespace kl {
namespace {

namespace wgmma {
constexpr int BM = 128, BN = 128, STAGES = 3, BLOCK_THREADS = 2 * WARPGROUP;
constexpr int A_BYTES = BM * SWIZZLE_ROW, B_BYTES = BN * SWIZZLE_ROW, STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int SHARED = STAGES * STAGE_BYTES + SWIZZLE_ATOM + STAGES * 8;  // tiles, what aligns them, barriers
}  // namespace wgmma

template <typename T, Major A, Major B>
__global__ void __launch_bounds__(wgmma::BLOCK_THREADS)
    matmul_wgmma_kernel(T* c, const __grid_constant__ TmaOperands from, Tiled p, TileRaster order) {
#if KL_SM90A
    using namespace wgmma;
    const uint32_t tiles = aligned_shared(), barriers = tiles + STAGES * STAGE_BYTES;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) mbarrier_init(barriers + s * 8, 1);
        mbarrier_init_fence();
        from.prefetch();
    }
    __syncthreads();

    int batch, tile_m, tile_n;
    order.at(blockIdx.x, &batch, &tile_m, &tile_n);
    const int m0 = tile_m * BM, n0 = tile_n * BN, k_tiles = static_cast<int>(ceil_div(p.K, BLOCK_K<T>));
    const auto load = [&](int i) {  // by one thread
        const uint32_t stage = tiles + i % STAGES * STAGE_BYTES, barrier = barriers + i % STAGES * 8;
        mbarrier_arrive_expect_tx(barrier, STAGE_BYTES);
        load_tile<A, BM>(stage, from.a, barrier, m0, i * BLOCK_K<T>, batch * p.a_step);
        load_tile<B, BN>(stage + A_BYTES, from.b, barrier, n0, i * BLOCK_K<T>, batch * p.b_step);
    };
    if (threadIdx.x == 0) {
        for (int i = 0; i < min(STAGES, k_tiles); ++i) load(i);
    }

    const int group = warp_index() / (WARPGROUP / WARP);
    float sum[BN / 2];
    for (int i = 0; i < k_tiles; ++i) {
        const uint32_t stage = tiles + i % STAGES * STAGE_BYTES;
        mbarrier_wait(barriers + i % STAGES * 8, i / STAGES % 2);
        multiply_stage<T, A, B, BN>(sum, stage + group * PANEL_BYTES, stage + A_BYTES, i > 0);
        wgmma_wait<0>();
        __syncthreads();  // both warpgroups have read the stage, which may be filled anew
        if (threadIdx.x == 0 && i + STAGES < k_tiles) load(i + STAGES);
    }
    wgmma_pin(sum);
    store_outputs<T, BN>(sum, c + batch * p.c_batch, p, m0 + group * PANEL_X, n0);
#endif
}

}  // namespace

Tensor matmul_wgmma(const Tensor& input, const Tensor& other, bool allow_tf32) {
    using namespace wgmma;
    const ScalarType dtype = input.scalar_type();
    return run_hopper(input, other, allow_tf32, "wgmma", [&](const HopperCall& call, const Launch& on) {
        const Tiled& p = call.tiled;
        const TileRaster order = tile_order(p, BM, BN);
        const int blocks = tile_count(order, p);
        dispatch_hopper(call, dtype, [&](auto zero, auto a_major, auto b_major) {
            using T = decltype(zero);
            static DeviceSet asked;
            launch_hopper(matmul_wgmma_kernel<T, a_major(), b_major()>, "matmul.wgmma",
                          {blocks, 1, BLOCK_THREADS, SHARED}, on, asked, static_cast<T*>(call.c), call.operands(), p,
                          order);
        });
    });
}

void matmul_wgmma_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    using namespace wgmma;
    dispatch(dtype, "matmul", [&](auto zero) {
        using T = decltype(zero);
        constexpr Major B = sizeof(T) == 2 ? Major::MN : Major::K;
        attributes.push_back(
            kernel_attributes<matmul_wgmma_kernel<T, Major::K, B>>("matmul.wgmma", BLOCK_THREADS, SHARED));
    });
}

}  // namespace kl
