// Thread-block clusters, as PTX has them (Hopper and later): who is in one, its barrier, and each other's shared memory.
#pragma once

#include "sm90.cuh"

namespace kl::cluster {

#if __CUDA_ARCH__ >= 900

__device__ inline uint32_t blocks() {
    uint32_t count;
    asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(count));
    return count;
}

__device__ inline uint32_t rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));  // anew each time, in place of a register
    return rank;
}

// Orders nothing but what fences do.
__device__ inline void arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
__device__ inline void wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// Four or eight bytes into the shared memory of the cluster's block of this rank, counted there at the barrier that
// stands where `barrier` does here. Nothing waits for it but who waits at that barrier: the cluster's own barrier would
// have every thread wait until what it stored to global memory has arrived as well.
template <typename V>
__device__ void send(V* shared, const V& value, uint64_t* barrier, uint32_t rank) {
    static_assert(sizeof(V) == 4 || sizeof(V) == 8);
    const uint32_t to = shared_address(shared), at = shared_address(barrier);
    if constexpr (sizeof(V) == 4) {
        asm volatile(
            "{\n.reg .b32 to, at;\nmapa.shared::cluster.u32 to, %0, %3;\nmapa.shared::cluster.u32 at, %1, %3;\n"
            "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [to], %2, [at];\n}" ::"r"(to),
            "r"(at), "r"(reinterpret_cast<const uint32_t&>(value)), "r"(rank)
            : "memory");
    } else {
        asm volatile(
            "{\n.reg .b32 to, at;\nmapa.shared::cluster.u32 to, %0, %3;\nmapa.shared::cluster.u32 at, %1, %3;\n"
            "st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [to], %2, [at];\n}" ::"r"(to),
            "r"(at), "l"(reinterpret_cast<const uint64_t&>(value)), "r"(rank)
            : "memory");
    }
}

#endif

}  // namespace kl::cluster
