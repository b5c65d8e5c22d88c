// swiglu: silu(gate) · up, with silu(x) = x · sigmoid(x) (Shazeer, arXiv:2002.05202).
//
// Both rungs take any strides; the halves of one tensor, the usual operands, are read in vectors (core/elementwise.cuh).
// Outputs keep the memory order of a dense gate. `vectorized` shares the element-wise function of `naive` for what is
// no whole vector.

#include "core/elementwise.cuh"
#include "core/ops.h"

namespace kl {
namespace {

/// sigmoid(x) and its slope, from exp(−|x|): without overflow or cancellation.
__device__ inline float sigmoid(float x, float* slope) {
    const float e = exp2_approx(-LOG2E * fabsf(x));
    const float p = rcp_approx(1.0f + e);
    *slope = e * p * p;
    return x >= 0.0f ? p : e * p;
}

__device__ inline float forward(float gate, float up) {
    return gate * rcp_approx(1.0f + exp2_approx(-LOG2E * gate)) * up;
}

__device__ inline void backward(float grad, float gate, float up, float* grad_gate, float* grad_up) {
    float slope;
    const float s = sigmoid(gate, &slope);
    *grad_gate = grad * up * fmaf(gate, slope, s);
    *grad_up = grad * (gate * s);
}

enum { OUTPUT, GATE, UP, OPERANDS };
enum { GRAD_GATE, GRAD_UP, GRAD, GATE_AGAIN, UP_AGAIN, BACKWARD_OPERANDS };

// swiglu, rung 1 of 2: naive
// Idea      One fused kernel, one element per thread.
// Predicts  3·sizeof(T) bytes per element; 5·sizeof(T) backward.
// Limit now 2-byte loads leave too few bytes in flight.
// Next      `vectorized`: 16-byte loads and stores.

template <typename T>
__device__ void swiglu_element(T* output, const T* gate, const T* up, const Operands<OPERANDS>& at, int64_t i) {
    output[at.offset(OUTPUT, i)] =
        from_float<T>(forward(to_float(gate[at.offset(GATE, i)]), to_float(up[at.offset(UP, i)])));
}

template <typename T>
__device__ void swiglu_backward_element(T* grad_gate, T* grad_up, const T* grad, const T* gate, const T* up,
                                        const Operands<BACKWARD_OPERANDS>& at, int64_t i) {
    float gg, gu;
    backward(to_float(grad[at.offset(GRAD, i)]), to_float(gate[at.offset(GATE_AGAIN, i)]),
             to_float(up[at.offset(UP_AGAIN, i)]), &gg, &gu);
    grad_gate[at.offset(GRAD_GATE, i)] = from_float<T>(gg);
    grad_up[at.offset(GRAD_UP, i)] = from_float<T>(gu);
}

template <typename T>
__global__ void swiglu_naive_kernel(T* output, const T* gate, const T* up,
                                    __grid_constant__ const Operands<OPERANDS> at, int64_t numel) {
    const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (i < numel) swiglu_element(output, gate, up, at, i);
}

template <typename T>
__global__ void swiglu_backward_naive_kernel(T* grad_gate, T* grad_up, const T* grad, const T* gate, const T* up,
                                             __grid_constant__ const Operands<BACKWARD_OPERANDS> at, int64_t numel) {
    const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (i < numel) swiglu_backward_element(grad_gate, grad_up, grad, gate, up, at, i);
}

// swiglu, rung 2 of 2: vectorized
// Idea      16-byte loads and stores; launched with programmatic dependent launch (PDL).
// Predicts  The same bytes with an eighth of the load instructions in 16 bits, a quarter in float32.
// Limit now Memory bandwidth.
// Next      –

template <typename T, Access ACCESS>
__global__ void __launch_bounds__(THREADS)
    swiglu_vectorized_kernel(T* output, const T* gate, const T* up, __grid_constant__ const Operands<OPERANDS> at,
                             int64_t numel) {
    pdl_begin();
    constexpr int SIZE = Vec<T>::size;
    const int64_t first = (int64_t{blockIdx.x} * THREADS + threadIdx.x) * SIZE;
    if (!is_vector<ACCESS, T>(first, numel)) {
#pragma unroll 1
        for (int64_t i = first; i < first + SIZE && i < numel; ++i) swiglu_element(output, gate, up, at, i);
        return;
    }
    const Vec<T> gate_vec = load_vec(evict_last(gate + vector_offset<ACCESS, T>(at, GATE, first)));
    const Vec<T> up_vec = load_vec(evict_last(up + vector_offset<ACCESS, T>(at, UP, first)));
    float x[SIZE], u[SIZE];
    unpack(gate_vec, x);
    unpack(up_vec, u);
#pragma unroll
    for (int e = 0; e < SIZE; ++e) x[e] = forward(x[e], u[e]);
    store_vec(output + vector_offset<ACCESS, T>(at, OUTPUT, first), pack<T>(x));
}

template <typename T, Access ACCESS>
__global__ void __launch_bounds__(THREADS)
    swiglu_backward_vectorized_kernel(T* grad_gate, T* grad_up, const T* grad, const T* gate, const T* up,
                                      __grid_constant__ const Operands<BACKWARD_OPERANDS> at, int64_t numel) {
    pdl_begin();
    constexpr int SIZE = Vec<T>::size;
    const int64_t first = (int64_t{blockIdx.x} * THREADS + threadIdx.x) * SIZE;
    if (!is_vector<ACCESS, T>(first, numel)) {
#pragma unroll 1
        for (int64_t i = first; i < first + SIZE && i < numel; ++i) {
            swiglu_backward_element(grad_gate, grad_up, grad, gate, up, at, i);
        }
        return;
    }
    const Vec<T> gate_vec = load_vec(evict_last(gate + vector_offset<ACCESS, T>(at, GATE_AGAIN, first)));
    const Vec<T> up_vec = load_vec(evict_last(up + vector_offset<ACCESS, T>(at, UP_AGAIN, first)));
    const Vec<T> grad_vec = load_vec(evict_last(grad + vector_offset<ACCESS, T>(at, GRAD, first)));
    float x[SIZE], u[SIZE], g[SIZE];
    unpack(gate_vec, x);
    unpack(up_vec, u);
    unpack(grad_vec, g);
#pragma unroll
    for (int e = 0; e < SIZE; ++e) backward(g[e], x[e], u[e], &x[e], &u[e]);
    store_vec(grad_gate + vector_offset<ACCESS, T>(at, GRAD_GATE, first), pack<T>(x));
    store_vec(grad_up + vector_offset<ACCESS, T>(at, GRAD_UP, first), pack<T>(u));
}

// ---- host ----------------------------------------------------------------------------------------------------------

Tensor swiglu(const Tensor& gate, const Tensor& up, bool vectorized) {
    check_cuda(gate, "swiglu", "gate");
    check_like(up, gate, "swiglu", "up");
    check_same_shape(up, gate, "swiglu", "up");
    const Launch launch(gate);
    const DenseLike layout(gate);
    Tensor output = layout.allocate(gate);
    const int64_t numel = gate.numel();
    if (numel == 0) return output;
    const Operands<OPERANDS> operands(layout.order, {&output, &gate, &up}, "swiglu");
    dispatch(gate.scalar_type(), "swiglu", [&](auto zero) {
        using T = decltype(zero);
        auto* out = static_cast<T*>(output.data_ptr());
        const auto* x = static_cast<const T*>(gate.data_ptr());
        const auto* u = static_cast<const T*>(up.data_ptr());
        if (!vectorized) {
            const auto grid = grid_size(ceil_div(numel, THREADS));
            swiglu_naive_kernel<T><<<grid, THREADS, 0, launch.stream>>>(out, x, u, operands, numel);
            return;
        }
        const auto grid = grid_size(ceil_div(numel, int64_t{THREADS} * Vec<T>::size));
        dispatch_access(operands.access, [&](auto access) {
            launch_pdl(swiglu_vectorized_kernel<T, access.value>, grid, THREADS, launch, out, x, u, operands, numel);
        });
    });
    KL_LAUNCH_CHECK();
    return output;
}

std::tuple<Tensor, Tensor> swiglu_backward(const Tensor& grad, const Tensor& gate, const Tensor& up, bool vectorized) {
    check_cuda(grad, "swiglu_backward", "grad");
    check_like(gate, grad, "swiglu_backward", "gate");
    check_same_shape(gate, grad, "swiglu_backward", "gate");
    check_like(up, grad, "swiglu_backward", "up");
    check_same_shape(up, grad, "swiglu_backward", "up");
    const Launch launch(gate);
    const DenseLike layout(gate);
    Tensor grad_gate = layout.allocate(gate), grad_up = layout.allocate(gate);
    const int64_t numel = gate.numel();
    if (numel == 0) return {grad_gate, grad_up};
    const Operands<BACKWARD_OPERANDS> operands(layout.order, {&grad_gate, &grad_up, &grad, &gate, &up},
                                               "swiglu_backward");
    dispatch(gate.scalar_type(), "swiglu_backward", [&](auto zero) {
        using T = decltype(zero);
        auto* gg = static_cast<T*>(grad_gate.data_ptr());
        auto* gu = static_cast<T*>(grad_up.data_ptr());
        const auto* g = static_cast<const T*>(grad.data_ptr());
        const auto* x = static_cast<const T*>(gate.data_ptr());
        const auto* u = static_cast<const T*>(up.data_ptr());
        if (!vectorized) {
            const auto grid = grid_size(ceil_div(numel, THREADS));
            swiglu_backward_naive_kernel<T><<<grid, THREADS, 0, launch.stream>>>(gg, gu, g, x, u, operands, numel);
            return;
        }
        const auto grid = grid_size(ceil_div(numel, int64_t{THREADS} * Vec<T>::size));
        dispatch_access(operands.access, [&](auto access) {
            launch_pdl(swiglu_backward_vectorized_kernel<T, access.value>, grid, THREADS, launch, gg, gu, g, x, u,
                       operands, numel);
        });
    });
    KL_LAUNCH_CHECK();
    return {grad_gate, grad_up};
}

}  // namespace

Tensor swiglu_naive(const Tensor& gate, const Tensor& up) { return swiglu(gate, up, false); }
Tensor swiglu_vectorized(const Tensor& gate, const Tensor& up) { return swiglu(gate, up, true); }
std::tuple<Tensor, Tensor> swiglu_backward_naive(const Tensor& grad, const Tensor& gate, const Tensor& up) {
    return swiglu_backward(grad, gate, up, false);
}
std::tuple<Tensor, Tensor> swiglu_backward_vectorized(const Tensor& grad, const Tensor& gate, const Tensor& up) {
    return swiglu_backward(grad, gate, up, true);
}

void swiglu_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    dispatch(dtype, "swiglu", [&](auto zero) {
        using T = decltype(zero);
        constexpr auto DENSE = Access::dense;
        attributes.push_back(kernel_attributes<swiglu_naive_kernel<T>>("swiglu.naive", THREADS));
        attributes.push_back(kernel_attributes<swiglu_vectorized_kernel<T, DENSE>>("swiglu.vectorized", THREADS));
        attributes.push_back(kernel_attributes<swiglu_backward_naive_kernel<T>>("swiglu_backward.naive", THREADS));
        attributes.push_back(
            kernel_attributes<swiglu_backward_vectorized_kernel<T, DENSE>>("swiglu_backward.vectorized", THREADS));
    });
}

}  // namespace kl
