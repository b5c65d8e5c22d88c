// softmax, rung 3 of 7: shared
// Idea      The row stays in shared memory, so global memory is read once and written once.
// Predicts  2·N·sizeof(T) bytes per row instead of 3·N·sizeof(T): 1.5× over `online`.
// Limit now Short rows: idle lanes and two block-wide reductions. Long rows: an SM holds one row at a time.
// Next      `registers`: keep the row in registers, with as many threads as suit its length.

#include <cuda_pipeline.h>

#include "softmax/softmax.cuh"

namespace kl {
namespace {

/// Reduces over the blockDim.x threads that share a row: one warp (several rows per block), or the whole block.
template <typename Op>
__device__ float row_reduce(float value, Op op, float* scratch) {
    return blockDim.x == WARP ? warp_reduce(value, op) : block_reduce(value, op, scratch);
}

/// Copies a row to shared memory with cp.async, which keeps every load of the row in flight without registers.
/// Each thread copies, and later reads, its own chunks only, so no barrier is needed.
template <typename T>
__device__ void fetch_row(Vec<T>* row_on_chip, const T* row, const Rows& rows, int64_t length, float fill) {
    const int chunks = static_cast<int>((length + Vec<T>::size - 1) / Vec<T>::size);
    for (int c = threadIdx.x; c < chunks; c += blockDim.x) {
        const int64_t first = int64_t{c} * Vec<T>::size;
        if (rows.whole && first + Vec<T>::size <= length) {
            __pipeline_memcpy_async(&row_on_chip[c], row + first, 16);
        } else {
            row_on_chip[c] = load_chunk(row, rows, first, length, fill);
        }
    }
}

template <typename T>
__global__ void softmax_shared_kernel(T* output, Rows out_rows, const T* input, Rows in_rows, int64_t count,
                                      int64_t length) {
    extern __shared__ __align__(16) unsigned char shared[];
    __shared__ float scratch[WARP];
    const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
    if (row >= count) return;  // the whole warp: a row has one warp where a block has several rows
    const int chunks = static_cast<int>((length + Vec<T>::size - 1) / Vec<T>::size);
    Vec<T>* row_on_chip = reinterpret_cast<Vec<T>*>(shared) + threadIdx.y * chunks;
    fetch_row(row_on_chip, input + in_rows.start(row), in_rows, length, NEG_INF);
    __pipeline_commit();
    __pipeline_wait_prior(0);

    float row_max = Max::identity, row_sum = 0.0f, x[Vec<T>::size];
    for (int c = threadIdx.x; c < chunks; c += blockDim.x) {
        unpack(row_on_chip[c], x);
#pragma unroll
        for (int e = 0; e < Vec<T>::size; ++e) row_max = fmaxf(row_max, x[e]);
    }
    row_max = row_reduce(row_max, Max{}, scratch);
    for (int c = threadIdx.x; c < chunks; c += blockDim.x) {
        unpack(row_on_chip[c], x);
#pragma unroll
        for (int e = 0; e < Vec<T>::size; ++e) row_sum += fast_exp(x[e] - row_max);
    }
    const float scale = 1.0f / row_reduce(row_sum, Sum{}, scratch);
    T* out = output + out_rows.start(row);
    for (int c = threadIdx.x; c < chunks; c += blockDim.x) {
        unpack(row_on_chip[c], x);
#pragma unroll
        for (int e = 0; e < Vec<T>::size; ++e) x[e] = fast_exp(x[e] - row_max) * scale;
        store_chunk(out, out_rows, pack<T>(x), int64_t{c} * Vec<T>::size, length);
    }
}

template <typename T>
__global__ void softmax_backward_shared_kernel(T* grad_input, Rows gi_rows, const T* grad, Rows g_rows, const T* output,
                                               Rows o_rows, int64_t count, int64_t length) {
    extern __shared__ __align__(16) unsigned char shared[];
    __shared__ float scratch[WARP];
    const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
    if (row >= count) return;
    const int chunks = static_cast<int>((length + Vec<T>::size - 1) / Vec<T>::size);
    Vec<T>* g_on_chip = reinterpret_cast<Vec<T>*>(shared) + threadIdx.y * 2 * chunks;
    Vec<T>* o_on_chip = g_on_chip + chunks;
    fetch_row(g_on_chip, grad + g_rows.start(row), g_rows, length, 0.0f);
    fetch_row(o_on_chip, output + o_rows.start(row), o_rows, length, 0.0f);
    __pipeline_commit();
    __pipeline_wait_prior(0);

    float dot = 0.0f, g[Vec<T>::size], o[Vec<T>::size];
    for (int c = threadIdx.x; c < chunks; c += blockDim.x) {
        unpack(g_on_chip[c], g);
        unpack(o_on_chip[c], o);
#pragma unroll
        for (int e = 0; e < Vec<T>::size; ++e) dot += g[e] * o[e];
    }
    dot = row_reduce(dot, Sum{}, scratch);
    T* gi = grad_input + gi_rows.start(row);
    for (int c = threadIdx.x; c < chunks; c += blockDim.x) {
        unpack(g_on_chip[c], g);
        unpack(o_on_chip[c], o);
#pragma unroll
        for (int e = 0; e < Vec<T>::size; ++e) g[e] = o[e] * (g[e] - dot);
        store_chunk(gi, gi_rows, pack<T>(g), int64_t{c} * Vec<T>::size, length);
    }
}

// ---- host ----------------------------------------------------------------------------------------------------------

/// A warp per row and four rows per block where 4 chunks per lane hold the row; else a block per row.
template <typename T>
dim3 shared_block(int64_t length) {
    const int64_t chunks = ceil_div(length, Vec<T>::size);
    if (chunks <= 4 * WARP) return dim3(WARP, 4);
    return dim3(
        static_cast<unsigned>(std::min<int64_t>(1024, std::max<int64_t>(128, ceil_div(chunks / 4, WARP) * WARP))));
}

template <typename T>
size_t shared_bytes(int64_t length, dim3 block, int rows_kept) {
    return static_cast<size_t>(ceil_div(length, Vec<T>::size)) * 16 * block.y * rows_kept;
}

/// Raises the limit of dynamic shared memory above the default of 48 KB, which costs two calls to the driver.
template <typename Kernel>
void allow_shared_row(Kernel* kernel, size_t bytes, const char* op) {
    constexpr size_t BY_DEFAULT = 48 * 1024, FOR_REDUCTIONS = 1024;
    if (bytes + FOR_REDUCTIONS <= BY_DEFAULT) return;
    int device = 0;
    KL_CUDA_CHECK(cudaGetDevice(&device));
    const int limit = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    KL_CHECK(bytes + FOR_REDUCTIONS <= static_cast<size_t>(limit), op, ": a row needs ", bytes,
             " bytes of shared memory, a block has ", limit);
    // The same limit in every call: another thread may launch a longer row meanwhile.
    KL_CUDA_CHECK(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                       cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       limit - static_cast<int>(FOR_REDUCTIONS)));
}

}  // namespace

