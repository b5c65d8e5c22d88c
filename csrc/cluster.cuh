// Thread-block clusters, as PTX has them (Hopper and later): who is in one, its barrier, and each other's shared memory.
#pragma once

#include <cstdint>

namespace kl::cluster {

#if __CUDA_ARCH__ >= 900

__device__ inline uint32_t blocks() {
    uint32_t count;
    asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(count));
    return count;
}

__device__ inline uint32_t rank() {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// What a thread wrote before it arrives is seen by those of the cluster that have waited.
__device__ inline void arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ inline void wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
__device__ inline void sync() {
    arrive();
    wait();
}

// The same place in the shared memory of the cluster's block of this rank.
template <typename T>
__device__ T* in_block(T* shared, uint32_t rank) {
    T* there;
    asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(shared), "r"(rank));
    return there;
}

#endif

}  // namespace kl::cluster
