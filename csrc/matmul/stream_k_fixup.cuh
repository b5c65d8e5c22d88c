// Stream-K fix-up: blocks that share the K of a tile pass partial sums through global memory.
#pragma once

#include "matmul/persistent_loaders.cuh"

namespace kl {
namespace persistent {

// Global memory for partial sums. A block that shares a tile and does not begin it stores its partial sums in its own
// part of `sums`, and sets its flag. The 16 bytes of neighbouring threads lie side by side. The block that begins the
// tile adds them in the order of K.
struct Workspace {
    float* sums;
    uint32_t* flags;
};
constexpr int CONSUMER_THREADS = CONSUMERS * WARPGROUP;
constexpr int FIXUP_BARRIER = 4;  // past those of the warpgroups, which one may still need while the other adds

__device__ inline float4* partial_of(const Workspace& space, int block, int thread) {
    return reinterpret_cast<float4*>(space.sums) + int64_t{block} * (BM * BN / 4) + thread;
}
// Stores a block's partial sums and sets its flag. Called by all consumer threads.
__device__ inline void store_partial(const float (&sum)[BN / 2], const Workspace& space, int block, int thread) {
    float4* const place = partial_of(space, block, thread);
#pragma unroll
    for (int j = 0; j < BN / 8; ++j) {
        place[j * CONSUMER_THREADS] = make_float4(sum[j * 4], sum[j * 4 + 1], sum[j * 4 + 2], sum[j * 4 + 3]);
    }
    __threadfence();
    named_barrier_sync(FIXUP_BARRIER, CONSUMER_THREADS);
    if (thread == 0) store_release(space.flags + block, 1);
}
// Waits for the partial sums of `block` and adds them to `sum`. Called by all consumer threads.
__device__ inline void fixup(float (&sum)[BN / 2], const Workspace& space, int block, int thread) {
    if (thread == 0) {
        while (load_acquire(space.flags + block) == 0) {
        }
    }
    named_barrier_sync(FIXUP_BARRIER, CONSUMER_THREADS);
    const float4* const place = partial_of(space, block, thread);
#pragma unroll
    for (int j = 0; j < BN / 8; ++j) {
        const float4 v = __ldcg(place + j * CONSUMER_THREADS);
        sum[j * 4] += v.x, sum[j * 4 + 1] += v.y, sum[j * 4 + 2] += v.z, sum[j * 4 + 3] += v.w;
    }
}

}  // namespace persistent
}  // namespace kl