Tensor softmax_shared(const Tensor& input, int64_t dim) {
    return softmax_forward(input, dim, [](const auto& call) {
        using T = typename std::decay_t<decltype(call)>::T;
        const dim3 block = shared_block<T>(call.layout.length);
        const size_t bytes = shared_bytes<T>(call.layout.length, block, 1);
        allow_shared_row(softmax_shared_kernel<T>, bytes, "softmax");
        const auto grid = grid_size(ceil_div(call.layout.count, block.y));
        softmax_shared_kernel<T><<<grid, block, bytes, call.launch.stream>>>(
            call.output, call.out_rows, call.input, call.in_rows, call.layout.count, call.layout.length);
    });
}

Tensor softmax_backward_shared(const Tensor& grad, const Tensor& output, int64_t dim) {
    return softmax_backward(grad, output, dim, [](const auto& call) {
        using T = typename std::decay_t<decltype(call)>::T;
        const dim3 block = shared_block<T>(call.layout.length);
        const size_t bytes = shared_bytes<T>(call.layout.length, block, 2);
        allow_shared_row(softmax_backward_shared_kernel<T>, bytes, "softmax_backward");
        const auto grid = grid_size(ceil_div(call.layout.count, block.y));
        softmax_backward_shared_kernel<T><<<grid, block, bytes, call.launch.stream>>>(
            call.grad_input, call.gi_rows, call.grad, call.g_rows, call.output, call.o_rows, call.layout.count,
            call.layout.length);
    });
}

void softmax_shared_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    dispatch(dtype, "softmax", [&](auto zero) {
        using T = decltype(zero);
        // Shared memory grows with the row; these are the attributes for rows of 4096.
        const dim3 block = shared_block<T>(4096);
        const auto bytes = static_cast<int64_t>(shared_bytes<T>(4096, block, 1));
        const int threads = static_cast<int>(block.x * block.y);
        attributes.push_back(kernel_attributes<softmax_shared_kernel<T>>("softmax.shared", threads, bytes));
        attributes.push_back(
            kernel_attributes<softmax_backward_shared_kernel<T>>("softmax_backward.shared", threads, 2 * bytes));
    });
}

}  // namespace kl
