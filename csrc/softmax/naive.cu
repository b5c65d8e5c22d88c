// softmax, rung 1 of 7: naive
// Idea      One thread per row: a pass for the maximum, a pass for the sum, a pass for the quotient.
// Predicts  3 reads and 1 write of N·sizeof(T) bytes per row; the backward pass 4 reads and 1 write.
// Limit now Neighbouring threads read N elements apart, so each load takes a sector of its own.
// Next      `online`: one block per row, whose threads read side by side.

#include "softmax/softmax.cuh"

namespace kl {
namespace {

constexpr int NAIVE_THREADS = 128;

template <typename T>
__global__ void softmax_naive_kernel(T* output, Rows out_rows, const T* input, Rows in_rows, int64_t count,
                                     int64_t length) {
    const int64_t row = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (row >= count) return;
    const T* in = input + in_rows.start(row);
    T* out = output + out_rows.start(row);
    float row_max = Max::identity;
    CompensatedSum row_sum;
    for (int64_t i = 0; i < length; ++i) row_max = Max{}(row_max, to_float(in[i * in_rows.stride]));
    for (int64_t i = 0; i < length; ++i) row_sum.add(fast_exp(to_float(in[i * in_rows.stride]) - row_max));
    for (int64_t i = 0; i < length; ++i) {
        out[i * out_rows.stride] = from_float<T>(fast_exp(to_float(in[i * in_rows.stride]) - row_max) / row_sum.sum);
    }
}

template <typename T>
__global__ void softmax_backward_naive_kernel(T* grad_input, Rows gi_rows, const T* grad, Rows g_rows, const T* output,
                                              Rows o_rows, int64_t count, int64_t length) {
    const int64_t row = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (row >= count) return;
    const T* g = grad + g_rows.start(row);
    const T* o = output + o_rows.start(row);
    T* gi = grad_input + gi_rows.start(row);
    CompensatedSum dot;
    for (int64_t i = 0; i < length; ++i) dot.add(to_float(g[i * g_rows.stride]) * to_float(o[i * o_rows.stride]));
    for (int64_t i = 0; i < length; ++i) {
        const float y = to_float(o[i * o_rows.stride]);
        gi[i * gi_rows.stride] = from_float<T>(y * (to_float(g[i * g_rows.stride]) - dot.sum));
    }
}

}  // namespace

Tensor softmax_naive(const Tensor& input, int64_t dim) {
    return softmax_forward(input, dim, [](const auto& call) {
        using T = typename std::decay_t<decltype(call)>::T;
        const auto grid = grid_size(ceil_div(call.layout.count, NAIVE_THREADS));
        softmax_naive_kernel<T><<<grid, NAIVE_THREADS, 0, call.launch.stream>>>(
            call.output, call.out_rows, call.input, call.in_rows, call.layout.count, call.layout.length);
    });
}

Tensor softmax_backward_naive(const Tensor& grad, const Tensor& output, int64_t dim) {
    return softmax_backward(grad, output, dim, [](const auto& call) {
        using T = typename std::decay_t<decltype(call)>::T;
        const auto grid = grid_size(ceil_div(call.layout.count, NAIVE_THREADS));
        softmax_backward_naive_kernel<T><<<grid, NAIVE_THREADS, 0, call.launch.stream>>>(
            call.grad_input, call.gi_rows, call.grad, call.g_rows, call.output, call.o_rows, call.layout.count,
            call.layout.length);
    });
}

void softmax_naive_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    dispatch(dtype, "softmax", [&](auto zero) {
        using T = decltype(zero);
        attributes.push_back(kernel_attributes<softmax_naive_kernel<T>>("softmax.naive", NAIVE_THREADS));
        attributes.push_back(
            kernel_attributes<softmax_backward_naive_kernel<T>>("softmax_backward.naive", NAIVE_THREADS));
    });
}

}  // namespace kl
