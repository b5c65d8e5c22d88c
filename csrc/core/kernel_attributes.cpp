#include <cuda_runtime.h>

#include "core/ops.h"

namespace kl {

KernelAttributes kernel_attributes_of(const void* kernel, const char* type, const char* name, int threads,
                                      int64_t dynamic_shared) {
    cudaFuncAttributes queried{};
    KernelAttributes attributes{name, type, -1, -1, dynamic_shared, -1, threads, -1};
    if (cudaFuncGetAttributes(&queried, kernel) == cudaSuccess) {
        attributes.registers = queried.numRegs;
        attributes.static_shared = static_cast<int64_t>(queried.sharedSizeBytes);
        attributes.local = static_cast<int64_t>(queried.localSizeBytes);
        if (dynamic_shared > queried.maxDynamicSharedSizeBytes) {  // possible only where the kernel has asked for it
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(dynamic_shared));
        }
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&attributes.blocks_per_sm, kernel, threads,
                                                      static_cast<size_t>(dynamic_shared));
    }
    cudaGetLastError();  // without a GPU the query fails; nothing after it should see that
    return attributes;
}

}  // namespace kl
