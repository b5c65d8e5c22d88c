// Bias and GELU: gelu(input + bias), with bias along the last dimension. Its forms are in gelu.cuh.
//
//   variant     the one idea it adds                                   what limits it now
//   naive       one fused kernel, one element a thread; backward one   2-byte loads; backward a handful of threads
//               column a thread, down all rows
//   vectorized  a thread keeps its 16 bytes of bias, and takes them    memory bandwidth; exact: issue slots
//               down several rows; backward adds up a share of the
//               rows a block, and the shares in a second kernel
//
// Both take any strides; the output keeps the memory order of a dense input. The sum is not rounded on its way.

#include <tuple>

#include "core/elementwise.cuh"
#include "core/gelu.cuh"
#include "core/ops.h"
#include "reduce/column_sum.cuh"

namespace kl {
namespace {

constexpr int ROWS = 4;         // of a thread, forward: as many loads in flight
constexpr int FEW_BLOCKS = 32;  // an SM: see bias_gelu_vectorized_even_kernel
constexpr int BACKWARD_THREADS = 512;
constexpr int ROWS_IN_FLIGHT = 2;  // of a thread, backward, of two operands
constexpr int BACKWARD_BLOCKS_PER_SM = 2;

// An operand as rows of its last dimension.
struct Matrix {
    Strided rows;
    int64_t step;

    int64_t step_of_rows() const { return rows.dims > 0 ? rows.strides[0] : 0; }
    // WHOLE: rows lie at one stride, and start on 16 bytes.
    template <bool WHOLE>
    __device__ int64_t at(int64_t row, int64_t column) const {
        return WHOLE ? row * rows.strides[0] + column : rows.offset(row) + column * step;
    }
};

// As many columns as a thread takes at once: 16 bytes, or where an operand does not let it, one.
template <typename T, bool WHOLE>
constexpr int WIDTH = WHOLE ? Vec<T>::size : 1;

template <typename T, bool WHOLE>
struct Chunk {
    std::conditional_t<WHOLE, Vec<T>, T> data;

    __device__ void load(const T* pointer) { data = *reinterpret_cast<const decltype(data)*>(pointer); }
    __device__ void floats(float (&x)[WIDTH<T, WHOLE>]) const {
        if constexpr (WHOLE) {
            unpack(data, x);
        } else {
            x[0] = to_float(data);
        }
    }
    __device__ static void store(T* pointer, const float (&x)[WIDTH<T, WHOLE>]) {
        if constexpr (WHOLE) {
            store_vec(pointer, pack<T>(x));
        } else {
            *pointer = from_float<T>(x[0]);
        }
    }
};

template <typename T, bool WHOLE>
__device__ void load_bias(float (&b)[WIDTH<T, WHOLE>], const T* bias, int64_t step, int64_t column) {
    Chunk<T, WHOLE> chunk;
    chunk.load(bias + column * (WHOLE ? 1 : step));
    chunk.floats(b);
}

// ---- naive: one element a thread; backward one column a thread -----------------------------------------------------

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

// ---- vectorized: 16 bytes of bias a thread, several rows -----------------------------------------------------------

// Of whole vectors, evenly apart: one a thread, of all rows one after the other. Of 16 bits a thread that takes several rows
// spends fewer instructions on each, but of its blocks, a quarter as many, the last leave SMs idle where there are few.
template <typename T, typename Form>
__global__ void __launch_bounds__(THREADS)
    bias_gelu_vectorized_even_kernel(T* output, const T* input, const T* bias, int64_t out_step, int64_t in_step,
                                     uint32_t vectors, __grid_constant__ const Divisor vectors_a_row) {
    begin_early();
    constexpr int N = Vec<T>::size;
    const uint32_t i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= vectors) return;
    const uint32_t row = vectors_a_row.quotient(i), column = vectors_a_row.remainder(i) * N;
    const Vec<T> part = load_vec(once(input + (row * in_step + column))), own = load_vec(bias + column);
    float x[N], b[N];
    unpack(part, x);
    unpack(own, b);
#pragma unroll
    for (int e = 0; e < N; ++e) x[e] = Form::forward(x[e] + b[e]);
    store_vec(output + (row * out_step + column), pack<T>(x));
}

// Any rows.
template <typename T, typename Form, bool WHOLE>
__global__ void __launch_bounds__(THREADS)
    bias_gelu_vectorized_kernel(T* output, __grid_constant__ const Matrix out, const T* input,
                                __grid_constant__ const Matrix in, const T* bias, int64_t bias_step, int64_t rows,
                                int64_t columns, __grid_constant__ const Divisor column_blocks) {
    begin_early();
    constexpr int N = WIDTH<T, WHOLE>;
    const uint32_t row_block = column_blocks.quotient(blockIdx.x), column_block = column_blocks.remainder(blockIdx.x);
    const int64_t column = (int64_t{column_block} * blockDim.x + threadIdx.x) * N;
    if (column >= columns) return;
    const int64_t first = int64_t{row_block} * (blockDim.y * ROWS) + threadIdx.y;
    Chunk<T, WHOLE> chunks[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const int64_t row = first + r * blockDim.y;
        if (row < rows) chunks[r].load(once(input + in.at<WHOLE>(row, column)));
    }
    float b[N], x[N];
    load_bias<T, WHOLE>(b, bias, bias_step, column);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const int64_t row = first + r * blockDim.y;
        if (row >= rows) return;
        chunks[r].floats(x);
#pragma unroll
        for (int e = 0; e < N; ++e) x[e] = Form::forward(x[e] + b[e]);
        Chunk<T, WHOLE>::store(output + out.at<WHOLE>(row, column), x);
    }
}

