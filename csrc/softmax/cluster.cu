// softmax, rung 6 of 7: cluster
// Idea      The SMs of a thread-block cluster share a row. Each block holds a part of it in registers; their states meet
//           through distributed shared memory (DSMEM).
// Predicts  2·N·sizeof(T) bytes per row up to 16 times the length that one block holds.
// Limit now Rows that outgrow the registers of the largest cluster.
// Next      `cluster_two_pass`: read the row twice, the second time from L2.
//
// It refuses rows that `registers` holds in one block in both passes. The forward pass holds one tile where the backward
// pass holds two. So rows of up to twice that length take one block in the forward pass, compiled without the cluster's
// barrier. In the backward pass they take a cluster of two.

#include "softmax/row_in_registers.cuh"

namespace kl {
namespace {

template <typename T, int V, bool VECTORIZED, bool CLUSTER>
__global__ void __launch_bounds__(ROW_THREADS, BLOCKS_AN_SM<VECTORIZED>)
    softmax_cluster_kernel(T* output, __grid_constant__ const Rows out_rows, const T* input,
                           __grid_constant__ const Rows in_rows, int64_t count, int64_t length) {
    softmax_in_registers<T, V, VECTORIZED, CLUSTER>(output, out_rows, input, in_rows, count, length);
}

template <typename T, bool VECTORIZED>
__global__ void __launch_bounds__(ROW_THREADS, BLOCKS_AN_SM<VECTORIZED>)
    softmax_backward_cluster_kernel(T* grad_input, __grid_constant__ const Rows gi_rows, const T* grad,
                                    __grid_constant__ const Rows g_rows, const T* output,
                                    __grid_constant__ const Rows o_rows, int64_t count, int64_t length) {
    softmax_backward_in_registers<T, VECTORIZED, true>(grad_input, gi_rows, grad, g_rows, output, o_rows, count,
                                                       length);
}

/// Raises where one block holds the row in both passes.
void check_long(int64_t chunks, int64_t length) {
    KL_CHECK(chunks > MAX_BLOCK_CHUNKS, "softmax: one block holds a row of ", length, " elements; use `registers`");
}

}  // namespace

Tensor softmax_cluster(const Tensor& input, int64_t dim) {
    return softmax_forward(input, dim, [](const auto& call) {
        using T = typename std::decay_t<decltype(call)>::T;
        const RowLayout& layout = call.layout;
        check_long(layout.chunks<T>(), layout.length);
        const bool vectorized = call.vectorized();
        const RowLaunch shape = row_launch(layout.chunks<T>(), true, vectorized ? WIDE_VECTORS : ROW_VECTORS);
        const auto launch = [&](auto kernel) {
            launch_rows(kernel, shape, shape.grid(layout.count), 0, call.launch, call.output, call.out_rows, call.input,
                        call.in_rows, layout.count, layout.length);
        };
        if (!vectorized) return launch(softmax_cluster_kernel<T, ROW_VECTORS, false, true>);
        if (shape.cluster == 1) return launch(softmax_cluster_kernel<T, WIDE_VECTORS, true, false>);
        launch(softmax_cluster_kernel<T, WIDE_VECTORS, true, true>);
    });
}

Tensor softmax_backward_cluster(const Tensor& grad, const Tensor& output, int64_t dim) {
    return softmax_backward(grad, output, dim, [](const auto& call) {
        using T = typename std::decay_t<decltype(call)>::T;
        const RowLayout& layout = call.layout;
        check_long(layout.chunks<T>(), layout.length);
        const RowLaunch shape = row_launch(layout.chunks<T>(), true);
        const auto kernel =
            call.vectorized() ? softmax_backward_cluster_kernel<T, true> : softmax_backward_cluster_kernel<T, false>;
        launch_rows(kernel, shape, shape.grid(layout.count), 0, call.launch, call.grad_input, call.gi_rows, call.grad,
                    call.g_rows, call.output, call.o_rows, layout.count, layout.length);
    });
}

void softmax_cluster_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    dispatch(dtype, "softmax", [&](auto zero) {
        using T = decltype(zero);
        attributes.push_back(
            kernel_attributes<softmax_cluster_kernel<T, WIDE_VECTORS, true, true>>("softmax.cluster", ROW_THREADS));
        attributes.push_back(kernel_attributes<softmax_cluster_kernel<T, WIDE_VECTORS, true, false>>(
            "softmax.cluster (one block)", ROW_THREADS));
        attributes.push_back(
            kernel_attributes<softmax_backward_cluster_kernel<T, true>>("softmax_backward.cluster", ROW_THREADS));
    });
}

}  // namespace kl
