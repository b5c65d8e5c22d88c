// Launches with attributes that <<<…>>> cannot express: thread-block clusters, programmatic dependent launch (PDL).
#pragma once

#include "core/common.cuh"

namespace kl {

struct LaunchConfig {
    cudaLaunchAttribute attributes[2]{};
    cudaLaunchConfig_t config{};

    LaunchConfig(dim3 grid, dim3 block, int shared_bytes, const Launch& launch) {
        config.gridDim = grid;
        config.blockDim = block;
        config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
        config.stream = launch.stream;
        config.attrs = attributes;
    }
    LaunchConfig(const LaunchConfig&) = delete;  // it points into itself

    /// Groups `blocks` consecutive blocks into a cluster.
    LaunchConfig& clusters_of(unsigned blocks) {
        if (blocks == 1) return *this;
        cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
        attribute.id = cudaLaunchAttributeClusterDimension;
        attribute.val.clusterDim = {blocks, 1, 1};
        return *this;
    }

    /// Launches with PDL if `yes`: the kernel itself waits for the kernel before it (core/pdl.cuh).
    LaunchConfig& pdl(bool yes) {
        if (!yes) return *this;
        cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
        attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attribute.val.programmaticStreamSerializationAllowed = 1;
        return *this;
    }

    template <typename... Parameters, typename... Arguments>
    void run(void (*kernel)(Parameters...), Arguments&&... arguments) const {
        KL_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...));
    }
};

}  // namespace kl
