// softmax, rung 7 of 7: cluster_two_pass
// Idea      A row that outgrows the registers of the largest cluster is read twice, the second time from L2. The second
//           pass goes backwards, because what was read last is sure to be in L2.
// Predicts  2·N·sizeof(T) bytes of DRAM traffic per row as long as the rows in flight fit in L2.
// Limit now Memory bandwidth; beyond L2, the second read.
// Next      –
//
// Each SM has one block, or two where twice as many rows in flight still fit in L2. Unused dynamic shared memory keeps a
// second block off the SM.

#include "softmax/row_in_registers.cuh"

namespace kl {
namespace {

constexpr int ONE_BLOCK_PER_SM_BYTES = 120 * 1024;  // of dynamic shared memory, more than half of an SM's
constexpr int STATIC_SHARED_BYTES = 4096;           // more than the kernels below take

/// Calls f(partition) for each piece of V vectors per thread of this block's part of a row, from its end if BACKWARDS.
template <int V, bool BACKWARDS, typename F>
__device__ void each_piece(const RowPartition<true>& partition, F&& f) {
    const int step = V * RowPartition<true>::step(), begin = partition.first - static_cast<int>(threadIdx.x);
    const int pieces = (partition.end - begin + step - 1) / step;
#pragma unroll 1
    for (int i = 0; i < pieces; ++i) {
        RowPartition<true> piece = partition;
        piece.first += (BACKWARDS ? pieces - 1 - i : i) * step;
        f(piece);
    }
}

template <typename T, bool VECTORIZED>
__global__ void __launch_bounds__(ROW_THREADS, BLOCKS_AN_SM<VECTORIZED>)
    softmax_cluster_two_pass_kernel(T* output, __grid_constant__ const Rows out_rows, const T* input,
                                    __grid_constant__ const Rows in_rows, int64_t length) {
    if (!exists_here<true>()) return;
    __shared__ ReduceSmem<true, OnlineSoftmaxState> reduce_smem;
    const RowPartition<true> partition(vectors_of<T>(length));
    partition.open(reduce_smem);
    const T* const in = input + in_rows.start(partition.row);
    Vec<T> tile[WIDE_VECTORS];
    OnlineSoftmaxState state{NEG_INF, 0.0f};
    each_piece<WIDE_VECTORS, false>(partition, [&](const RowPartition<true>& piece) {
        load_row<VECTORIZED>(tile, in, in_rows, piece, true, length, NEG_INF);
        state = MergeSoftmax{}(state, softmax_state(tile));
    });
    partition.meet();
    state = reduce_over_row(state, MergeSoftmax{}, reduce_smem);
    T* const out = output + out_rows.start(partition.row);
    each_piece<WIDE_VECTORS, true>(partition, [&](const RowPartition<true>& piece) {
        load_row<VECTORIZED>(tile, in, in_rows, piece, true, length, NEG_INF);
        store_softmax(tile, state, [&](int v, const Vec<T>& part) {
            store_part<VECTORIZED>(out, out_rows, part, v, piece, true, length);
        });
    });
}

template <typename T, bool VECTORIZED>
__global__ void __launch_bounds__(ROW_THREADS, 1)
    softmax_backward_cluster_two_pass_kernel(T* grad_input, __grid_constant__ const Rows gi_rows, const T* grad,
                                             __grid_constant__ const Rows g_rows, const T* output,
                                             __grid_constant__ const Rows o_rows, int64_t length) {
    if (!exists_here<true>()) return;
    __shared__ ReduceSmem<true, float> reduce_smem;
    const RowPartition<true> partition(vectors_of<T>(length));
    partition.open(reduce_smem);
    const T* const g = grad + g_rows.start(partition.row);
    const T* const o = output + o_rows.start(partition.row);
    T* const gi = grad_input + gi_rows.start(partition.row);
    Vec<T> g_tile[ROW_VECTORS], o_tile[ROW_VECTORS];
    const auto load = [&](const RowPartition<true>& piece) {
        load_row<VECTORIZED>(g_tile, g, g_rows, piece, true, length, 0.0f);
        load_row<VECTORIZED>(o_tile, o, o_rows, piece, true, length, 0.0f);
    };
    float dot = 0.0f;
    each_piece<ROW_VECTORS, false>(partition, [&](const RowPartition<true>& piece) {
        load(piece);
        dot += dot_of(g_tile, o_tile);
    });
    partition.meet();
    dot = reduce_over_row(dot, Sum{}, reduce_smem);
    each_piece<ROW_VECTORS, true>(partition, [&](const RowPartition<true>& piece) {
        load(piece);
        softmax_gradient(g_tile, o_tile, dot);
        store_row<VECTORIZED>(gi, gi_rows, g_tile, piece, true, length);
    });
}

/// Launches KERNEL, one cluster per row. `row_bytes`: what the second pass reads of a row.
template <auto* KERNEL, typename... Arguments>
void launch_two_pass(const RowLayout& layout, int64_t chunks, int64_t row_bytes, const Launch& launch,
                     Arguments... arguments) {
    KL_CHECK(chunks > MAX_CLUSTER_CHUNKS, "softmax: a cluster holds a row of ", layout.length,
             " elements; use `cluster` or `registers`");
    KL_CHECK(layout.length <= 1 << 30, "a row of ", layout.length, " elements is longer than ", 1 << 30);
    static DeviceSet asked;
    const int most = shared_limit(launch.device) - STATIC_SHARED_BYTES;  // GPUs that allow a block less also have less
    const int one_block = std::min(ONE_BLOCK_PER_SM_BYTES, most);
    allow_shared(KERNEL, one_block, launch.device, asked);
    const RowLaunch shape{ROW_THREADS, 1, MAX_CLUSTER};
    const int64_t rows = 2 * multiprocessors(launch.device) / MAX_CLUSTER;
    const bool two = rows * row_bytes < int64_t{2} * device_attribute(cudaDevAttrL2CacheSize, launch.device) / 3;
    launch_rows(KERNEL, shape, shape.grid(layout.count), two ? 0 : one_block, launch, arguments..., layout.length);
}

}  // namespace

Tensor softmax_cluster_two_pass(const Tensor& input, int64_t dim) {
    return softmax_forward(input, dim, [](const auto& call) {
        using T = typename std::decay_t<decltype(call)>::T;
        with_constant(call.vectorized(), [&](auto vectorized) {
            launch_two_pass<softmax_cluster_two_pass_kernel<T, decltype(vectorized)::value>>(
                call.layout, call.layout.template chunks<T>(), call.layout.length * sizeof(T), call.launch, call.output,
                call.out_rows, call.input, call.in_rows);
        });
    });
}

Tensor softmax_backward_cluster_two_pass(const Tensor& grad, const Tensor& output, int64_t dim) {
    return softmax_backward(grad, output, dim, [](const auto& call) {
        using T = typename std::decay_t<decltype(call)>::T;
        with_constant(call.vectorized(), [&](auto vectorized) {
            launch_two_pass<softmax_backward_cluster_two_pass_kernel<T, decltype(vectorized)::value>>(
                call.layout, call.layout.template chunks<T>(), 2 * call.layout.length * sizeof(T), call.launch,
                call.grad_input, call.gi_rows, call.grad, call.g_rows, call.output, call.o_rows);
        });
    });
}

void softmax_cluster_two_pass_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    dispatch(dtype, "softmax", [&](auto zero) {
        using T = decltype(zero);
        attributes.push_back(kernel_attributes<softmax_cluster_two_pass_kernel<T, true>>(
            "softmax.cluster_two_pass", ROW_THREADS, ONE_BLOCK_PER_SM_BYTES));
        attributes.push_back(kernel_attributes<softmax_backward_cluster_two_pass_kernel<T, true>>(
            "softmax_backward.cluster_two_pass", ROW_THREADS, ONE_BLOCK_PER_SM_BYTES));
    });
}

}  // namespace kl
