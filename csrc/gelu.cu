// gelu: x · Φ(x), exact with erf or approximated with tanh (Hendrycks and Gimpel, arXiv:1606.08415).
//
// Both rungs take any strides: the output keeps the memory order of a dense input, and each operand is walked in that
// order.

#include "core/gelu.cuh"
#include "core/ops.h"
#include "core/pdl.cuh"

namespace kl {
namespace {

// gelu, rung 1 of 2: naive
// Idea      One fused kernel, one element per thread.
// Predicts  2·sizeof(T) bytes per element: one read and one write.
// Limit now 2-byte loads leave too few bytes in flight.
// Next      `vectorized`: 16-byte loads and stores.

template <typename T, typename Form>
__global__ void gelu_naive_kernel(T* output, const T* input, Strided walk, int64_t numel) {
    const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (i < numel) output[i] = from_float<T>(Form::forward(to_float(input[walk.offset(i)])));
}

template <typename T, typename Form>
__global__ void gelu_backward_naive_kernel(T* grad_input, const T* grad, Strided grad_walk, const T* input,
                                           Strided input_walk, int64_t numel) {
    const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (i >= numel) return;
    const float x = to_float(input[input_walk.offset(i)]), g = to_float(grad[grad_walk.offset(i)]);
    grad_input[i] = from_float<T>(g * Form::derivative(x));
}

// gelu, rung 2 of 2: vectorized
// Idea      16-byte loads and stores; launched with programmatic dependent launch (PDL).
// Predicts  The same bytes with an eighth of the load instructions in 16 bits, a quarter in float32.
// Limit now Memory bandwidth; the exact (erf) form is bound by issue slots.
// Next      –

/// Loads 16 bytes of an operand from element `first` of the walk on, element by element; zeros past its end.
template <bool DENSE, typename T>
__device__ Vec<T> gather_vec(const T* input, const Strided& walk, int64_t first, int64_t numel) {
    Vec<T> v;
#pragma unroll
    for (int e = 0; e < Vec<T>::size; ++e) {
        v[e] = first + e < numel ? input[DENSE ? first + e : walk.offset(first + e)] : from_float<T>(0.0f);
    }
    return v;
}

template <typename T>
__device__ void scatter_vec(T* output, const Vec<T>& v, int64_t first, int64_t numel) {
    if (first + Vec<T>::size <= numel) return store_vec(output + first, v);
#pragma unroll
    for (int e = 0; e < Vec<T>::size; ++e) {
        if (first + e < numel) output[first + e] = v[e];
    }
}

template <typename T, typename Form>
__device__ Vec<T> gelu_of(const Vec<T>& input) {
    float x[Vec<T>::size];
    unpack(input, x);
#pragma unroll
    for (int e = 0; e < Vec<T>::size; ++e) x[e] = Form::forward(x[e]);
    return pack<T>(x);
}

template <typename T, typename Form>
__device__ Vec<T> gelu_gradient_of(const Vec<T>& grad, const Vec<T>& input) {
    float x[Vec<T>::size], g[Vec<T>::size];
    unpack(input, x);
    unpack(grad, g);
#pragma unroll
    for (int e = 0; e < Vec<T>::size; ++e) g[e] *= Form::derivative(x[e]);
    return pack<T>(g);
}

// VECTORIZED: the operands are dense and aligned, and each load takes 16 bytes save at the end. Both paths have a store of
// their own: where they joined, the compiler would unpack and pack the vectors again.
template <typename T, typename Form, bool VECTORIZED>
__global__ void __launch_bounds__(THREADS)
    gelu_vectorized_kernel(T* output, const T* input, __grid_constant__ const Strided walk, int64_t numel) {
    pdl_begin();
    const int64_t first = (int64_t{blockIdx.x} * THREADS + threadIdx.x) * Vec<T>::size;
    if (VECTORIZED && first + Vec<T>::size <= numel) {
        store_vec(output + first, gelu_of<T, Form>(load_vec(evict_last(input + first))));
    } else if (first < numel) {
        scatter_vec(output, gelu_of<T, Form>(gather_vec<VECTORIZED>(input, walk, first, numel)), first, numel);
    }
}

template <typename T, typename Form, bool VECTORIZED>
__global__ void __launch_bounds__(THREADS)
    gelu_backward_vectorized_kernel(T* grad_input, const T* grad, __grid_constant__ const Strided grad_walk,
                                    const T* input, __grid_constant__ const Strided input_walk, int64_t numel) {
    pdl_begin();
    const int64_t first = (int64_t{blockIdx.x} * THREADS + threadIdx.x) * Vec<T>::size;
    if (VECTORIZED && first + Vec<T>::size <= numel) {
        store_vec(grad_input + first,
                  gelu_gradient_of<T, Form>(load_vec(evict_last(grad + first)), load_vec(evict_last(input + first))));
    } else if (first < numel) {
        const Vec<T> x = gather_vec<VECTORIZED>(input, input_walk, first, numel),
                     g = gather_vec<VECTORIZED>(grad, grad_walk, first, numel);
        scatter_vec(grad_input, gelu_gradient_of<T, Form>(g, x), first, numel);
    }
}

// ---- host ----------------------------------------------------------------------------------------------------------

Tensor gelu(const Tensor& input, const std::string& approximate, bool vectorized) {
    check_cuda(input, "gelu", "input");
    const Launch launch(input);
    const DenseLike layout(input);
    Tensor output = layout.allocate(input);
    const int64_t numel = input.numel();
    if (numel == 0) return output;
    const Strided walk = layout.walk(input, "gelu");
    dispatch_form(input.scalar_type(), approximate, "gelu", [&](auto zero, auto form) {
        using T = decltype(zero);
        using Form = decltype(form);
        auto* out = static_cast<T*>(output.data_ptr());
        const auto* in = static_cast<const T*>(input.data_ptr());
        if (vectorized) {
            const auto grid = grid_size(ceil_div(numel, int64_t{THREADS} * Vec<T>::size));
            const bool vectors = walk.is_dense() && is_aligned16(in);
            const auto kernel =
                vectors ? gelu_vectorized_kernel<T, Form, true> : gelu_vectorized_kernel<T, Form, false>;
            launch_pdl(kernel, grid, THREADS, launch, out, in, walk, numel);
        } else {
            const auto grid = grid_size(ceil_div(numel, THREADS));
            gelu_naive_kernel<T, Form><<<grid, THREADS, 0, launch.stream>>>(out, in, walk, numel);
        }
    });
    KL_LAUNCH_CHECK();
    return output;
}

Tensor gelu_backward(const Tensor& grad, const Tensor& input, const std::string& approximate, bool vectorized) {
    check_cuda(grad, "gelu_backward", "grad");
    check_like(input, grad, "gelu_backward", "input");
    check_same_shape(input, grad, "gelu_backward", "input");
    const Launch launch(input);
    const DenseLike layout(input);
    Tensor grad_input = layout.allocate(input);
    const int64_t numel = input.numel();
    if (numel == 0) return grad_input;
    const Strided grad_walk = layout.walk(grad, "gelu_backward"), input_walk = layout.walk(input, "gelu_backward");
    dispatch_form(input.scalar_type(), approximate, "gelu", [&](auto zero, auto form) {
        using T = decltype(zero);
        using Form = decltype(form);
        auto* out = static_cast<T*>(grad_input.data_ptr());
        const auto* g = static_cast<const T*>(grad.data_ptr());
        const auto* x = static_cast<const T*>(input.data_ptr());
        if (vectorized) {
            const auto grid = grid_size(ceil_div(numel, int64_t{THREADS} * Vec<T>::size));
            const bool vectors = grad_walk.is_dense() && is_aligned16(g) && input_walk.is_dense() && is_aligned16(x);
            const auto kernel = vectors ? gelu_backward_vectorized_kernel<T, Form, true>
                                        : gelu_backward_vectorized_kernel<T, Form, false>;
            launch_pdl(kernel, grid, THREADS, launch, out, g, grad_walk, x, input_walk, numel);
        } else {
            const auto grid = grid_size(ceil_div(numel, THREADS));
            gelu_backward_naive_kernel<T, Form>
                <<<grid, THREADS, 0, launch.stream>>>(out, g, grad_walk, x, input_walk, numel);
        }
    });
    KL_LAUNCH_CHECK();
    return grad_input;
}

}  // namespace

Tensor gelu_naive(const Tensor& input, const std::string& approximate) { return gelu(input, approximate, false); }
Tensor gelu_vectorized(const Tensor& input, const std::string& approximate) { return gelu(input, approximate, true); }
Tensor gelu_backward_naive(const Tensor& grad, const Tensor& input, const std::string& approximate) {
    return gelu_backward(grad, input, approximate, false);
}
Tensor gelu_backward_vectorized(const Tensor& grad, const Tensor& input, const std::string& approximate) {
    return gelu_backward(grad, input, approximate, true);
}

void gelu_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    dispatch(dtype, "gelu", [&](auto zero) {
        using T = decltype(zero);
        attributes.push_back(kernel_attributes<gelu_naive_kernel<T, Exact>>("gelu.naive", THREADS));
        attributes.push_back(kernel_attributes<gelu_vectorized_kernel<T, Exact, true>>("gelu.vectorized", THREADS));
        attributes.push_back(kernel_attributes<gelu_backward_naive_kernel<T, Exact>>("gelu_backward.naive", THREADS));
        attributes.push_back(
            kernel_attributes<gelu_backward_vectorized_kernel<T, Exact, true>>("gelu_backward.vectorized", THREADS));
    });
}

}  // namespace kl
