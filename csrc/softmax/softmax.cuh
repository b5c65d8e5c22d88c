// softmax, shared by all rungs: y = exp(x − max x) / Σ exp(x − max x) along one dimension, and its gradient
// dx = y · (dy − Σ dy · y).
//
//   rung              the idea it adds                                             what limits it now
//   naive             one thread per row: maximum, sum, quotient, a pass each      uncoalesced reads, three of them
//   online            one block per row; maximum and sum in one pass, 16-byte      the second read of the input
//                     loads (Milakov and Gimelshein, arXiv:1805.02867)
//   shared            the row stays in shared memory: one read, one write          one row in flight per block
//   registers         the row stays in registers, shared by a part of a warp, a    rows that one block holds
//                     warp or a block
//   multirow          each thread holds vectors of up to four short rows           rows that one warp holds
//   cluster           the row is spread over the SMs of a cluster, which reduce    rows that a cluster's registers hold
//                     through distributed shared memory
//   cluster_two_pass  the row is read twice, the second time from L2               memory bandwidth
//
// Every rung takes any strides unless it says otherwise. Rows start where the other dimensions put them, and step by
// the stride of the dimension itself. `multirow` shares the backward kernel of `registers`; `registers` and `cluster`
// are instances of the device functions in row_in_registers.cuh.
#pragma once

#include "core/ops.h"
#include "reduce/rows.cuh"

namespace kl {

constexpr float NEG_INF = -std::numeric_limits<float>::infinity();

/// exp(x), within 2 ulp plus |x| / 2 ulp for the rounding of the scaled argument.
__device__ inline float fast_exp(float x) { return exp2_approx(x * LOG2E); }

/// The value to subtract while a row has seen `running_max`. A row of −inf so far must not poison the sum of what
/// follows, so it subtracts zero. fmaxf drops NaN; x − max is NaN for a NaN x and reaches the sum.
__device__ inline float finite_or_zero(float running_max) { return running_max == NEG_INF ? 0.0f : running_max; }

// ---- host ----------------------------------------------------------------------------------------------------------

/// Operands of one forward launch.
template <typename T_>
struct SoftmaxForward {
    using T = T_;
    T* output;
    const T* input;
    const Rows &out_rows, &in_rows;
    const RowLayout& layout;
    const Launch& launch;

    /// Whether both operands consist of aligned 16-byte vectors.
    bool vectorized() const { return in_rows.vectors<T>(layout.length) && out_rows.vectors<T>(layout.length); }
};

/// Operands of one backward launch.
template <typename T_>
struct SoftmaxBackward {
    using T = T_;
    T* grad_input;
    const T *grad, *output;
    const Rows &gi_rows, &g_rows, &o_rows;
    const RowLayout& layout;
    const Launch& launch;

    bool vectorized() const {
        return g_rows.vectors<T>(layout.length) && o_rows.vectors<T>(layout.length) &&
               gi_rows.vectors<T>(layout.length);
    }
};

/// Checks the operands, allocates the output and calls `launch_rung(SoftmaxForward<T>)`, unless there are no elements.
template <typename F>
Tensor softmax_forward(const Tensor& input, int64_t dim, F&& launch_rung) {
    check_cuda(input, "softmax", "input");
    const Launch launch(input);
    const RowLayout layout(input, dim, "softmax");
    Tensor output = layout.dense.allocate(input);
    if (input.numel() == 0) return output;
    const Rows in = layout.rows(input, "softmax"), out = layout.rows(output, "softmax");
    dispatch(input.scalar_type(), "softmax", [&](auto zero) {
        using T = decltype(zero);
        launch_rung(SoftmaxForward<T>{pointer<T>(output), pointer<T>(input), out, in, layout, launch});
    });
    KL_LAUNCH_CHECK();
    return output;
}

/// Checks the operands, allocates the gradient and calls `launch_rung(SoftmaxBackward<T>)`, unless there are no elements.
template <typename F>
Tensor softmax_backward(const Tensor& grad, const Tensor& output, int64_t dim, F&& launch_rung) {
    const char* const op = "softmax_backward";
    check_cuda(grad, op, "grad");
    check_like(output, grad, op, "output");
    check_same_shape(output, grad, op, "output");
    const Launch launch(output);
    const RowLayout layout(output, dim, op);
    Tensor grad_input = layout.dense.allocate(output);
    if (output.numel() == 0) return grad_input;
    const Rows g = layout.rows(grad, op), o = layout.rows(output, op), gi = layout.rows(grad_input, op);
    dispatch(output.scalar_type(), op, [&](auto zero) {
        using T = decltype(zero);
        launch_rung(
            SoftmaxBackward<T>{pointer<T>(grad_input), pointer<T>(grad), pointer<T>(output), gi, g, o, layout, launch});
    });
    KL_LAUNCH_CHECK();
    return grad_input;
}

}  // namespace kl
