// layer_norm, rung 5 of 6: cluster
// rms_norm, add_rms_norm, rung 5 of 5: cluster
// Idea      A thread-block cluster shares a row that outgrows one block. Each block keeps its part in registers; the
//           blocks exchange their partial statistics once, through distributed shared memory. The row code is
//           registers.cuh's.
// Predicts  2·N·sizeof(T) bytes per row, as `registers`, for rows of up to 16 blocks.
// Limit now Memory bandwidth; weight and bias come from the L2 again for every row.
// Next      `persistent_cluster` (layer_norm): clusters loop over rows and keep weight and bias in shared memory.
// Backward  backward.cuh, shared with `registers`.
#pragma once

#include "norm/registers.cuh"

namespace kl {

template <class Op, typename T, int V, bool VECTORIZED>
__global__ void __launch_bounds__(ROW_THREADS, BLOCKS_AN_SM<VECTORIZED>)
    norm_cluster_kernel(__grid_constant__ const NormForward<T> p) {
    norm_registers<T, Op::IS_LAYERNORM, Op::HAS_RESIDUAL, V, VECTORIZED, true>(p);
}

// ---- host ----------------------------------------------------------------------------------------------------------

template <class Op, typename T>
void launch_cluster(const NormForward<T>& p, bool vectorized, const Launch& launch) {
    const int64_t vectors = ceil_div(p.length, Vec<T>::size);
    check_takes(vectors <= MAX_CLUSTER_CHUNKS, Op::NAME, p.length);
    // Two at least, also for a row that one block holds: DSMEM exists in a launch of clusters alone.
    const unsigned blocks =
        std::max(2u, cluster_blocks(vectors, int64_t{ROW_THREADS} * (vectorized ? LONG_ROW_VECTORS<Op> : ROW_VECTORS)));
    const auto kernel = vectorized ? norm_cluster_kernel<Op, T, LONG_ROW_VECTORS<Op>, true>
                                   : norm_cluster_kernel<Op, T, ROW_VECTORS, false>;
    allow_clusters(kernel, blocks);
    KL_CHECK(has_hopper_code(kernel, launch.device), NO_CLUSTERS);
    // Without PDL: its microsecond does not show here, and the kernel may then read parameters through ld.global.nc.
    LaunchConfig(dim3(grid_size(p.count * blocks)), dim3(ROW_THREADS), 0, launch).clusters_of(blocks).run(kernel, p);
}

}  // namespace kl
