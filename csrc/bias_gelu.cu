// bias_gelu: gelu(input + bias), with the bias along the last dimension. core/gelu.cuh has the exact and the tanh form.
//
// The bias is added in float32, and the sum is not rounded before the GELU. The output keeps the memory order of a dense
// input. `vectorized` shares the backward kernels of `multirow`.

#include <tuple>

#include "core/elementwise.cuh"
#include "core/gelu.cuh"
#include "core/ops.h"
#include "reduce/column_sum.cuh"

namespace kl {
namespace {

constexpr int ROWS = 4;  // per thread in the forward pass of `multirow`: as many loads in flight
constexpr int BACKWARD_THREADS = 512;
constexpr int ROWS_IN_FLIGHT = 2;  // per thread in the backward pass, for each of two operands
constexpr int BACKWARD_BLOCKS_PER_SM = 2;

/// An operand as rows of its last dimension.
struct Matrix {
    Strided rows;
    int64_t step;

    int64_t step_of_rows() const { return rows.dims > 0 ? rows.strides[0] : 0; }
    /// Offset of an element. VECTORIZED: rows lie at one stride and start on 16 bytes.
    template <bool VECTORIZED>
    __device__ int64_t at(int64_t row, int64_t column) const {
        return VECTORIZED ? row * rows.strides[0] + column : rows.offset(row) + column * step;
    }
};

/// Columns per load: a vector of 16 bytes, or one element where an operand does not allow vectors.
template <typename T, bool VECTORIZED>
constexpr int WIDTH = VECTORIZED ? Vec<T>::size : 1;

template <typename T, bool VECTORIZED>
struct Chunk {
    std::conditional_t<VECTORIZED, Vec<T>, T> data;

