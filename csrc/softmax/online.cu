// softmax, rung 2 of 7: online
// Idea      One block per row. Maximum and sum come from one pass: a thread rescales its sum whenever its maximum grows
//           (Milakov and Gimelshein, arXiv:1805.02867). Loads and stores move 16 bytes.
// Predicts  2 reads and 1 write of N·sizeof(T) bytes per row instead of 3 and 1.
// Limit now The input is read twice, and short rows leave most of the 512 threads idle.
// Next      `shared`: keep the row on chip between the two passes.

#include "softmax/softmax.cuh"

namespace kl {
namespace {

constexpr int ONLINE_THREADS = 512;
constexpr int ONLINE_UNROLL = 2;

template <typename T>
__global__ void __launch_bounds__(ONLINE_THREADS, 2)
    softmax_online_kernel(T* output, Rows out_rows, const T* input, Rows in_rows, int64_t length) {
    __shared__ float scratch[WARP];
    const T* in = input + in_rows.start(blockIdx.x);
    T* out = output + out_rows.start(blockIdx.x);
    constexpr int64_t STEP = int64_t{ONLINE_THREADS} * Vec<T>::size;

    const int64_t begin = static_cast<int64_t>(threadIdx.x) * Vec<T>::size - past_vector(in, out);
    float row_max = Max::identity, row_sum = 0.0f;
    for (int64_t base = begin; base < length; base += ONLINE_UNROLL * STEP) {
        Vec<T> v[ONLINE_UNROLL];
        float x[ONLINE_UNROLL][Vec<T>::size];
#pragma unroll
        for (int u = 0; u < ONLINE_UNROLL; ++u) v[u] = load_vector(in, in_rows, base + u * STEP, length, NEG_INF);
        float new_max = row_max;
#pragma unroll
        for (int u = 0; u < ONLINE_UNROLL; ++u) {
            unpack(v[u], x[u]);
#pragma unroll
            for (int e = 0; e < Vec<T>::size; ++e) new_max = fmaxf(new_max, x[u][e]);
        }
        const float shift = finite_or_zero(new_max);
        row_sum *= fast_exp(row_max - shift);
#pragma unroll
        for (int u = 0; u < ONLINE_UNROLL; ++u) {
#pragma unroll
            for (int e = 0; e < Vec<T>::size; ++e) row_sum += fast_exp(x[u][e] - shift);
        }
        row_max = new_max;
    }
    const float thread_max = row_max;
    row_max = block_reduce(row_max, Max{}, scratch);
    if (thread_max != NEG_INF) row_sum *= fast_exp(thread_max - row_max);  // else the sum is 0, or NaN
    row_sum = block_reduce(row_sum, Sum{}, scratch);

    const float scale = 1.0f / row_sum;
    for (int64_t first = begin; first < length; first += STEP) {
        float x[Vec<T>::size];
        unpack(load_vector(in, in_rows, first, length, NEG_INF), x);
#pragma unroll
        for (int e = 0; e < Vec<T>::size; ++e) x[e] = fast_exp(x[e] - row_max) * scale;
        store_vector(out, out_rows, pack<T>(x), first, length);
    }
}

template <typename T>
__global__ void __launch_bounds__(ONLINE_THREADS)
    softmax_backward_online_kernel(T* grad_input, Rows gi_rows, const T* grad, Rows g_rows, const T* output,
                                   Rows o_rows, int64_t length) {
    __shared__ float scratch[WARP];
    const T* g_row = grad + g_rows.start(blockIdx.x);
    const T* o_row = output + o_rows.start(blockIdx.x);
    T* gi_row = grad_input + gi_rows.start(blockIdx.x);
    constexpr int64_t STEP = int64_t{ONLINE_THREADS} * Vec<T>::size;

    const int64_t begin = static_cast<int64_t>(threadIdx.x) * Vec<T>::size - past_vector(g_row, gi_row);
    float dot = 0.0f, g[Vec<T>::size], o[Vec<T>::size];
    for (int64_t first = begin; first < length; first += STEP) {
        unpack(load_vector(g_row, g_rows, first, length, 0.0f), g);
        unpack(load_vector(o_row, o_rows, first, length, 0.0f), o);
#pragma unroll
        for (int e = 0; e < Vec<T>::size; ++e) dot += g[e] * o[e];
    }
    dot = block_reduce(dot, Sum{}, scratch);
    for (int64_t first = begin; first < length; first += STEP) {
        unpack(load_vector(g_row, g_rows, first, length, 0.0f), g);
        unpack(load_vector(o_row, o_rows, first, length, 0.0f), o);
#pragma unroll
        for (int e = 0; e < Vec<T>::size; ++e) g[e] = o[e] * (g[e] - dot);
        store_vector(gi_row, gi_rows, pack<T>(g), first, length);
    }
}

}  // namespace

Tensor softmax_online(const Tensor& input, int64_t dim) {
    return softmax_forward(input, dim, [](const auto& call) {
        using T = typename std::decay_t<decltype(call)>::T;
        softmax_online_kernel<T><<<grid_size(call.layout.count), ONLINE_THREADS, 0, call.launch.stream>>>(
            call.output, call.out_rows, call.input, call.in_rows, call.layout.length);
    });
}

Tensor softmax_backward_online(const Tensor& grad, const Tensor& output, int64_t dim) {
    return softmax_backward(grad, output, dim, [](const auto& call) {
        using T = typename std::decay_t<decltype(call)>::T;
        softmax_backward_online_kernel<T><<<grid_size(call.layout.count), ONLINE_THREADS, 0, call.launch.stream>>>(
            call.grad_input, call.gi_rows, call.grad, call.g_rows, call.output, call.o_rows, call.layout.length);
    });
}

void softmax_online_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    dispatch(dtype, "softmax", [&](auto zero) {
        using T = decltype(zero);
        attributes.push_back(kernel_attributes<softmax_online_kernel<T>>("softmax.online", ONLINE_THREADS));
        attributes.push_back(
            kernel_attributes<softmax_backward_online_kernel<T>>("softmax_backward.online", ONLINE_THREADS));
    });
}

}  // namespace kl
