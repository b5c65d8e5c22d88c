// Attention, first step; the table of the climb stands in attention.cuh.
//
//   naive    one thread per element; scores go out to memory and come back     memory, and CUDA cores
//
// Scores and weights are float32 matrices of S_q × S_k per head. Every product of the forward and the backward pass is
// one kernel, that only the strides tell apart: a transposed operand is one whose row and column strides trade places.

#include "attention.cuh"

namespace kl {
namespace {

constexpr int THREADS = 256;
constexpr int PARTIAL = 32;  // summands per partial sum: rounding errors grow with the number of partial sums only
constexpr float NEG_INF = -std::numeric_limits<float>::infinity();

// C[i, j] = factor · Σ_k A[i, k] · B[k, j] for each batch and head of C, summed over `summed` consecutive heads of A
// and B for each of C's.
struct Sizes {
    int64_t batches, rows, columns, length;
    int heads, summed;
    float factor;
    bool causal;  // C is a matrix of scores: −inf where j > i
};

template <typename TC, typename TA, typename TB>
__global__ void attention_naive_product_kernel(const __grid_constant__ View<TC> c, const __grid_constant__ View<TA> a,
                                               const __grid_constant__ View<TB> b, Sizes s) {
    int64_t index = int64_t{blockIdx.x} * THREADS + threadIdx.x;
    const int64_t column = index % s.columns;
    index /= s.columns;
    const int64_t row = index % s.rows;
    index /= s.rows;
    const int head = static_cast<int>(index % s.heads);
    const int64_t batch = index / s.heads;
    if (batch >= s.batches) return;
    TC* out = c.at(batch, head) + row * c.row + column * c.column;
    if (s.causal && column > row) {
        *out = from_float<TC>(NEG_INF);
        return;
    }
    float sum = 0.0f;
    for (int h = head * s.summed; h < (head + 1) * s.summed; ++h) {
        const TA* pa = a.at(batch, h) + row * a.row;
        const TB* pb = b.at(batch, h) + column * b.column;
        for (int64_t first = 0; first < s.length; first += PARTIAL) {
            float partial = 0.0f;
            for (int64_t k = first; k < min(first + PARTIAL, s.length); ++k) {
                partial = fmaf(to_float(pa[k * a.column]), to_float(pb[k * b.row]), partial);
            }
            sum += partial;
        }
    }
    *out = from_float<TC>(sum * s.factor);
}

// weights = softmax(scores) by row, in place; a warp a row.
__global__ void attention_naive_softmax_kernel(float* scores, int64_t rows, int64_t columns) {
    const int64_t row = int64_t{blockIdx.x} * (THREADS / WARP) + threadIdx.x / WARP;
    const int lane = threadIdx.x % WARP;
    if (row >= rows) return;
    scores += row * columns;
    float row_max = NEG_INF, row_sum = 0.0f;
    for (int64_t j = lane; j < columns; j += WARP) row_max = Max{}(row_max, scores[j]);
    row_max = warp_reduce(row_max, Max{});
    for (int64_t j = lane; j < columns; j += WARP) row_sum += expf(scores[j] - row_max);
    row_sum = warp_reduce(row_sum, Sum{});
    for (int64_t j = lane; j < columns; j += WARP) scores[j] = expf(scores[j] - row_max) / row_sum;
}

// grad_scores = weights ∘ (grad_weights − Σ_j weights ∘ grad_weights), in place of grad_weights; a warp a row.
__global__ void attention_naive_softmax_backward_kernel(float* grad_weights, const float* weights, int64_t rows,
                                                        int64_t columns) {
    const int64_t row = int64_t{blockIdx.x} * (THREADS / WARP) + threadIdx.x / WARP;
    const int lane = threadIdx.x % WARP;
    if (row >= rows) return;
    grad_weights += row * columns;
    weights += row * columns;
    float sum = 0.0f;
    for (int64_t j = lane; j < columns; j += WARP) sum = fmaf(weights[j], grad_weights[j], sum);
    sum = warp_reduce(sum, Sum{});
    for (int64_t j = lane; j < columns; j += WARP) grad_weights[j] = weights[j] * (grad_weights[j] - sum);
}

// ---- host ----------------------------------------------------------------------------------------------------------

template <typename T>
View<T> transpose(View<T> view) {
    std::swap(view.row, view.column);
    return view;
}

template <typename TC, typename TA, typename TB>
void product(const View<TC>& c, const View<TA>& a, const View<TB>& b, const Sizes& s, cudaStream_t stream) {
    const int64_t elements = s.batches * s.heads * s.rows * s.columns;
    if (elements == 0) return;
    const auto grid = grid_size(ceil_div(elements, THREADS));
    attention_naive_product_kernel<TC, TA, TB><<<grid, THREADS, 0, stream>>>(c, a, b, s);
    KL_LAUNCH_CHECK();
}

// softmax(Q · Kᵀ · scale), in memory: float32 (…, H, S_q, S_k).
template <typename T>
Tensor attention_weights(const Attention& a, const Tensor& query, const Tensor& key, cudaStream_t stream) {
    const auto shape = query.sizes();
    std::vector<int64_t> sizes(shape.begin(), shape.end() - 1);
    sizes.push_back(a.S_k);
    Tensor weights = empty(query, ScalarType::Float, sizes);
    if (weights.numel() == 0) return weights;
    product(make_view<float>(weights), make_view<T>(query), transpose(make_view<T>(key, a.group())),
            {a.batches, a.S_q, a.S_k, a.D, a.heads, 1, a.scale, a.causal}, stream);
    const int64_t rows = a.rows();
    attention_naive_softmax_kernel<<<grid_size(ceil_div(rows, THREADS / WARP)), THREADS, 0, stream>>>(
        static_cast<float*>(weights.data_ptr()), rows, a.S_k);
    KL_LAUNCH_CHECK();
    return weights;
}

}  // namespace

Tensor attention_naive(const Tensor& query, const Tensor& key, const Tensor& value, bool is_causal, double scale,
                       bool enable_gqa) {
    const Attention a = prepare_attention(query, key, value, is_causal, scale, enable_gqa);
    const Launch launch(query);
    Tensor output = empty_like_query(query, query.scalar_type(), a.D_v);
    if (output.numel() == 0) return output;
    dispatch(query.scalar_type(), "attention", [&](auto zero) {
        using T = decltype(zero);
        const Tensor weights = attention_weights<T>(a, query, key, launch.stream);
        product(make_view<T>(output), make_view<float>(weights), make_view<T>(value, a.group()),
                {a.batches, a.S_q, a.D_v, a.S_k, a.heads, 1, 1.0f, false}, launch.stream);
    });
    return output;
}

std::tuple<Tensor, Tensor, Tensor> attention_backward_naive(const Tensor& grad, const Tensor& query, const Tensor& key,
                                                            const Tensor& value, bool is_causal, double scale,
                                                            bool enable_gqa) {
    const Attention a = prepare_attention(query, key, value, is_causal, scale, enable_gqa);
    check_attention_output(grad, query, a, "grad");
    const Launch launch(query);
    Tensor grad_query = empty_dense(query), grad_key = empty_dense(key), grad_value = empty_dense(value);
    dispatch(query.scalar_type(), "attention_backward", [&](auto zero) {
        using T = decltype(zero);
        const cudaStream_t stream = launch.stream;
        const Tensor weights = attention_weights<T>(a, query, key, stream);
        const auto p = make_view<float>(weights);
        const auto g = make_view<T>(grad);
        product(make_view<T>(grad_value), transpose(p), g,
                {a.batches, a.S_k, a.D_v, a.S_q, a.heads_kv, a.group(), 1.0f, false}, stream);

        const Tensor grad_scores = empty_dense(weights);
        const auto ds = make_view<float>(grad_scores);
        product(ds, g, transpose(make_view<T>(value, a.group())),
                {a.batches, a.S_q, a.S_k, a.D_v, a.heads, 1, 1.0f, false}, stream);
        if (const int64_t rows = a.rows(); rows * a.S_k > 0) {
            attention_naive_softmax_backward_kernel<<<grid_size(ceil_div(rows, THREADS / WARP)), THREADS, 0, stream>>>(
                ds.data, p.data, rows, a.S_k);
            KL_LAUNCH_CHECK();
        }
        product(make_view<T>(grad_query), ds, make_view<T>(key, a.group()),
                {a.batches, a.S_q, a.D, a.S_k, a.heads, 1, a.scale, false}, stream);
        product(make_view<T>(grad_key), transpose(ds), make_view<T>(query),
                {a.batches, a.S_k, a.D, a.S_q, a.heads_kv, a.group(), a.scale, false}, stream);
    });
    return {grad_query, grad_key, grad_value};
}

void attention_naive_kernel_facts(std::vector<KernelFacts>& facts, ScalarType dtype) {
    dispatch(dtype, "attention", [&](auto zero) {
        using T = decltype(zero);
        facts.push_back(kernel_facts<attention_naive_product_kernel<float, T, T>>("attention.naive.scores", THREADS));
        facts.push_back(kernel_facts<attention_naive_softmax_kernel>("attention.naive.softmax", THREADS));
        facts.push_back(kernel_facts<attention_naive_product_kernel<T, float, T>>("attention.naive.output", THREADS));
        facts.push_back(
            kernel_facts<attention_naive_softmax_backward_kernel>("attention_backward.naive.softmax", THREADS));
    });
}

}  // namespace kl