// A block takes blockDim.x · N columns down its share of the rows; partials: (shares, columns).
template <typename T, typename Form, bool WHOLE>
__global__ void __launch_bounds__(BACKWARD_THREADS, BACKWARD_BLOCKS_PER_SM)
    bias_gelu_backward_vectorized_kernel(T* grad_input, __grid_constant__ const Matrix out, float* partials,
                                         const T* grad, __grid_constant__ const Matrix gr, const T* input,
                                         __grid_constant__ const Matrix in, const T* bias, int64_t bias_step,
                                         int64_t rows, int64_t columns, int64_t rows_a_share) {
    begin_early();
    constexpr int N = WIDTH<T, WHOLE>;
    __shared__ float sums[BACKWARD_THREADS * N];
    const int64_t column = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * N, share = blockIdx.y;
    const int64_t end = min(rows, (share + 1) * rows_a_share);
    float b[N] = {}, sum[N] = {};
    if (column < columns) load_bias<T, WHOLE>(b, bias, bias_step, column);
    // The rows of a thread: blockDim.y apart, ROWS_IN_FLIGHT at once.
    for (int64_t first = share * rows_a_share + threadIdx.y; first < end && column < columns;
         first += blockDim.y * ROWS_IN_FLIGHT) {
        Chunk<T, WHOLE> grads[ROWS_IN_FLIGHT], inputs[ROWS_IN_FLIGHT];
#pragma unroll
        for (int r = 0; r < ROWS_IN_FLIGHT; ++r) {
            const int64_t row = first + r * blockDim.y;
            if (row < end) grads[r].load(once(grad + gr.at<WHOLE>(row, column)));
            if (row < end) inputs[r].load(once(input + in.at<WHOLE>(row, column)));
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
            Chunk<T, WHOLE>::store(grad_input + out.at<WHOLE>(row, column), g);
        }
    }
    store_share(partials + share * columns, sum, sums, columns);
}

template <typename T>
__global__ void __launch_bounds__(SUM_THREADS)
    bias_gelu_backward_vectorized_sum_kernel(T* output, const float* partials, int64_t shares, int64_t columns) {
    begin_early();
    sum_shares(output, partials, shares, columns);
}

