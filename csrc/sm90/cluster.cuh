// Thread-block clusters (Hopper and later): size, rank, barrier and stores to distributed shared memory (DSMEM).
// Unlike cluster_arrive_relaxed and cluster_wait of sm90.cuh, the barrier instructions here lack `.aligned`: the threads of
// a warp may call them at different times.
#pragma once

#include "sm90/sm90.cuh"

namespace kl::cluster {

#if __CUDA_ARCH__ >= 900

__device__ inline uint32_t blocks() {
    uint32_t count;
    asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(count));
    return count;
}

/// log2 of the number of blocks, which is a power of two.
__device__ inline int log2_blocks() { return __popc(blocks() - 1); }

/// Arrives at the cluster barrier. Writes before it are visible after the wait only if a fence has published them.
__device__ inline void arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
/// Waits until all threads of the cluster have arrived.
__device__ inline void wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

/// Sends 4, 8 or 16 bytes to the shared memory of block `rank` of the cluster. `shared` and `barrier` are addresses in this
/// block; the data and the mbarrier that counts its bytes have the same addresses in that block.
///
///   block 0                          block `rank`
///   send(shared, v, barrier, rank)   shared ← v, barrier counts sizeof(v) bytes
///                                    mbarrier_wait(barrier): v is there
///
/// Only threads that wait at that mbarrier wait for the data. The cluster barrier would also wait for each thread's stores
/// to global memory.
template <typename V>
__device__ void send(uint32_t shared, const V& value, uint32_t barrier, uint32_t rank) {
    static_assert(sizeof(V) == 4 || sizeof(V) == 8 || sizeof(V) == 16);
    uint32_t to, at;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(shared), "r"(rank));
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(barrier), "r"(rank));
    if constexpr (sizeof(V) == 4) {
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
                     "r"(reinterpret_cast<const uint32_t&>(value)), "r"(at)
                     : "memory");
    } else if constexpr (sizeof(V) == 8) {
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(to),
                     "l"(reinterpret_cast<const uint64_t&>(value)), "r"(at)
                     : "memory");
    } else {
        const uint4& words = reinterpret_cast<const uint4&>(value);
        asm volatile(
            "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
            "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w), "r"(at)
            : "memory");
    }
}

template <typename V>
__device__ void send(V* shared, const V& value, uint64_t* barrier, uint32_t rank) {
    send(shared_address(shared), value, shared_address(barrier), rank);
}

#endif

}  // namespace kl::cluster
