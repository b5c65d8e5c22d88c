// Programmatic dependent launch (Hopper and later): a kernel that is launched while the one before it in its stream still
// runs, and waits for that one's results itself. CUDA C++ Programming Guide, "Programmatic Dependent Launch".
#pragma once

#include "core/launch.cuh"

namespace kl {

// From when all blocks have said so, or ended, the next kernel may take the SMs that fall free.
__device__ inline void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the kernel before has ended and what it wrote is seen. To be called by every thread of a kernel that is
// launched early, before it touches memory: what comes after that one in the stream waits for nothing but it. Nor may it
// read by ld.global.nc, since what it reads may be written to while it waits.
__device__ inline void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// What a kernel that is launched early begins with. Its blocks come as those of the one before leave their SMs: a gap of a
// microsecond between two kernels is gone, and the next one may do the same.
__device__ inline void begin_early() {
    wait_for_previous();
    launch_dependents();
}

// Launches kernel(arguments…), which calls wait_for_previous, as one that may begin before what is in its stream has ended.
template <typename... Parameters, typename... Arguments>
void launch_early(void (*kernel)(Parameters...), dim3 grid, dim3 block, const Launch& launch, Arguments... arguments) {
    LaunchConfig(grid, block, 0, launch).early(has_hopper_code(kernel, launch.device)).run(kernel, arguments...);
}

}  // namespace kl
