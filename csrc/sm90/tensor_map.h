// The host's side of TMA: descriptions of tensors (CUtensorMap), made once and kept. For kernels with sm90.cuh.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "core/tensor.h"

namespace kl {

constexpr int TMA_DIMS = 5;

// A tensor of up to five dimensions, innermost first, and the box of it that one TMA instruction moves. Sizes count
// elements, strides too; strides[0] is taken to be 1, and the stride of a dimension of one element is of no account.
struct TmaTensor {
    ScalarType dtype;  // Float: TMA rounds to tf32 on its way, as wgmma, which cuts off, would not; save where `exact`
    int dims;
    const void* data;
    int64_t sizes[TMA_DIMS];
    int64_t strides[TMA_DIMS];
    int box[TMA_DIMS];   // at most 256 each; box[0] at most 128 bytes: the row of the 128-byte swizzle
    bool exact = false;  // Float stays as it is
};

// Whether TMA can address it: a first element and strides at multiples of 16 bytes, positive strides, sizes that
// coordinates of 32 bits can count.
bool tma_can_address(const TmaTensor& tensor);

// Its description for kernels (`const __grid_constant__ CUtensorMap`), with the 128-byte swizzle. Made without touching
// the device; the calling thread's last few are kept by everything that they hold. Raises where TMA cannot address it.
CUtensorMap tensor_map(const TmaTensor& tensor);

// Whether a device runs sm_90a code: Hopper, whose instructions no later GPU has.
bool is_hopper(int32_t device);

// Whether a kernel was compiled for sm_90a, of use on Hopper: else its body is empty.
bool compiled_for_hopper(const void* kernel);

// Raises unless `device` is Hopper and `kernel` was compiled for sm_90a: elsewhere its body is empty.
void check_hopper(const void* kernel, int32_t device, const char* name);

}  // namespace kl
