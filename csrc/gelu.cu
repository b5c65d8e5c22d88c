// GELU: x · Φ(x), exact with erf or approximated with tanh (Hendrycks and Gimpel, arXiv:1606.08415).
//
//   variant     the one idea it adds                          what limits it now
//   naive       one fused kernel, one element a thread        2-byte loads: too few bytes in flight
//   vectorized  16-byte loads and stores, two per thread      memory bandwidth
//
// Both take any strides: the output keeps the memory order of a dense input, and each operand is walked in that order.

#include "common.cuh"
#include "ops.h"

namespace kl {
namespace {

constexpr int THREADS = 256;

struct Exact {
    __device__ static float forward(float x) { return 0.5f * x * (1.0f + erff(x * 0.70710678f)); }
    __device__ static float derivative(float x) {
        return 0.5f * (1.0f + erff(x * 0.70710678f)) + x * (0.39894228f * expf(-0.5f * x * x));
    }
};

struct Tanh {
    static constexpr float SCALE = 0.79788456f, CUBIC = 0.044715f;  // √(2/π), and the fit's coefficient

    // 0.5 · (1 + tanh(u)) = sigmoid(2u). Of exp(−|2u|), neither the sigmoid nor its slope suffers cancellation.
    // __expf: its error, 2 + |x|/2 ulp of a factor that shrinks as exp(−|x|), stays under one ulp of the result.
    __device__ static float sigmoid(float x, float* slope) {
        const float u = SCALE * (x + CUBIC * x * x * x);
        const float e = __expf(-2.0f * fabsf(u));
        const float p = __fdividef(1.0f, 1.0f + e);
        *slope = e * p * p;
        return u >= 0.0f ? p : e * p;
    }
    __device__ static float forward(float x) {
        float slope;
        return x * sigmoid(x, &slope);
    }
    __device__ static float derivative(float x) {
        float slope;
        const float s = sigmoid(x, &slope);
        return s + x * slope * (2.0f * SCALE * (1.0f + 3.0f * CUBIC * x * x));
    }
};

// ---- naive: one element a thread -----------------------------------------------------------------------------------

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

// ---- vectorized: 16 bytes a load, several loads in flight ----------------------------------------------------------

constexpr int UNROLL = 2;

// 16 bytes of an operand that starts at element `first` of the walk: one load where memory allows, else gathered.
template <typename T>
__device__ Vec<T> gather_vec(const T* input, const Strided& walk, bool whole, int64_t first, int64_t numel) {
    if (whole && first + Vec<T>::size <= numel) return load_vec(input + first);
    Vec<T> v;
#pragma unroll
    for (int e = 0; e < Vec<T>::size; ++e) {
        v[e] = first + e < numel ? input[walk.offset(first + e)] : from_float<T>(0.0f);
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
__global__ void gelu_vectorized_kernel(T* output, const T* input, Strided walk, bool whole, int64_t numel) {
    const int64_t block = int64_t{blockIdx.x} * UNROLL * THREADS;
    Vec<T> v[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
        v[u] = gather_vec(input, walk, whole, (block + u * THREADS + threadIdx.x) * Vec<T>::size, numel);
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
#pragma unroll
        for (int e = 0; e < Vec<T>::size; ++e) v[u][e] = from_float<T>(Form::forward(to_float(v[u][e])));
        scatter_vec(output, v[u], (block + u * THREADS + threadIdx.x) * Vec<T>::size, numel);
    }
}

template <typename T, typename Form>
__global__ void gelu_backward_vectorized_kernel(T* grad_input, const T* grad, Strided grad_walk, bool grad_whole,
                                                const T* input, Strided input_walk, bool input_whole, int64_t numel) {
    const int64_t first = (int64_t{blockIdx.x} * THREADS + threadIdx.x) * Vec<T>::size;
    if (first >= numel) return;
    Vec<T> x = gather_vec(input, input_walk, input_whole, first, numel);
    const Vec<T> g = gather_vec(grad, grad_walk, grad_whole, first, numel);
#pragma unroll
    for (int e = 0; e < Vec<T>::size; ++e) {
        x[e] = from_float<T>(to_float(g[e]) * Form::derivative(to_float(x[e])));
    }
    scatter_vec(grad_input, x, first, numel);
}

// ---- host ----------------------------------------------------------------------------------------------------------

template <typename F>
void dispatch_form(ScalarType dtype, const std::string& approximate, F&& f) {
    STD_TORCH_CHECK(approximate == "none" || approximate == "tanh",
                    "gelu: argument `approximate` must be 'none' or 'tanh', got '", approximate, "'");
    dispatch(dtype, "gelu", [&](auto zero) { approximate == "none" ? f(zero, Exact{}) : f(zero, Tanh{}); });
}

Tensor gelu(const Tensor& input, const std::string& approximate, bool vectorized) {
    check_cuda(input, "gelu", "input");
    const Launch launch(input);
    const DenseLike layout(input);
    Tensor output = layout.allocate(input);
    const int64_t numel = input.numel();
    if (numel == 0) return output;
    const Strided walk = layout.walk(input, "gelu");
    dispatch_form(input.scalar_type(), approximate, [&](auto zero, auto form) {
        using T = decltype(zero);
        using Form = decltype(form);
        auto* out = static_cast<T*>(output.data_ptr());
        const auto* in = static_cast<const T*>(input.data_ptr());
        if (vectorized) {
            const auto grid = grid_size(ceil_div(numel, int64_t{THREADS} * UNROLL * Vec<T>::size));
            const bool whole = walk.is_dense() && is_aligned16(in);
            gelu_vectorized_kernel<T, Form><<<grid, THREADS, 0, launch.stream>>>(out, in, walk, whole, numel);
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
    dispatch_form(input.scalar_type(), approximate, [&](auto zero, auto form) {
        using T = decltype(zero);
        using Form = decltype(form);
        auto* out = static_cast<T*>(grad_input.data_ptr());
        const auto* g = static_cast<const T*>(grad.data_ptr());
        const auto* x = static_cast<const T*>(input.data_ptr());
        if (vectorized) {
            const auto grid = grid_size(ceil_div(numel, int64_t{THREADS} * Vec<T>::size));
            gelu_backward_vectorized_kernel<T, Form>
                <<<grid, THREADS, 0, launch.stream>>>(out, g, grad_walk, grad_walk.is_dense() && is_aligned16(g), x,
                                                      input_walk, input_walk.is_dense() && is_aligned16(x), numel);
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

void gelu_kernel_facts(std::vector<KernelFacts>& facts) {
    facts.push_back(kernel_facts("gelu.naive", gelu_naive_kernel<bfloat16, Exact>, THREADS));
    facts.push_back(kernel_facts("gelu.vectorized", gelu_vectorized_kernel<bfloat16, Exact>, THREADS));
    facts.push_back(kernel_facts("gelu_backward.naive", gelu_backward_naive_kernel<bfloat16, Exact>, THREADS));
    facts.push_back(
        kernel_facts("gelu_backward.vectorized", gelu_backward_vectorized_kernel<bfloat16, Exact>, THREADS));
}

}  // namespace kl