    __device__ void load(const T* pointer) { data = *reinterpret_cast<const decltype(data)*>(pointer); }
    __device__ void floats(float (&x)[WIDTH<T, VECTORIZED>]) const {
        if constexpr (VECTORIZED) {
            unpack(data, x);
        } else {
            x[0] = to_float(data);
        }
    }
    __device__ static void store(T* pointer, const float (&x)[WIDTH<T, VECTORIZED>]) {
        if constexpr (VECTORIZED) {
            store_vec(pointer, pack<T>(x));
        } else {
            *pointer = from_float<T>(x[0]);
        }
    }
};

template <typename T, bool VECTORIZED>
__device__ void load_bias(float (&b)[WIDTH<T, VECTORIZED>], const T* bias, int64_t step, int64_t column) {
    Chunk<T, VECTORIZED> chunk;
    chunk.load(bias + column * (VECTORIZED ? 1 : step));
    chunk.floats(b);
}

// bias_gelu, rung 1 of 3: naive
// Idea      One fused kernel, one element per thread. Backward: one thread per column walks down all rows.
// Predicts  2·sizeof(T) bytes per element: one read and one write, where two PyTorch operators take two of each.
// Limit now 2-byte loads leave too few bytes in flight. Backward: a row of threads for the whole GPU.
// Next      `vectorized`: 16-byte loads and stores.

template <typename T, typename Form>
__global__ void bias_gelu_naive_kernel(T* output, __grid_constant__ const Matrix out, const T* input,
                                       __grid_constant__ const Matrix in, const T* bias, int64_t bias_step,
                                       int64_t rows, int64_t columns) {
    const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x, row = i / columns, column = i % columns;
    if (row >= rows) return;
    const float x = to_float(input[in.at<false>(row, column)]) + to_float(bias[column * bias_step]);
    output[out.at<false>(row, column)] = from_float<T>(Form::forward(x));
}

template <typename T, typename Form>
__global__ void bias_gelu_backward_naive_kernel(T* grad_input, __grid_constant__ const Matrix out, T* grad_bias,
                                                const T* grad, __grid_constant__ const Matrix gr, const T* input,
                                                __grid_constant__ const Matrix in, const T* bias, int64_t bias_step,
                                                int64_t rows, int64_t columns) {
    const int64_t column = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (column >= columns) return;
    const float b = to_float(bias[column * bias_step]);
    CompensatedSum sum;
    for (int64_t row = 0; row < rows; ++row) {
        const float x = to_float(input[in.at<false>(row, column)]) + b;
        const float g = to_float(grad[gr.at<false>(row, column)]) * Form::derivative(x);
        grad_input[out.at<false>(row, column)] = from_float<T>(g);
        sum.add(g);
    }
    grad_bias[column] = from_float<T>(sum.sum);
}

// bias_gelu, rung 2 of 3: vectorized
// Idea      One vector of 16 bytes per thread, over all rows one after the other.
// Predicts  The same bytes with an eighth of the load instructions in 16 bits, a quarter in float32.
// Limit now Each thread loads its bias and computes its row and column for one vector of output.
// Next      `multirow`: load the bias once for several rows.
//
// It takes rows of whole aligned vectors at one stride. Its blocks are four times as many as those of `multirow`, so
// that the last wave leaves fewer SMs idle where there are few blocks.

template <typename T, typename Form>
__global__ void __launch_bounds__(THREADS)
    bias_gelu_vectorized_kernel(T* output, const T* input, const T* bias, int64_t out_step, int64_t in_step,
                                uint32_t vectors, __grid_constant__ const Divisor vectors_a_row) {
    pdl_begin();
    constexpr int N = Vec<T>::size;
    const uint32_t i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= vectors) return;
    const uint32_t row = vectors_a_row.quotient(i), column = vectors_a_row.remainder(i) * N;
    const Vec<T> part = load_vec(evict_last(input + (row * in_step + column))), own = load_vec(bias + column);
    float x[N], b[N];
    unpack(part, x);
    unpack(own, b);
#pragma unroll
    for (int e = 0; e < N; ++e) x[e] = Form::forward(x[e] + b[e]);
    store_vec(output + (row * out_step + column), pack<T>(x));
}

// bias_gelu, rung 3 of 3: multirow
// Idea      Each thread keeps its vector of the bias in registers and applies it to four rows. Backward: a block sums a
//           group of rows into partials, and a second kernel sums the partials in a fixed order.
// Predicts  Forward: one load of bias per four vectors. Backward: 3·sizeof(T) bytes per element, and the partials.
// Limit now Memory bandwidth; the exact (erf) form also issue slots.
// Next      –
//
// It takes any strides: without VECTORIZED a thread takes one column instead of a vector.

template <typename T, typename Form, bool VECTORIZED>
__global__ void __launch_bounds__(THREADS)
    bias_gelu_multirow_kernel(T* output, __grid_constant__ const Matrix out, const T* input,
                              __grid_constant__ const Matrix in, const T* bias, int64_t bias_step, int64_t rows,
                              int64_t columns, __grid_constant__ const Divisor column_blocks) {
    pdl_begin();
    constexpr int N = WIDTH<T, VECTORIZED>;
    const uint32_t row_block = column_blocks.quotient(blockIdx.x), column_block = column_blocks.remainder(blockIdx.x);
    const int64_t column = (int64_t{column_block} * blockDim.x + threadIdx.x) * N;
    if (column >= columns) return;
    const int64_t first = int64_t{row_block} * (blockDim.y * ROWS) + threadIdx.y;
    Chunk<T, VECTORIZED> chunks[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const int64_t row = first + r * blockDim.y;
        if (row < rows) chunks[r].load(evict_last(input + in.at<VECTORIZED>(row, column)));
    }
    float b[N], x[N];
    load_bias<T, VECTORIZED>(b, bias, bias_step, column);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const int64_t row = first + r * blockDim.y;
        if (row >= rows) return;
        chunks[r].floats(x);
#pragma unroll
        for (int e = 0; e < N; ++e) x[e] = Form::forward(x[e] + b[e]);
        Chunk<T, VECTORIZED>::store(output + out.at<VECTORIZED>(row, column), x);
    }
}

