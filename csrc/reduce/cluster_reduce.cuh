// A reduction over the threads of a row in two halves, arrive and wait, so that other work fits in between. rows.cuh has
// the same in one call. Here one warp per block merges the block's partials before it sends them to the other blocks:
//
//   reduce_arrive   lanes → of_warps[w] → row_barrier → warp 0 of each block merges → of_blocks[b] of every block
//   …               loads or stores of other rows
//   reduce_wait     every warp waits at its block's mbarrier, then merges of_blocks
#pragma once

#include "reduce/rows.cuh"

namespace kl {

// Shared-memory scratch: one partial per warp of a block, and one per block of a cluster.
template <bool CLUSTER, typename V>
struct ClusterReduceSmem {
    V of_warps[ROW_THREADS / WARP];
};
template <typename V>
struct ClusterReduceSmem<true, V> {
    V of_warps[ROW_THREADS / WARP], of_blocks[MAX_CLUSTER];
    uint64_t arrived;  // mbarrier that counts the bytes received
};

// Barrier of the threads of a block that share a row; the block's other rows do not wait. A kernel whose barrier number is
// in a register reserves all sixteen named barriers. An SM has enough for four such blocks.
template <bool ONE_ROW_PER_CTA>
__device__ void row_barrier() {
    if constexpr (ONE_ROW_PER_CTA) {
        __syncthreads();
    } else {
        named_barrier_sync(1 + threadIdx.y, blockDim.x);
    }
}

/// Publishes this thread's `value` to its row and returns the value to pass to reduce_wait. Callers alternate between two
/// scratch buffers: before one is used again, reduce_wait on the other has returned.
template <bool ONE_ROW_PER_CTA, bool CLUSTER, typename V, typename Op>
__device__ V reduce_arrive(V value, Op op, ClusterReduceSmem<CLUSTER, V>& reduce_smem) {
    const int warps = (ONE_ROW_PER_CTA && !CLUSTER ? ROW_THREADS : blockDim.x) / WARP, warp = threadIdx.x / WARP,
              lane = threadIdx.x % WARP;
    value = warps > 0 ? over_lanes(value, op, WARP) : over_lanes(value, op, static_cast<int>(blockDim.x));
    if (warps > 1) {
        if (lane == 0) reduce_smem.of_warps[threadIdx.y * warps + warp] = value;
        row_barrier<ONE_ROW_PER_CTA>();
    }
#if __CUDA_ARCH__ >= 900
    if constexpr (CLUSTER) {
        if (warp > 0) return value;
        const int blocks = static_cast<int>(cluster::blocks());
        value = over_lanes(reduce_smem.of_warps[lane & (warps - 1)], op, warps);
        if (lane == 0) mbarrier_arrive_expect_tx(shared_address(&reduce_smem.arrived), blocks * sizeof(V));
        if (lane < blocks) {
            cluster::send(&reduce_smem.of_blocks[cluster_rank()], value, &reduce_smem.arrived, lane);
        }
    }
#endif
    return value;
}

/// Returns the result of `op`, associative and commutative, over the values of the row's threads. `iteration` is how
/// often `reduce_smem` has been used before.
template <bool ONE_ROW_PER_CTA, bool CLUSTER, typename V, typename Op>
__device__ V reduce_wait(V value, Op op, ClusterReduceSmem<CLUSTER, V>& reduce_smem, int iteration) {
    const int warps = (ONE_ROW_PER_CTA && !CLUSTER ? ROW_THREADS : blockDim.x) / WARP, lane = threadIdx.x % WARP;
    if constexpr (CLUSTER) {
#if __CUDA_ARCH__ >= 900
        const int blocks = static_cast<int>(cluster::blocks());
        mbarrier_wait(shared_address(&reduce_smem.arrived), iteration % 2);
        value = over_lanes(reduce_smem.of_blocks[lane & (blocks - 1)], op, blocks);
#endif
    } else if (warps > 1) {
        value = over_lanes(reduce_smem.of_warps[threadIdx.y * warps + (lane & (warps - 1))], op, warps);
    }
    return value;
}

}  // namespace kl
