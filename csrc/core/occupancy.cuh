// Launching thread-block clusters, and how many of them a GPU holds at once.
#pragma once

#include "core/launch.cuh"

namespace kl {

constexpr int PORTABLE_CLUSTER = 8;  // blocks of the largest portable cluster

/// Error message for cluster kernels, whose body is empty in older code.
constexpr const char* NO_CLUSTERS = "thread-block clusters need code of compute capability 9.0 or later for this GPU";

/// Permits clusters of more than the portable size. Must be called before such a launch or occupancy query.
template <typename Kernel>
void allow_clusters(Kernel* kernel, unsigned blocks) {
    if (blocks > PORTABLE_CLUSTER) {
        KL_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
    }
}

/// Number of clusters of a kernel (or of blocks, for a cluster of one) that are resident on the GPU at once. The driver is
/// queried once per device, cluster size and block size, from which shared memory follows. Each kernel has its own cache.
struct OccupancyCache {
    static constexpr int DEVICES = 16, SIZES = 5, BLOCKS = 6;
    std::atomic<int> known[DEVICES][SIZES][BLOCKS]{};

    template <typename Kernel>
    int clusters(Kernel* kernel, dim3 block, unsigned blocks, int shared_bytes, const Launch& launch) {
        const unsigned threads = block.x * block.y;
        int size = 0, warps = 0, found = 0;
        while (1u << size < blocks) ++size;
        while (WARP << warps < static_cast<int>(threads)) ++warps;
        std::atomic<int>* const slot = launch.device < DEVICES ? &known[launch.device][size][warps] : nullptr;
        if (slot != nullptr && (found = slot->load(std::memory_order_relaxed)) > 0) return found;
        if (blocks == 1) {
            KL_CUDA_CHECK(
                cudaOccupancyMaxActiveBlocksPerMultiprocessor(&found, kernel, static_cast<int>(threads), shared_bytes));
            found *= multiprocessors(launch.device);
        } else {
            allow_clusters(kernel, blocks);
            LaunchConfig launched(dim3(blocks), block, shared_bytes, launch);
            KL_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&found, kernel, &launched.clusters_of(blocks).config));
        }
        KL_CHECK(found > 0, "a cluster of ", blocks, " blocks does not fit on this GPU");
        if (slot != nullptr) slot->store(found, std::memory_order_relaxed);
        return found;
    }
};

}  // namespace kl