/// Grid (column blocks, groups of rows). A block takes blockDim.x · N columns down its group of rows and writes its row of
/// the partials (groups, columns).
template <typename T, typename Form, bool VECTORIZED>
__global__ void __launch_bounds__(BACKWARD_THREADS, BACKWARD_BLOCKS_PER_SM)
    bias_gelu_backward_multirow_kernel(T* grad_input, __grid_constant__ const Matrix out, float* partials,
                                       const T* grad, __grid_constant__ const Matrix gr, const T* input,
                                       __grid_constant__ const Matrix in, const T* bias, int64_t bias_step,
                                       int64_t rows, int64_t columns, int64_t rows_per_group) {
    pdl_begin();
    constexpr int N = WIDTH<T, VECTORIZED>;
    __shared__ float sums[BACKWARD_THREADS * N];
    const int64_t column = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * N, group = blockIdx.y;
    const int64_t end = min(rows, (group + 1) * rows_per_group);
    float b[N] = {}, sum[N] = {};
    if (column < columns) load_bias<T, VECTORIZED>(b, bias, bias_step, column);
    // A thread takes every blockDim.y-th row, ROWS_IN_FLIGHT at once.
    for (int64_t first = group * rows_per_group + threadIdx.y; first < end && column < columns;
         first += blockDim.y * ROWS_IN_FLIGHT) {
        Chunk<T, VECTORIZED> grads[ROWS_IN_FLIGHT], inputs[ROWS_IN_FLIGHT];
#pragma unroll
        for (int r = 0; r < ROWS_IN_FLIGHT; ++r) {
            const int64_t row = first + r * blockDim.y;
            if (row < end) grads[r].load(evict_last(grad + gr.at<VECTORIZED>(row, column)));
            if (row < end) inputs[r].load(evict_last(input + in.at<VECTORIZED>(row, column)));
        }
#pragma unroll
        for (int r = 0; r < ROWS_IN_FLIGHT; ++r) {
            const int64_t row = first + r * blockDim.y;
            if (row >= end) break;
            float g[N], x[N];
            grads[r].floats(g);
            inputs[r].floats(x);
#pragma unroll
            for (int e = 0; e < N; ++e) {
                g[e] *= Form::derivative(x[e] + b[e]);
                sum[e] += g[e];
            }
            Chunk<T, VECTORIZED>::store(grad_input + out.at<VECTORIZED>(row, column), g);
        }
    }
    store_partial(partials + group * columns, sum, sums, columns);
}

template <typename T>
__global__ void __launch_bounds__(SUM_THREADS)
    bias_gelu_backward_multirow_sum_kernel(T* output, const float* partials, int64_t groups, int64_t columns) {
    pdl_begin();
    sum_partials(output, partials, groups, columns);
}

// ---- host ----------------------------------------------------------------------------------------------------------

/// Rows in the order of the logical dimensions; the last dimension runs along the row.
Matrix as_matrix(const Tensor& tensor, const char* op) {
    const int64_t last = tensor.dim() - 1;
    return {collapse(tensor.sizes().data(), tensor.strides().data(), last, op), tensor.stride(last)};
}

/// Whether every row of every operand consists of aligned vectors of 16 bytes, at one stride.
template <typename T>
bool are_vectors(const Tensor& bias, const std::vector<std::pair<const Tensor*, const Matrix*>>& operands) {
    const int64_t columns = bias.size(0);
    bool vectors = columns % Vec<T>::size == 0 && is_aligned16(bias.data_ptr()) && bias.stride(0) == 1;
    for (const auto& [tensor, matrix] : operands) {
        vectors = vectors && matrix->step == 1 && is_aligned16(tensor->data_ptr()) && matrix->rows.dims <= 1 &&
                  (matrix->rows.dims == 0 || matrix->rows.strides[0] % Vec<T>::size == 0);
    }
    return vectors;
}

void check_operands(const Tensor& input, const Tensor& bias, const char* op) {
    check_cuda(input, op, "input");
    check_like(bias, input, op, "bias");
    KL_CHECK(input.dim() > 0 && bias.dim() == 1 && bias.size(0) == input.size(input.dim() - 1), op,
             ": argument `bias` must have the length of the last dimension of `input`");
}

/// Threads along the columns: a divisor of the chunks of a row where there is one, so that few are idle.
unsigned int lanes_for(int64_t chunks) {
    unsigned int lanes = THREADS;
    while (lanes > WARP && chunks % lanes != 0) lanes /= 2;
    while (lanes / 2 >= chunks) lanes /= 2;
    return lanes;
}

