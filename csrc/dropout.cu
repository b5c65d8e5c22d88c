// dropout: x · keep / (1 − p), with the mask of kernel_ladder/semantics/philox.py (Srivastava et al., JMLR 15, 2014).
//
// The gradient is the dropout of the output's gradient with the same mask: no mask is stored, and one kernel serves both
// passes. Elements are counted in row-major order whatever the strides, so that a view has the mask of its copy. The
// output keeps the memory order of a dense input. `vectorized` shares the element-wise function of `naive` for what is no
// whole vector.

#include <numeric>

#include "core/elementwise.cuh"
#include "core/ops.h"
#include "core/philox.cuh"

namespace kl {
namespace {

enum { OUT, IN, BOTH };

// dropout, rung 1 of 2: naive
// Idea      One element per thread, which draws the mask where it needs it.
// Predicts  2·sizeof(T) bytes and ten Philox rounds per element.
// Limit now Integer arithmetic: a call of Philox yields eight 16-bit words, and a thread uses one.
// Next      `vectorized`: one call for eight elements.

template <typename T>
__device__ void dropout_element(T* output, const T* input, const Operands<BOTH>& at, const DropoutMask& mask,
                                int64_t i) {
    output[at.offset(OUT, i)] = from_float<T>(to_float(input[at.offset(IN, i)]) * mask.of(i));
}

template <typename T>
__global__ void dropout_naive_kernel(T* output, const T* input, __grid_constant__ const Operands<BOTH> at,
                                     __grid_constant__ const DropoutMask mask, int64_t numel) {
    const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (i < numel) dropout_element(output, input, at, mask, i);
}

// dropout, rung 2 of 2: vectorized
// Idea      16-byte loads and stores, one call of Philox for eight elements, round keys as kernel constants.
// Predicts  The same bytes with an eighth of the calls of Philox.
// Limit now Memory bandwidth; close behind it, integer arithmetic.
// Next      –

template <typename T, Access ACCESS>
__global__ void __launch_bounds__(THREADS)
    dropout_vectorized_kernel(T* output, const T* input, __grid_constant__ const Operands<BOTH> at,
                              __grid_constant__ const DropoutMask mask, int64_t numel) {
    pdl_begin();
    constexpr int SIZE = Vec<T>::size;
    const int64_t first = (int64_t{blockIdx.x} * THREADS + threadIdx.x) * SIZE;
    if (!is_vector<ACCESS, T>(first, numel)) {
#pragma unroll 1
        for (int64_t i = first; i < first + SIZE && i < numel; ++i) dropout_element(output, input, at, mask, i);
        return;
    }
    const Vec<T> v = load_vec(evict_last(input + vector_offset<ACCESS, T>(at, IN, first)));
    // A block has a power of two of vectors, so that threadIdx.x never carries into the upper word.
    const uint64_t vector = uint64_t{blockIdx.x} * THREADS;
    float x[SIZE];
    unpack(v, x);
    const auto upper = static_cast<uint32_t>(vector >> 32);
    mask.apply(x, mask.draw<SIZE>(static_cast<uint32_t>(vector) + threadIdx.x, upper));
    store_vec(output + vector_offset<ACCESS, T>(at, OUT, first), pack<T>(x));
}

// ---- host ----------------------------------------------------------------------------------------------------------

Tensor dropout(const Tensor& input, int64_t threshold, double scale, int64_t seed, bool vectorized) {
    check_cuda(input, "dropout", "input");
    const DropoutMask mask(threshold, scale, seed, "dropout");
    const Launch launch(input);
    Tensor output = DenseLike(input).allocate(input);
    const int64_t numel = input.numel();
    if (numel == 0) return output;
    std::vector<int64_t> row_major(input.dim());
    std::iota(row_major.begin(), row_major.end(), 0);
    const Operands<BOTH> operands(row_major, {&output, &input}, "dropout");
    dispatch(input.scalar_type(), "dropout", [&](auto zero) {
        using T = decltype(zero);
        auto* out = static_cast<T*>(output.data_ptr());
        const auto* in = static_cast<const T*>(input.data_ptr());
        if (!vectorized) {
            const auto grid = grid_size(ceil_div(numel, THREADS));
            dropout_naive_kernel<T><<<grid, THREADS, 0, launch.stream>>>(out, in, operands, mask, numel);
            return;
        }
        const auto grid = grid_size(ceil_div(numel, int64_t{THREADS} * Vec<T>::size));
        dispatch_access(operands.access, [&](auto access) {
            launch_pdl(dropout_vectorized_kernel<T, access.value>, grid, THREADS, launch, out, in, operands, mask,
                       numel);
        });
    });
    KL_LAUNCH_CHECK();
    return output;
}

}  // namespace

Tensor dropout_naive(const Tensor& input, int64_t threshold, double scale, int64_t seed) {
    return dropout(input, threshold, scale, seed, false);
}
Tensor dropout_vectorized(const Tensor& input, int64_t threshold, double scale, int64_t seed) {
    return dropout(input, threshold, scale, seed, true);
}

void dropout_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    dispatch(dtype, "dropout", [&](auto zero) {
        using T = decltype(zero);
        attributes.push_back(kernel_attributes<dropout_naive_kernel<T>>("dropout.naive", THREADS));
        attributes.push_back(
            kernel_attributes<dropout_vectorized_kernel<T, Access::dense>>("dropout.vectorized", THREADS));
    });
}

}  // namespace kl
