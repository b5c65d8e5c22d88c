// A reduction over the threads that share a row in two halves, between which they have time for other work.
#pragma once

#include "reduce/rows.cuh"

namespace kl {

// Where the warps of a block that share a row leave their values for each other, and the blocks of a cluster theirs. In
// shared memory.
template <bool CLUSTER, typename V>
struct Letterbox {
    V of_warps[ROW_THREADS / WARP];
};
template <typename V>
struct Letterbox<true, V> {
    V of_warps[ROW_THREADS / WARP], of_blocks[MAX_CLUSTER];
    uint64_t arrived;  // an mbarrier, which counts what has come
};

// A barrier of those in the block who share the row; ALONE, that is all. The block's other rows need not wait. A
// kernel that names its barriers by a register is given all sixteen, of which an SM has enough for four blocks.
template <bool ALONE>
__device__ void row_barrier() {
    if constexpr (ALONE) {
        __syncthreads();
    } else {
        named_barrier_sync(1 + threadIdx.y, blockDim.x);
    }
}

// Sends this thread's `value` to the others of its row, and returns what receive_over_row is to be given. Two letterboxes
// take turns; before one is sent to again, the other has been received from.
template <bool ALONE, bool CLUSTER, typename V, typename Op>
__device__ V send_over_row(V value, Op op, Letterbox<CLUSTER, V>& letterbox) {
    const int warps = (ALONE && !CLUSTER ? ROW_THREADS : blockDim.x) / WARP, warp = threadIdx.x / WARP,
              lane = threadIdx.x % WARP;
    value = warps > 0 ? over_lanes(value, op, WARP) : over_lanes(value, op, static_cast<int>(blockDim.x));
    if (warps > 1) {
        if (lane == 0) letterbox.of_warps[threadIdx.y * warps + warp] = value;
        row_barrier<ALONE>();
    }
#if __CUDA_ARCH__ >= 900
    if constexpr (CLUSTER) {
        if (warp > 0) return value;
        const int blocks = static_cast<int>(cluster::blocks());
        value = over_lanes(letterbox.of_warps[lane & (warps - 1)], op, warps);
        if (lane == 0) mbarrier_arrive_expect(shared_address(&letterbox.arrived), blocks * sizeof(V));
        if (lane < blocks) {
            cluster::send(&letterbox.of_blocks[cluster::rank()], value, &letterbox.arrived, lane);
        }
    }
#endif
    return value;
}

// The result of `op`, associative and commutative, over the values that the threads of the row sent. `turn` says how often
// the letterbox has served.
template <bool ALONE, bool CLUSTER, typename V, typename Op>
__device__ V receive_over_row(V value, Op op, Letterbox<CLUSTER, V>& letterbox, int turn) {
    const int warps = (ALONE && !CLUSTER ? ROW_THREADS : blockDim.x) / WARP, lane = threadIdx.x % WARP;
    if constexpr (CLUSTER) {
#if __CUDA_ARCH__ >= 900
        const int blocks = static_cast<int>(cluster::blocks());
        mbarrier_wait(shared_address(&letterbox.arrived), turn % 2);
        value = over_lanes(letterbox.of_blocks[lane & (blocks - 1)], op, blocks);
#endif
    } else if (warps > 1) {
        value = over_lanes(letterbox.of_warps[threadIdx.y * warps + (lane & (warps - 1))], op, warps);
    }
    return value;
}

}  // namespace kl
