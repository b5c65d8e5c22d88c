// Element-wise kernels: several operands of one shape, of any strides, read in parallel, 16 bytes of each at a time.
//
//   access   condition                                     address of a vector
//   dense    every operand is dense in the same order      its index
//   rows     each operand's rows lie at one stride of its  a division by the vectors per row, which costs two
//            own and consist of 16-byte vectors (halves    instructions
//            of one tensor, say)
//   strided  none: elements one by one                     a division per element and dimension
#pragma once

#include "core/divisor.cuh"
#include "core/pdl.cuh"

namespace kl {

enum class Access { dense, rows, strided };

/// Sizes, and strides of each operand. Neighbouring dimensions are merged where one stride leads through both in every
/// operand.
template <int N>
struct Operands {
    Access access = Access::strided;
    int dims = 0;
    int64_t sizes[MAX_DIMS];
    int64_t strides[N][MAX_DIMS];
    Divisor vectors_a_row;

    /// `order`: the dimensions, outermost first; elements are counted in this order.
    Operands(const std::vector<int64_t>& order, const Tensor* const (&tensors)[N], const char* op) {
        for (const int64_t d : order) add(d, tensors, op);
        const int64_t vector = 16 / static_cast<int64_t>(tensors[0]->element_size());
        bool unit = true, aligned = true, at_vectors = true;
        for (int k = 0; k < N; ++k) {
            unit = unit && (dims == 0 || strides[k][dims - 1] == 1);
            aligned = aligned && is_aligned16(tensors[k]->data_ptr());
            at_vectors = at_vectors && strides[k][0] % vector == 0;
        }
        if (!unit || !aligned) return;
        if (dims <= 1) access = Access::dense;
        if (dims == 2 && at_vectors && sizes[1] % vector == 0 && sizes[0] * (sizes[1] / vector) < int64_t{1} << 31) {
            access = Access::rows;
            vectors_a_row = Divisor(static_cast<uint32_t>(sizes[1] / vector));
        }
    }

    /// Memory offset in operand `k` of the element at an index in that order.
    __device__ int64_t offset(int k, int64_t index) const {
        int64_t offset = 0;
#pragma unroll 1  // as in Strided::offset
        for (int d = dims - 1; d > 0; --d) {
            offset += index % sizes[d] * strides[k][d];
            index /= sizes[d];
        }
        return dims > 0 ? offset + index * strides[k][0] : 0;
    }

  private:
    void add(int64_t d, const Tensor* const (&tensors)[N], const char* op) {
        const int64_t size = tensors[0]->size(d);
        if (size == 1) return;
        bool merges = dims > 0;
        for (int k = 0; k < N; ++k) merges = merges && strides[k][dims - 1] == size * tensors[k]->stride(d);
        KL_CHECK(merges || dims < MAX_DIMS, op, ": strides need more than ", MAX_DIMS, " dimensions");
        const int at = merges ? dims - 1 : dims++;
        sizes[at] = merges ? sizes[at] * size : size;
        for (int k = 0; k < N; ++k) strides[k][at] = tensors[k]->stride(d);
    }
};

/// Offset of the vector of operand `k` that begins with element number `first`.
template <Access ACCESS, typename T, int N>
__device__ inline int64_t vector_offset(const Operands<N>& all, int k, int64_t first) {
    if constexpr (ACCESS == Access::dense) return first;
    const uint32_t vector = static_cast<uint32_t>(first / Vec<T>::size);
    const uint32_t row = all.vectors_a_row.quotient(vector), column = all.vectors_a_row.remainder(vector);
    return row * all.strides[k][0] + int64_t{column} * Vec<T>::size;
}

/// Whether 16 bytes from element `first` on are contiguous in every operand. If not, the kernel takes them element by
/// element. That path has its own store: if both ended in one, the compiler would unpack and pack the vectors again.
template <Access ACCESS, typename T>
__device__ inline bool is_vector(int64_t first, int64_t numel) {
    return ACCESS != Access::strided && first + Vec<T>::size <= numel;
}

/// Calls f with the access as a constant: one instance of the kernel per access. A branch at run time would keep the
/// compiler from issuing the loads of all operands back to back.
template <typename F>
void dispatch_access(Access access, F&& f) {
    switch (access) {
        case Access::dense:
            return f(std::integral_constant<Access, Access::dense>{});
        case Access::rows:
            return f(std::integral_constant<Access, Access::rows>{});
        case Access::strided:
            return f(std::integral_constant<Access, Access::strided>{});
    }
}

}  // namespace kl