enum class BiasGeluRung { naive, vectorized, multirow };

Tensor bias_gelu(const Tensor& input, const Tensor& bias, const std::string& approximate, BiasGeluRung rung) {
    check_operands(input, bias, "bias_gelu");
    const Launch launch(input);
    Tensor output = DenseLike(input).allocate(input);
    if (input.numel() == 0) return output;
    const int64_t columns = bias.size(0), rows = input.numel() / columns;
    const Matrix out = as_matrix(output, "bias_gelu"), in = as_matrix(input, "bias_gelu");
    dispatch_form(input.scalar_type(), approximate, "bias_gelu", [&](auto zero, auto form) {
        using T = decltype(zero);
        using Form = decltype(form);
        auto* y = static_cast<T*>(output.data_ptr());
        const auto* x = static_cast<const T*>(input.data_ptr());
        const auto* b = static_cast<const T*>(bias.data_ptr());
        if (rung == BiasGeluRung::naive) {
            bias_gelu_naive_kernel<T, Form>
                <<<grid_size(ceil_div(rows * columns, THREADS)), THREADS, 0, launch.stream>>>(
                    y, out, x, in, b, bias.stride(0), rows, columns);
            return;
        }
        const bool vectorized = are_vectors<T>(bias, {{&output, &out}, {&input, &in}});
        const int64_t chunks = vectorized ? columns / Vec<T>::size : columns;
        if (rung == BiasGeluRung::vectorized) {
            KL_CHECK(vectorized && rows * chunks < int64_t{1} << 31,
                     "bias_gelu: vectorized takes fewer than 2^31 aligned vectors of 16 bytes, in rows at one stride");
            launch_pdl(bias_gelu_vectorized_kernel<T, Form>, grid_size(ceil_div(rows * chunks, THREADS)), THREADS,
                       launch, y, x, b, out.step_of_rows(), in.step_of_rows(), static_cast<uint32_t>(rows * chunks),
                       Divisor(static_cast<uint32_t>(chunks)));
            return;
        }
        const unsigned int lanes = lanes_for(chunks);
        const dim3 block(lanes, THREADS / lanes);
        const int64_t column_blocks = ceil_div(chunks, lanes), row_blocks = ceil_div(rows, int64_t{block.y} * ROWS);
        const auto kernel =
            vectorized ? bias_gelu_multirow_kernel<T, Form, true> : bias_gelu_multirow_kernel<T, Form, false>;
        launch_pdl(kernel, grid_size(column_blocks * row_blocks), block, launch, y, out, x, in, b, bias.stride(0), rows,
                   columns, Divisor(static_cast<uint32_t>(column_blocks)));
    });
    KL_LAUNCH_CHECK();
    return output;
}

