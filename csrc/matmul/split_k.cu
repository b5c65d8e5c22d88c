// matmul, rung 16 of 16: split_k
// Idea      A cluster of up to 8 blocks shares the K of one output tile. Each block multiplies its part of K; the
//           blocks add their partial sums through distributed shared memory.
// Predicts  With T tiles on S SMs, min(T · splits, S) SMs work instead of min(T, S): up to 8.0x for T <= S / 8.
// Limit now The latency of the first and last bytes; tiles that do not fill the last wave.
//
// Partial sums are added in the order of K, so every run gives the same bits, and no workspace in global memory is
// needed. The caller passes the tile and the number of splits: kernel_ladder/selection/matmul.py chooses them. With one
// split, smaller tiles than those of `persistent` still give more SMs work.
//
// A pair is a cluster of two tiles side by side. Each block fetches half of their rows of A, for both (multicast): the
// L2 delivers fewer bytes. Pairs pay where A lies along M; where it lies along K, two splits are faster.
//
// A product this small takes 5 us, of which a third passes before the first bytes arrive. So the prologue avoids
// integer division.
//
// Shared code (pad_operands.cu): an A of at most 32 rows along M is copied to lie along K. The first stages of B arrive
// during the copy. Operands that TMA cannot read are copied too, or read by `persistent`'s kernel with plain loads.

#include "matmul/split_k.cuh"

namespace kl {
namespace {

using namespace split_k;

template <typename T, Major A, Major B, typename Tile>
__global__ void __launch_bounds__(Tile::THREADS, 1)
    matmul_split_k_kernel(T* c, const __grid_constant__ TmaOperands from, Tiled p,
                          const __grid_constant__ SplitKScheduler scheduler) {
    multiply_part<T, A, B, Tile>(c, from, p, scheduler, SumsUnchanged{});
}

}  // namespace

void launch_split_k(HopperCall call, ScalarType dtype, const Launch& on, const SplitKPlan& asked) {
    const std::optional<Tensor> copy = transpose_small_a(&call, dtype, on);
    dispatch_hopper(call, dtype, [&](auto zero, auto a_major, auto b_major) {
        using T = decltype(zero);
        constexpr Major A = a_major(), B = b_major();
        check_splits("matmul", asked.splits, ceil_div(call.tiled.K, BLOCK_K<T>));
        SplitKPlan plan = asked;
        plan.pair = asked.pair && A == Major::MN;  // a copy of A may lie along K, where a pair has no kernel
        bool launched = false;
        const auto run = [&](auto tile) {
            using Tile = decltype(tile);
            if (plan.rows != Tile::BM || plan.columns != Tile::BN || plan.pair != Tile::PAIR) return;
            launch_tiles<matmul_split_k_kernel<T, A, B, Tile>, Tile, T, A, B>(
                "matmul.split_k", call, log2_of(plan.splits), copy.has_value(), on);
            launched = true;
        };
        each_tile(run);
        if constexpr (A == Major::MN) run(NarrowPair{});
        KL_CHECK(launched, "matmul: split_k has no tile of ", asked.rows, "x", asked.columns);
    });
}

Tensor matmul_split_k(const Tensor& input, const Tensor& other, bool allow_tf32, int64_t tile_m, int64_t tile_n,
                      int64_t splits, bool pair) {
    return run_hopper(input, other, allow_tf32, "split_k", [&](const HopperCall& call, const Launch& on) {
        launch_split_k(call, input.scalar_type(), on, {tile_m, tile_n, splits, pair});
    });
}

std::vector<int> matmul_split_k_blocks_at_once(int device) {
    constexpr auto kernel = matmul_split_k_kernel<bfloat16, Major::K, Major::K, Square>;
    int before = 0;
    KL_CUDA_CHECK(cudaGetDevice(&before));
    KL_CUDA_CHECK(cudaSetDevice(device));
    KL_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Square::SHARED));
    std::vector<int> blocks{multiprocessors(device)};
    for (unsigned size = 2; size <= MAX_SPLITS; size *= 2) {
        cudaLaunchAttribute cluster{};
        cluster.id = cudaLaunchAttributeClusterDimension;
        cluster.val.clusterDim = {size, 1, 1};
        cudaLaunchConfig_t config{};
        config.gridDim = dim3(size), config.blockDim = dim3(Square::THREADS);
        config.dynamicSmemBytes = Square::SHARED, config.attrs = &cluster, config.numAttrs = 1;
        int clusters = 0;
        KL_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config));
        KL_CHECK(clusters > 0, "a cluster of ", size, " blocks does not fit on this GPU");
        blocks.push_back(clusters * static_cast<int>(size));
    }
    KL_CUDA_CHECK(cudaSetDevice(before));
    return blocks;
}

void matmul_split_k_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    dispatch(dtype, "matmul", [&](auto zero) {
        using T = decltype(zero);
        constexpr Major B = sizeof(T) == 2 ? Major::MN : Major::K;
        const auto add = [&](const char* name, auto tile) {
            using Tile = decltype(tile);
            constexpr Major A = Tile::PAIR ? Major::MN : Major::K;
            attributes.push_back(
                kernel_attributes<matmul_split_k_kernel<T, A, B, Tile>>(name, Tile::THREADS, Tile::SHARED));
        };
        add("matmul.split_k 128x192", Wide{});
        add("matmul.split_k 128x128", Square{});
        add("matmul.split_k 128x64", Narrow{});
        if constexpr (sizeof(T) == 2) add("matmul.split_k 128x64, in pairs", NarrowPair{});
        add("matmul.split_k 64x64", Small{});
    });
}

}  // namespace kl
