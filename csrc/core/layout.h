// Memory layout of strided operands, as kernels walk over them. The host code is compiled once, in layout.cpp.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "core/tensor.h"

namespace kl {

constexpr int MAX_DIMS = 12;

/// Maps a row-major index to a memory offset, over the dimensions that do not merge with their neighbour.
struct Strided {
    int dims = 0;
    int64_t strides[MAX_DIMS];  // before `sizes`: most kernels read one stride, which is then next to `dims`
    int64_t sizes[MAX_DIMS];

#if defined(__CUDACC__)
    __device__ int64_t offset(int64_t index) const {
        int64_t offset = 0;
#pragma unroll 1  // otherwise the compiler unrolls four divisions, for more dimensions than tensors have
        for (int d = dims - 1; d > 0; --d) {
            offset += index % sizes[d] * strides[d];
            index /= sizes[d];
        }
        return dims > 0 ? offset + index * strides[0] : 0;
    }
#endif
    bool is_dense() const { return dims == 0 || (dims == 1 && strides[0] == 1); }
};

Strided collapse(const int64_t* sizes, const int64_t* strides, int64_t dim, const char* op);

/// Strides of a dense tensor whose dimensions lie in memory in this order, outermost first.
std::vector<int64_t> dense_strides(const std::vector<int64_t>& sizes, const std::vector<int64_t>& order);

/// Whether the heads of (…, H, S, D) lie closer together in memory than its rows, as those of a layer's product do.
bool heads_lie_inside(const Tensor& x);

/// Layout of a new tensor like `input`: the order of its dimensions, by descending stride, and its strides. It keeps the
/// memory order of the input, as torch.empty_like does, also where the input is a part of a tensor: the heads of a product
/// that holds queries, keys and values. The order of an expanded input says nothing, and row-major order takes its place.
struct DenseLike {
    std::vector<int64_t> order;    // dimensions, outermost in memory first
    std::vector<int64_t> sizes;    // in that order
    std::vector<int64_t> strides;  // of the fresh tensor, by the tensor's own dimensions

    explicit DenseLike(const Tensor& input);
    Tensor allocate(const Tensor& input) const;
    /// The walk over `tensor`, of the same shape, in the memory order of the new one.
    Strided walk(const Tensor& tensor, const char* op) const;
};

}  // namespace kl