// ---- host ----------------------------------------------------------------------------------------------------------

// Rows in the order of the logical dimensions; the last one is along the row.
Matrix as_matrix(const Tensor& tensor, const char* op) {
    const int64_t last = tensor.dim() - 1;
    return {collapse(tensor.sizes().data(), tensor.strides().data(), last, op), tensor.stride(last)};
}

// Whether every row of every operand consists of vectors that start on 16 bytes.
template <typename T>
bool are_whole(const Tensor& bias, const std::vector<std::pair<const Tensor*, const Matrix*>>& operands) {
    const int64_t columns = bias.size(0);
    bool whole = columns % Vec<T>::size == 0 && is_aligned16(bias.data_ptr()) && bias.stride(0) == 1;
    for (const auto& [tensor, matrix] : operands) {
        whole = whole && matrix->step == 1 && is_aligned16(tensor->data_ptr()) && matrix->rows.dims <= 1 &&
                (matrix->rows.dims == 0 || matrix->rows.strides[0] % Vec<T>::size == 0);
    }
    return whole;
}

void check_operands(const Tensor& input, const Tensor& bias, const char* op) {
    check_cuda(input, op, "input");
    check_like(bias, input, op, "bias");
    KL_CHECK(input.dim() > 0 && bias.dim() == 1 && bias.size(0) == input.size(input.dim() - 1), op,
             ": argument `bias` must have the length of the last dimension of `input`");
}

// Threads along the columns: as many as divide a row's chunks, so that few are idle.
unsigned int lanes_for(int64_t chunks) {
    unsigned int lanes = THREADS;
    while (lanes > WARP && chunks % lanes != 0) lanes /= 2;
    while (lanes / 2 >= chunks) lanes /= 2;
    return lanes;
}

Tensor bias_gelu(const Tensor& input, const Tensor& bias, const std::string& approximate, bool vectorized) {
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
        if (!vectorized) {
            bias_gelu_naive_kernel<T, Form>
                <<<grid_size(ceil_div(rows * columns, THREADS)), THREADS, 0, launch.stream>>>(
                    y, out, x, in, b, bias.stride(0), rows, columns);
            return;
        }
        const bool whole = are_whole<T>(bias, {{&output, &out}, {&input, &in}});
        const int64_t chunks = whole ? columns / Vec<T>::size : columns;
        const unsigned int lanes = lanes_for(chunks);
        const dim3 block(lanes, THREADS / lanes);
        const int64_t column_blocks = ceil_div(chunks, lanes), row_blocks = ceil_div(rows, int64_t{block.y} * ROWS);
        const auto few = [&] {
            return column_blocks * row_blocks < int64_t{FEW_BLOCKS} * multiprocessors(launch.device);
        };
        if (whole && rows * chunks < int64_t{1} << 31 && (sizeof(T) == 4 || few())) {
            launch_early(bias_gelu_vectorized_even_kernel<T, Form>, grid_size(ceil_div(rows * chunks, THREADS)),
                         THREADS, launch, y, x, b, out.step_of_rows(), in.step_of_rows(),
                         static_cast<uint32_t>(rows * chunks), Divisor(static_cast<uint32_t>(chunks)));
            return;
        }
        const auto kernel =
            whole ? bias_gelu_vectorized_kernel<T, Form, true> : bias_gelu_vectorized_kernel<T, Form, false>;
        launch_early(kernel, grid_size(column_blocks * row_blocks), block, launch, y, out, x, in, b, bias.stride(0),
                     rows, columns, Divisor(static_cast<uint32_t>(column_blocks)));
    });
    KL_LAUNCH_CHECK();
    return output;
}

