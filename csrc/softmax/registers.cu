// softmax, rung 4 of 7: registers
// Idea      The row stays in registers: one read, one write, one merged reduction of maximum and sum. As many threads
//           share a row as suit its length: a part of a warp, a warp, or a block.
// Predicts  2·N·sizeof(T) bytes per row as in `shared`, without its second reduction and its traffic in shared memory.
// Limit now Short rows: the instructions around each row. Long rows: the registers of one block.
// Next      `multirow` for short rows: several rows per thread. `cluster` for long rows: several SMs per row.

#include "softmax/row_in_registers.cuh"

namespace kl {
namespace {

template <typename T, int V, bool VECTORIZED>
__global__ void __launch_bounds__(ROW_THREADS, BLOCKS_AN_SM<VECTORIZED>)
    softmax_registers_kernel(T* output, __grid_constant__ const Rows out_rows, const T* input,
                             __grid_constant__ const Rows in_rows, int64_t count, int64_t length) {
    softmax_in_registers<T, V, VECTORIZED, false>(output, out_rows, input, in_rows, count, length);
}

template <typename T, bool VECTORIZED>
__global__ void __launch_bounds__(ROW_THREADS, BLOCKS_AN_SM<VECTORIZED>)
    softmax_backward_registers_kernel(T* grad_input, __grid_constant__ const Rows gi_rows, const T* grad,
                                      __grid_constant__ const Rows g_rows, const T* output,
                                      __grid_constant__ const Rows o_rows, int64_t count, int64_t length) {
    softmax_backward_in_registers<T, VECTORIZED, false>(grad_input, gi_rows, grad, g_rows, output, o_rows, count,
                                                        length);
}

}  // namespace

Tensor softmax_registers(const Tensor& input, int64_t dim) {
    return softmax_forward(input, dim, [](const auto& call) {
        using T = typename std::decay_t<decltype(call)>::T;
        const RowLayout& layout = call.layout;
        const bool vectorized = call.vectorized();
        const RowLaunch shape = row_launch(layout.chunks<T>(), false, vectorized ? WIDE_VECTORS : ROW_VECTORS,
                                           /*narrow=*/512, /*whole_warps=*/true);
        const auto launch = [&](auto kernel) {
            launch_rows(kernel, shape, shape.grid(layout.count), 0, call.launch, call.output, call.out_rows, call.input,
                        call.in_rows, layout.count, layout.length);
        };
        if (!vectorized) return launch(softmax_registers_kernel<T, ROW_VECTORS, false>);
        if (shape.vectors == ROW_VECTORS) return launch(softmax_registers_kernel<T, ROW_VECTORS, true>);
        launch(softmax_registers_kernel<T, WIDE_VECTORS, true>);
    });
}

Tensor softmax_backward_registers(const Tensor& grad, const Tensor& output, int64_t dim) {
    return softmax_backward(grad, output, dim, [](const auto& call) {
        using T = typename std::decay_t<decltype(call)>::T;
        const RowLayout& layout = call.layout;
        const RowLaunch shape = row_launch(layout.chunks<T>(), false);
        const auto kernel = call.vectorized() ? softmax_backward_registers_kernel<T, true>
                                              : softmax_backward_registers_kernel<T, false>;
        launch_rows(kernel, shape, shape.grid(layout.count), 0, call.launch, call.grad_input, call.gi_rows, call.grad,
                    call.g_rows, call.output, call.o_rows, layout.count, layout.length);
    });
}

void softmax_registers_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    dispatch(dtype, "softmax", [&](auto zero) {
        using T = decltype(zero);
        attributes.push_back(
            kernel_attributes<softmax_registers_kernel<T, ROW_VECTORS, true>>("softmax.registers", MIN_BLOCK));
        attributes.push_back(
            kernel_attributes<softmax_backward_registers_kernel<T, true>>("softmax_backward.registers", MIN_BLOCK));
    });
}

}  // namespace kl