std::tuple<Tensor, Tensor> bias_gelu_backward(const Tensor& grad, const Tensor& input, const Tensor& bias,
                                              const std::string& approximate, BiasGeluRung rung) {
    const char* const op = "bias_gelu_backward";
    check_operands(input, bias, op);
    check_like(grad, input, op, "grad");
    check_same_shape(grad, input, op, "grad");
    const Launch launch(input);
    const int64_t columns = bias.size(0), rows = columns == 0 ? 0 : input.numel() / columns;
    Tensor grad_input = DenseLike(input).allocate(input), grad_bias = empty(bias, bias.scalar_type(), {columns});
    if (columns == 0) return {grad_input, grad_bias};
    const Matrix out = as_matrix(grad_input, op), gr = as_matrix(grad, op), in = as_matrix(input, op);
    dispatch_form(input.scalar_type(), approximate, op, [&](auto zero, auto form) {
        using T = decltype(zero);
        using Form = decltype(form);
        auto* gi = static_cast<T*>(grad_input.data_ptr());
        auto* gb = static_cast<T*>(grad_bias.data_ptr());
        const auto* g = static_cast<const T*>(grad.data_ptr());
        const auto* x = static_cast<const T*>(input.data_ptr());
        const auto* b = static_cast<const T*>(bias.data_ptr());
        if (rung == BiasGeluRung::naive) {
            bias_gelu_backward_naive_kernel<T, Form>
                <<<grid_size(ceil_div(columns, THREADS)), THREADS, 0, launch.stream>>>(gi, out, gb, g, gr, x, in, b,
                                                                                       bias.stride(0), rows, columns);
            return;
        }
        const auto sum_up = [&](const float* partials, int64_t groups) {
            launch_pdl(bias_gelu_backward_multirow_sum_kernel<T>, blocks_of_columns(columns), sum_block(columns),
                       launch, gb, partials, groups, columns);
        };
        if (rows == 0) return sum_up(nullptr, 0);  // a sum of nothing: zero
        const bool vectorized = are_vectors<T>(bias, {{&grad_input, &out}, {&grad, &gr}, {&input, &in}});
        const int64_t chunks = vectorized ? columns / Vec<T>::size : columns;
        const dim3 block = column_block(chunks, BACKWARD_THREADS);
        const int64_t column_blocks = ceil_div(chunks, block.x);
        const int64_t most =
            row_groups(rows, column_blocks, BACKWARD_BLOCKS_PER_SM, block.y * ROWS_IN_FLIGHT, launch.device);
        const int64_t rows_per_group = ceil_div(rows, most), groups = ceil_div(rows, rows_per_group);
        const Tensor partials = empty(bias, ScalarType::Float, {groups, columns});
        auto* sums = static_cast<float*>(partials.data_ptr());
        const auto kernel = vectorized ? bias_gelu_backward_multirow_kernel<T, Form, true>
                                       : bias_gelu_backward_multirow_kernel<T, Form, false>;
        const dim3 grid(grid_size(column_blocks), grid_size(groups));
        launch_pdl(kernel, grid, block, launch, gi, out, sums, g, gr, x, in, b, bias.stride(0), rows, columns,
                   rows_per_group);
        KL_LAUNCH_CHECK();
        sum_up(sums, groups);
    });
    KL_LAUNCH_CHECK();
    return {grad_input, grad_bias};
}

}  // namespace

Tensor bias_gelu_naive(const Tensor& input, const Tensor& bias, const std::string& approximate) {
    return bias_gelu(input, bias, approximate, BiasGeluRung::naive);
}
Tensor bias_gelu_vectorized(const Tensor& input, const Tensor& bias, const std::string& approximate) {
    return bias_gelu(input, bias, approximate, BiasGeluRung::vectorized);
}
Tensor bias_gelu_multirow(const Tensor& input, const Tensor& bias, const std::string& approximate) {
    return bias_gelu(input, bias, approximate, BiasGeluRung::multirow);
}
std::tuple<Tensor, Tensor> bias_gelu_backward_naive(const Tensor& grad, const Tensor& input, const Tensor& bias,
                                                    const std::string& approximate) {
    return bias_gelu_backward(grad, input, bias, approximate, BiasGeluRung::naive);
}
std::tuple<Tensor, Tensor> bias_gelu_backward_multirow(const Tensor& grad, const Tensor& input, const Tensor& bias,
                                                       const std::string& approximate) {
    return bias_gelu_backward(grad, input, bias, approximate, BiasGeluRung::multirow);
}

void bias_gelu_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    dispatch(dtype, "bias_gelu", [&](auto zero) {
        using T = decltype(zero);
        attributes.push_back(kernel_attributes<bias_gelu_naive_kernel<T, Exact>>("bias_gelu.naive", THREADS));
        attributes.push_back(kernel_attributes<bias_gelu_vectorized_kernel<T, Exact>>("bias_gelu.vectorized", THREADS));
        attributes.push_back(
            kernel_attributes<bias_gelu_multirow_kernel<T, Exact, true>>("bias_gelu.multirow", THREADS));
        attributes.push_back(
            kernel_attributes<bias_gelu_backward_naive_kernel<T, Exact>>("bias_gelu_backward.naive", THREADS));
        attributes.push_back(kernel_attributes<bias_gelu_backward_multirow_kernel<T, Exact, true>>(
            "bias_gelu_backward.multirow", BACKWARD_THREADS));
        attributes.push_back(kernel_attributes<bias_gelu_backward_multirow_sum_kernel<T>>(
            "bias_gelu_backward.multirow (sum)", SUM_THREADS));
    });
}

}  // namespace kl
