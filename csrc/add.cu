// add: the sum of two tensors that broadcast, of any strides.
//
// The output keeps the memory order of a dense operand of its shape, and both operands are walked in that order.

#include "core/divisor.cuh"
#include "core/ops.h"
#include "core/pdl.cuh"

namespace kl {
namespace {

// add, rung 1 of 2: naive
// Idea      One element per thread.
// Predicts  3·sizeof(T) bytes per element: two reads and one write.
// Limit now 2-byte loads leave too few bytes in flight.
// Next      `vectorized`: 16-byte loads and stores.

template <typename T>
__global__ void add_naive_kernel(T* output, const T* input, __grid_constant__ const Strided input_walk, const T* other,
                                 __grid_constant__ const Strided other_walk, int64_t numel) {
    const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (i >= numel) return;
    output[i] = from_float<T>(to_float(input[input_walk.offset(i)]) + to_float(other[other_walk.offset(i)]));
}

// add, rung 2 of 2: vectorized
// Idea      16-byte loads and stores, also of a row that is broadcast to every row; launched with PDL.
// Predicts  The same bytes with an eighth of the load instructions in 16 bits, a quarter in float32.
// Limit now Memory bandwidth.
// Next      –

/// Layout of an operand against the output: the same dense memory, one dense row of whole vectors that repeats, or other.
enum class Operand { dense, repeated_row, strided };

/// Offset of element `first` in a repeated row.
template <typename T>
__device__ int64_t in_row(int64_t first, const Divisor& vectors_a_row, int64_t length) {
    const int64_t vector = first / Vec<T>::size;
    if (vector >= int64_t{1} << 31) return first % length;
    const auto small = static_cast<uint32_t>(vector);
    return int64_t{vectors_a_row.remainder(small)} * Vec<T>::size;
}

/// Loads 16 bytes of an operand, from element `first` of the walk on.
template <Operand LAYOUT, typename T>
__device__ Vec<T> operand_vec(const T* operand, const Strided& walk, const Divisor& vectors_a_row, int64_t first,
                              int64_t numel) {
    if constexpr (LAYOUT == Operand::repeated_row)
        return load_vec(operand + in_row<T>(first, vectors_a_row, walk.sizes[1]));
    if (LAYOUT == Operand::dense && first + Vec<T>::size <= numel) return load_vec(evict_last(operand + first));
    Vec<T> v;
#pragma unroll
    for (int e = 0; e < Vec<T>::size; ++e) {
        const int64_t i = min(first + e, numel - 1);
        v[e] = operand[LAYOUT == Operand::dense ? i : walk.offset(i)];
    }
    return v;
}

template <typename T, Operand INPUT, Operand OTHER>
__global__ void __launch_bounds__(THREADS)
    add_vectorized_kernel(T* output, const T* input, __grid_constant__ const Strided input_walk, const T* other,
                          __grid_constant__ const Strided other_walk, const Divisor vectors_a_row, int64_t numel) {
    pdl_begin();
    const int64_t first = (int64_t{blockIdx.x} * THREADS + threadIdx.x) * Vec<T>::size;
    if (first >= numel) return;
    float a[Vec<T>::size], b[Vec<T>::size];
    const Vec<T> input_vec = operand_vec<INPUT>(input, input_walk, vectors_a_row, first, numel);
    const Vec<T> other_vec = operand_vec<OTHER>(other, other_walk, vectors_a_row, first, numel);
    unpack(input_vec, a);
    unpack(other_vec, b);
#pragma unroll
    for (int e = 0; e < Vec<T>::size; ++e) a[e] += b[e];
    const Vec<T> sums = pack<T>(a);
    if (first + Vec<T>::size <= numel) return store_vec(output + first, sums);
#pragma unroll
    for (int e = 0; e < Vec<T>::size; ++e) {
        if (first + e < numel) output[first + e] = sums[e];
    }
}

// ---- host ----------------------------------------------------------------------------------------------------------

std::vector<int64_t> broadcast_sizes(const Tensor& a, const Tensor& b) {
    std::vector<int64_t> sizes(std::max(a.dim(), b.dim()));
    for (size_t i = 1; i <= sizes.size(); ++i) {
        const auto back = static_cast<int64_t>(i);
        const int64_t of_a = back <= a.dim() ? a.size(a.dim() - back) : 1;
        const int64_t of_b = back <= b.dim() ? b.size(b.dim() - back) : 1;
        KL_CHECK(of_a == of_b || of_a == 1 || of_b == 1, "add: sizes ", of_a, " and ", of_b, " do not broadcast");
        sizes[sizes.size() - i] = of_a == 1 ? of_b : of_a;
    }
    return sizes;
}

bool has_sizes(const Tensor& tensor, const std::vector<int64_t>& sizes) {
    const auto own = tensor.sizes();
    return own.size() == sizes.size() && std::equal(sizes.begin(), sizes.end(), own.begin());
}

/// The walk over `tensor`, broadcast to the sizes of the output, in the memory order of the output.
Strided walk_of(const Tensor& tensor, const DenseLike& output) {
    const auto missing = static_cast<int64_t>(output.order.size()) - tensor.dim();
    std::vector<int64_t> strides;
    for (const int64_t d : output.order) {
        const bool repeated = d < missing || tensor.size(d - missing) == 1;
        strides.push_back(repeated ? 0 : tensor.stride(d - missing));
    }
    return collapse(output.sizes.data(), strides.data(), static_cast<int64_t>(strides.size()), "add");
}

template <typename T>
Operand layout_of(const Strided& walk, const T* operand, int64_t numel) {
    if (!is_aligned16(operand)) return Operand::strided;
    if (numel == 1 || (walk.dims == 1 && walk.strides[0] == 1)) return Operand::dense;
    const bool row = walk.dims == 2 && walk.strides[0] == 0 && walk.strides[1] == 1;
    return row && walk.sizes[1] % Vec<T>::size == 0 ? Operand::repeated_row : Operand::strided;
}

template <typename T>
auto vectorized_kernel(Operand input, Operand other) {
    if (input != Operand::dense) return add_vectorized_kernel<T, Operand::strided, Operand::strided>;
    if (other == Operand::dense) return add_vectorized_kernel<T, Operand::dense, Operand::dense>;
    if (other == Operand::repeated_row) return add_vectorized_kernel<T, Operand::dense, Operand::repeated_row>;
    return add_vectorized_kernel<T, Operand::dense, Operand::strided>;
}

Tensor add(const Tensor& input, const Tensor& other, bool vectorized) {
    check_cuda(input, "add", "input");
    check_like(other, input, "add", "other");
    const Launch launch(input);
    const auto sizes = broadcast_sizes(input, other);
    if (!has_sizes(input, sizes) && has_sizes(other, sizes)) return add(other, input, vectorized);
    Tensor output =
        has_sizes(input, sizes) ? DenseLike(input).allocate(input) : empty(input, input.scalar_type(), sizes);
    const int64_t numel = output.numel();
    if (numel == 0) return output;
    const DenseLike layout(output);
    const Strided input_walk = walk_of(input, layout), other_walk = walk_of(other, layout);
    dispatch(input.scalar_type(), "add", [&](auto zero) {
        using T = decltype(zero);
        auto* const out = static_cast<T*>(output.data_ptr());
        const auto* const a = static_cast<const T*>(input.data_ptr());
        const auto* const b = static_cast<const T*>(other.data_ptr());
        if (vectorized) {
            const auto grid = grid_size(ceil_div(numel, int64_t{THREADS} * Vec<T>::size));
            const Operand of_other = layout_of(other_walk, b, numel);
            const auto kernel = vectorized_kernel<T>(layout_of(input_walk, a, numel), of_other);
            // A row of 2^31 vectors or more: every vector that 32 bits can count lies in its first repetition.
            constexpr int64_t LONGEST = int64_t{1} << 31;
            const int64_t vectors = of_other == Operand::repeated_row ? other_walk.sizes[1] / Vec<T>::size : 1;
            const Divisor vectors_a_row(static_cast<uint32_t>(std::min(vectors, LONGEST)));
            launch_pdl(kernel, grid, THREADS, launch, out, a, input_walk, b, other_walk, vectors_a_row, numel);
        } else {
            const auto grid = grid_size(ceil_div(numel, THREADS));
            add_naive_kernel<<<grid, THREADS, 0, launch.stream>>>(out, a, input_walk, b, other_walk, numel);
        }
    });
    KL_LAUNCH_CHECK();
    return output;
}

}  // namespace

Tensor add_naive(const Tensor& input, const Tensor& other) { return add(input, other, false); }
Tensor add_vectorized(const Tensor& input, const Tensor& other) { return add(input, other, true); }

void add_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    dispatch(dtype, "add", [&](auto zero) {
        using T = decltype(zero);
        attributes.push_back(kernel_attributes<add_naive_kernel<T>>("add.naive", THREADS));
        attributes.push_back(
            kernel_attributes<add_vectorized_kernel<T, Operand::dense, Operand::dense>>("add.vectorized", THREADS));
        attributes.push_back(kernel_attributes<add_vectorized_kernel<T, Operand::dense, Operand::repeated_row>>(
            "add.vectorized, a row", THREADS));
    });
}

}  // namespace kl
