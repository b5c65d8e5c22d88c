// Host side of TMA: tensor maps (CUtensorMap), encoded once and cached. For kernels with sm90.cuh.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <limits>

#include "core/tensor.h"

namespace kl {

constexpr int TMA_DIMS = 5;
/// The largest size of a kernel whose 32-bit coordinates go past the end by a tile.
constexpr int64_t TMA_LARGEST_SIZE = std::numeric_limits<int32_t>::max() - 1024;

/// A tensor of up to five dimensions, innermost first, and the box that one TMA instruction moves. Sizes and strides count
/// elements. strides[0] is assumed to be 1; the stride of a dimension of one element is ignored.
struct TmaTensor {
    ScalarType dtype;  // Float: TMA rounds to tf32, where wgmma would truncate; not where `exact`
    int dims;
    const void* data;
    int64_t sizes[TMA_DIMS];
    int64_t strides[TMA_DIMS];
    int box[TMA_DIMS];   // at most 256 each; box[0] at most 128 bytes: the row of the 128-byte swizzle
    bool exact = false;  // keep Float unrounded
};

/// Whether TMA can address the tensor: address and strides are multiples of 16 bytes, strides are positive, and sizes fit
/// in 32-bit coordinates.
bool tma_can_address(const TmaTensor& tensor);

/// Whether TMA can write the tensor and nothing beside it. TMA writes whole runs of 16 bytes, so rows must end at one: an
/// H100 stored zeros in the seven elements behind rows of 129. Reads stop at the exact element.
bool tma_can_write(const TmaTensor& tensor);

/// Encodes the tensor map (a `const __grid_constant__ CUtensorMap` parameter) with the 128-byte swizzle, without touching the
/// device. Each thread caches its last few, keyed by their whole content. Raises where TMA cannot address the tensor.
CUtensorMap tensor_map(const TmaTensor& tensor);

/// Whether a device runs sm_90a code, which only Hopper does.
bool is_hopper(int32_t device);

/// Whether a kernel was compiled for sm_90a; otherwise its body is empty.
bool compiled_for_hopper(const void* kernel);

/// Raises unless `device` is Hopper and `kernel` was compiled for sm_90a.
void check_hopper(const void* kernel, int32_t device, const char* name);

}  // namespace kl
