// Programmatic dependent launch (PDL, Hopper and later). A kernel starts while the one before it in the stream still
// runs, and waits for its results itself. CUDA C++ Programming Guide, "Programmatic Dependent Launch".
//
//   without PDL   A ───────────────────┤  gap  ├─ B ─────
//   with PDL      A ─────┬─────────────┤
//                        │     B: starts ├───────
//                        │               └ griddepcontrol_wait returns: A's writes are visible
//                        └ griddepcontrol_launch_dependents: blocks of B take the SMs that A's blocks leave
#pragma once

#include "core/launch.cuh"

namespace kl {

/// Once all blocks have called this, or ended, the next kernel may start on free SMs.
__device__ inline void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Waits until the kernel before has ended and its writes are visible. Every thread of a kernel launched with PDL must
/// call it before it touches memory; matmul's `split_k` says why it may not. The next kernel in the stream waits for this
/// one only. Such a kernel must not use ld.global.nc: its operands may be written while it waits.
__device__ inline void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Prologue of a kernel launched with PDL. Its blocks start as those of the kernel before leave their SMs, which removes a
/// gap of a microsecond between the two. The next kernel may start in the same way.
__device__ inline void pdl_begin() {
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
}

/// Launches kernel(arguments…) with PDL. The kernel must call griddepcontrol_wait.
template <typename... Parameters, typename... Arguments>
void launch_pdl(void (*kernel)(Parameters...), dim3 grid, dim3 block, const Launch& launch, Arguments... arguments) {
    LaunchConfig(grid, block, 0, launch).pdl(has_hopper_code(kernel, launch.device)).run(kernel, arguments...);
}

}  // namespace kl