std::tuple<Tensor, Tensor> bias_gelu_backward(const Tensor& grad, const Tensor& input, const Tensor& bias,
                                              const std::string& approximate, bool vectorized) {
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
        if (!vectorized) {
            bias_gelu_backward_naive_kernel<T, Form>
                <<<grid_size(ceil_div(columns, THREADS)), THREADS, 0, launch.stream>>>(gi, out, gb, g, gr, x, in, b,
                                                                                       bias.stride(0), rows, columns);
            return;
        }
        const auto sum_up = [&](const float* partials, int64_t shares) {
            launch_early(bias_gelu_backward_vectorized_sum_kernel<T>, blocks_of_columns(columns), sum_block(columns),
                         launch, gb, partials, shares, columns);
        };
        if (rows == 0) return sum_up(nullptr, 0);  // a sum of nothing: zero
        const bool whole = are_whole<T>(bias, {{&grad_input, &out}, {&grad, &gr}, {&input, &in}});
        const int64_t chunks = whole ? columns / Vec<T>::size : columns;
        const dim3 block = column_block(chunks, BACKWARD_THREADS);
        const int64_t column_blocks = ceil_div(chunks, block.x);
        const int64_t most =
            row_shares(rows, column_blocks, BACKWARD_BLOCKS_PER_SM, block.y * ROWS_IN_FLIGHT, launch.device);
        const int64_t rows_a_share = ceil_div(rows, most), shares = ceil_div(rows, rows_a_share);
        const Tensor partials = empty(bias, ScalarType::Float, {shares, columns});
        auto* sums = static_cast<float*>(partials.data_ptr());
        const auto kernel = whole ? bias_gelu_backward_vectorized_kernel<T, Form, true>
                                  : bias_gelu_backward_vectorized_kernel<T, Form, false>;
        const dim3 grid(grid_size(column_blocks), grid_size(shares));
        launch_early(kernel, grid, block, launch, gi, out, sums, g, gr, x, in, b, bias.stride(0), rows, columns,
                     rows_a_share);
        KL_LAUNCH_CHECK();
        sum_up(sums, shares);
    });
    KL_LAUNCH_CHECK();
    return {grad_input, grad_bias};
}

}  // namespace

Tensor bias_gelu_naive(const Tensor& input, const Tensor& bias, const std::string& approximate) {
    return bias_gelu(input, bias, approximate, false);
}
Tensor bias_gelu_vectorized(const Tensor& input, const Tensor& bias, const std::string& approximate) {
    return bias_gelu(input, bias, approximate, true);
}
std::tuple<Tensor, Tensor> bias_gelu_backward_naive(const Tensor& grad, const Tensor& input, const Tensor& bias,
                                                    const std::string& approximate) {
    return bias_gelu_backward(grad, input, bias, approximate, false);
}
std::tuple<Tensor, Tensor> bias_gelu_backward_vectorized(const Tensor& grad, const Tensor& input, const Tensor& bias,
                                                         const std::string& approximate) {
    return bias_gelu_backward(grad, input, bias, approximate, true);
}

void bias_gelu_kernel_facts(std::vector<KernelFacts>& facts, ScalarType dtype) {
    dispatch(dtype, "bias_gelu", [&](auto zero) {
        using T = decltype(zero);
        facts.push_back(kernel_facts<bias_gelu_naive_kernel<T, Exact>>("bias_gelu.naive", THREADS));
        facts.push_back(
            kernel_facts<bias_gelu_vectorized_even_kernel<T, Exact>>("bias_gelu.vectorized (few rows)", THREADS));
        facts.push_back(kernel_facts<bias_gelu_vectorized_kernel<T, Exact, true>>("bias_gelu.vectorized", THREADS));
        facts.push_back(kernel_facts<bias_gelu_backward_naive_kernel<T, Exact>>("bias_gelu_backward.naive", THREADS));
        facts.push_back(kernel_facts<bias_gelu_backward_vectorized_kernel<T, Exact, true>>(
            "bias_gelu_backward.vectorized", BACKWARD_THREADS));
        facts.push_back(kernel_facts<bias_gelu_backward_vectorized_sum_kernel<T>>("bias_gelu_backward.vectorized (sum)",
                                                                                  SUM_THREADS));
    });
}

}  // namespace kl
