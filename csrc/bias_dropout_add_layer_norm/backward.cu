// Bias, dropout, residual sum and LayerNorm: gradients of input and bias from the gradient of the sum, which
// layer_norm's backward pass makes.
// Rungs     naive One thread per column. Limit: few columns, few threads. registers The mask is drawn again, one call
//           of Philox for eight elements; each block sums a group of rows, and column_sum.cuh sums the groups.
//           All later rungs of the forward pass use this one.

#include "core/ops.h"
#include "core/philox.cuh"
#include "norm/naive.cuh"
#include "reduce/column_sum.cuh"

namespace kl {
namespace {

// One thread per column of the sum's gradient.
template <typename T>
__global__ void bias_dropout_add_layer_norm_backward_naive_kernel(T* grad_input, __grid_constant__ const Rows gi,
                                                                  T* grad_bias, const T* grad,
                                                                  __grid_constant__ const Rows g,
                                                                  __grid_constant__ const DropoutMask mask,
                                                                  int64_t count, int64_t length) {
    const int64_t column = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (column >= length) return;
    CompensatedSum sum;
    for (int64_t row = 0; row < count; ++row) {
        const float value = to_float(grad[g.start(row) + column * g.stride]) * mask.of(row * length + column);
        grad_input[gi.start(row) + column * gi.stride] = from_float<T>(value);
        sum.add(value);
    }
    grad_bias[column] = from_float<T>(sum.sum);
}

constexpr int DROP_THREADS = 256;
constexpr int ROWS_IN_FLIGHT = 4;
constexpr int DROP_BLOCKS_PER_SM = 4;

// Dropout of the sum's gradient, and its column sums over the block's group of rows. A block has blockDim.x vectors
// of columns, or as many single columns where not VECTORIZED. Partials are (groups, length).
template <typename T, bool VECTORIZED>
__global__ void __launch_bounds__(DROP_THREADS, DROP_BLOCKS_PER_SM)
    bias_dropout_add_layer_norm_backward_registers_kernel(T* grad_input, __grid_constant__ const Rows gi,
                                                          float* partials, const T* grad,
                                                          __grid_constant__ const Rows g,
                                                          __grid_constant__ const DropoutMask mask, int64_t count,
                                                          int64_t length, int64_t rows_per_group) {
    pdl_begin();
    constexpr int E = VECTORIZED ? Vec<T>::size : 1, DRAWS = sizeof(T) == 2 ? 2 : 1;
    __shared__ float sums[DROP_THREADS * E];
    const int64_t column = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * E, group = blockIdx.y;
    const int64_t end = min(count, (group + 1) * rows_per_group);
    float sum[E] = {};
    for (int64_t first = group * rows_per_group + threadIdx.y; first < end && column < length;
         first += blockDim.y * ROWS_IN_FLIGHT) {
        float x[ROWS_IN_FLIGHT][E];
        uint4 words[ROWS_IN_FLIGHT], drawn[DRAWS];
        if constexpr (VECTORIZED) {
#pragma unroll
            for (int r = 0; r < ROWS_IN_FLIGHT; ++r) {
                const int64_t row = first + r * blockDim.y;
                if (row < end) words[r] = *reinterpret_cast<const uint4*>(grad + g.start(row) + column);
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS_IN_FLIGHT; ++r) {
            const int64_t row = first + r * blockDim.y;
            if (row >= end) break;
            const uint64_t index = row * length + column;
            if constexpr (VECTORIZED) {
                if (r % DRAWS == 0) {
                    mask.template draw<E>(drawn,
                                          [&](int i) -> uint64_t { return (index + i * blockDim.y * length) / E; });
                }
                unpack(reinterpret_cast<const Vec<T>&>(words[r]), x[r]);
                mask.apply(x[r], drawn[r % DRAWS]);
                store_vec(grad_input + gi.start(row) + column, pack<T>(x[r]));
            } else {
                x[r][0] = to_float(grad[g.start(row) + column * g.stride]) * mask.of(index);
                grad_input[gi.start(row) + column * gi.stride] = from_float<T>(x[r][0]);
            }
#pragma unroll
            for (int e = 0; e < E; ++e) sum[e] += x[r][e];
        }
    }
    store_partial(partials + group * length, sum, sums, length);
}

template <typename T>
__global__ void __launch_bounds__(SUM_THREADS)
    bias_dropout_add_layer_norm_backward_registers_sum_kernel(T* output, const float* partials, int64_t groups,
                                                              int64_t columns) {
    pdl_begin();
    sum_partials(output, partials, groups, columns);
}

// ---- host ----------------------------------------------------------------------------------------------------------

constexpr const char* BACKWARD_NAME = "bias_dropout_add_layer_norm_backward";

}  // namespace

/// Gradients of input and bias from the sum's.
template <NormStep STEP>
std::tuple<Tensor, Tensor> bias_dropout_add_layer_norm_backward(const Tensor& grad, int64_t threshold, double scale,
                                                                int64_t seed) {
    check_cuda(grad, BACKWARD_NAME, "grad");
    KL_CHECK(grad.dim() > 0, BACKWARD_NAME, ": argument `grad` must have at least one dimension");
    const DropoutMask mask(threshold, scale, seed, BACKWARD_NAME);
    const Launch launch(grad);
    const RowLayout layout(grad, -1, BACKWARD_NAME, /*row_major=*/true);
    Tensor grad_input = layout.dense.allocate(grad);
    Tensor grad_bias = empty(grad, grad.scalar_type(), {layout.length});
    if (layout.length == 0) return {grad_input, grad_bias};
    const Rows g = layout.rows(grad, BACKWARD_NAME), gi = layout.rows(grad_input, BACKWARD_NAME);
    const int64_t count = layout.count, length = layout.length;
    dispatch(grad.scalar_type(), BACKWARD_NAME, [&](auto zero) {
        using T = decltype(zero);
        auto *const to = pointer<T>(grad_input), *const bias = pointer<T>(grad_bias), *const from = pointer<T>(grad);
        if constexpr (STEP == NormStep::naive) {
            const auto grid = grid_size(ceil_div(length, NORM_NAIVE_THREADS));
            bias_dropout_add_layer_norm_backward_naive_kernel<T>
                <<<grid, NORM_NAIVE_THREADS, 0, launch.stream>>>(to, gi, bias, from, g, mask, count, length);
        } else {
            const auto sum_up = [&](const float* partials, int64_t groups) {
                launch_pdl(bias_dropout_add_layer_norm_backward_registers_sum_kernel<T>, blocks_of_columns(length),
                           sum_block(length), launch, bias, partials, groups, length);
            };
            if (count == 0) return sum_up(nullptr, 0);  // a sum of nothing: zero
            const bool whole = g.template vectors<T>(length) && gi.template vectors<T>(length);
            const int64_t chunks = whole ? layout.chunks<T>() : length;
            const dim3 block = column_block(chunks, DROP_THREADS);
            const int64_t column_blocks = ceil_div(chunks, block.x);
            const int64_t most =
                row_groups(count, column_blocks, DROP_BLOCKS_PER_SM, block.y * ROWS_IN_FLIGHT, launch.device);
            const int64_t rows_per_group = ceil_div(count, most), groups = ceil_div(count, rows_per_group);
            const Tensor partials = empty(grad, ScalarType::Float, {groups, length});
            const dim3 grid(grid_size(column_blocks), grid_size(groups));
            const auto kernel = whole ? bias_dropout_add_layer_norm_backward_registers_kernel<T, true>
                                      : bias_dropout_add_layer_norm_backward_registers_kernel<T, false>;
            launch_pdl(kernel, grid, block, launch, to, gi, pointer<float>(partials), from, g, mask, count, length,
                       rows_per_group);
            sum_up(pointer<float>(partials), groups);
        }
    });
    KL_LAUNCH_CHECK();
    return {grad_input, grad_bias};
}

KL_NORM_RUNG(bias_dropout_add_layer_norm_backward, naive)
KL_NORM_RUNG(bias_dropout_add_layer_norm_backward, registers)

void bias_dropout_add_layer_norm_backward_kernel_attributes(std::vector<KernelAttributes>& attributes,
                                                            ScalarType dtype) {
    dispatch(dtype, BACKWARD_NAME, [&](auto zero) {
        using T = decltype(zero);
        const auto add = [&](const char* rung, KernelAttributes fact) {
            fact.name = std::string(BACKWARD_NAME) + "." + rung;
            attributes.push_back(fact);
        };
        add("naive", kernel_attributes<bias_dropout_add_layer_norm_backward_naive_kernel<T>>("", NORM_NAIVE_THREADS));
        add("registers",
            kernel_attributes<bias_dropout_add_layer_norm_backward_registers_kernel<T, true>>("", DROP_THREADS));
        add("registers (sum)",
            kernel_attributes<bias_dropout_add_layer_norm_backward_registers_sum_kernel<T>>("", SUM_THREADS));
    });
}

}  // namespace kl
