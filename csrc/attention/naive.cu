// attention, rung 1 of 7: naive
// Idea      One thread per element of each product. Scores and weights go to memory as float32 matrices of S_q × S_k per
//           head, and come back.
// Predicts  At least 16·S_q·S_k bytes per head for the scores alone: a write, a softmax in place, a read.
// Limit now Memory traffic, and products on CUDA cores.
// Next      `flash`: keep scores on chip.
//
// One kernel computes every product of both passes; only strides differ: a transposed operand has its row and column
// strides exchanged.

#include "attention/attention.cuh"
#include "attention/mask_sums.cuh"

namespace kl {
namespace {

constexpr int PARTIAL = 32;  // summands per partial sum: rounding errors grow only with the number of partial sums

/// C[i, j] = factor · Σ_k A[i, k] · B[k, j] for each batch and head of C. Each head of C also sums over `summed` consecutive
/// heads of A and B.
struct Sizes {
    int64_t batches, rows, columns, length;
    int heads, summed;
    float factor;
    bool scores = false;  // C is a matrix of scores: −inf where query i does not see key j
    int first = 0, last = 0;
    Mask mask = {};
};

template <typename TC, typename TA, typename TB>
__global__ void attention_naive_product_kernel(const __grid_constant__ View<TC> c, const __grid_constant__ View<TA> a,
                                               const __grid_constant__ View<TB> b, const __grid_constant__ Sizes s) {
    int64_t index = int64_t{blockIdx.x} * THREADS + threadIdx.x;
    const int64_t column = index % s.columns;
    index /= s.columns;
    const int64_t row = index % s.rows;
    index /= s.rows;
    const int head = static_cast<int>(index % s.heads);
    const int64_t batch = index / s.heads;
    if (batch >= s.batches) return;
    TC* out = c.at(batch, head) + row * c.row + column * c.column;
    if (s.scores && (column > row + s.last || column < row + s.first)) {
        *out = from_float<TC>(-INFINITE);
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
    sum *= s.factor;
    if (s.mask.kind != MaskKind::NONE) {
        sum = s.mask.template apply<TA>(sum, s.mask.at(batch, head) + row * s.mask.row + column * s.mask.column, 1.0f);
    }
    *out = from_float<TC>(sum);
}

/// weights = softmax(scores) by row, in place, one warp per row. A row of nothing but −inf becomes zeros.
__global__ void attention_naive_softmax_kernel(float* scores, float* lse, int64_t rows, int64_t columns) {
    const int64_t row = int64_t{blockIdx.x} * (THREADS / WARP) + threadIdx.x / WARP;
    const int lane = threadIdx.x % WARP;
    if (row >= rows) return;
    scores += row * columns;
    float row_max = -INFINITE, row_sum = 0.0f;
    for (int64_t j = lane; j < columns; j += WARP) row_max = Max{}(row_max, scores[j]);
    row_max = warp_reduce(row_max, Max{});
    const float shift = row_max == -INFINITE ? 0.0f : row_max;
    for (int64_t j = lane; j < columns; j += WARP) row_sum += expf(scores[j] - shift);
    row_sum = warp_reduce(row_sum, Sum{});
    if (lane == 0) lse[row] = row_max + logf(row_sum);
    const float total = row_sum == 0.0f ? 1.0f : row_sum;
    for (int64_t j = lane; j < columns; j += WARP) scores[j] = expf(scores[j] - shift) / total;
}

/// grad_scores = weights ∘ (grad_weights + grad_lse − Σ_j weights ∘ grad_weights), in place of grad_weights, one warp per
/// row.
__global__ void attention_naive_softmax_backward_kernel(float* grad_weights, const float* weights,
                                                        const float* grad_lse, int64_t rows, int64_t columns) {
    const int64_t row = int64_t{blockIdx.x} * (THREADS / WARP) + threadIdx.x / WARP;
    const int lane = threadIdx.x % WARP;
    if (row >= rows) return;
    grad_weights += row * columns;
    weights += row * columns;
    float sum = 0.0f;
    for (int64_t j = lane; j < columns; j += WARP) sum = fmaf(weights[j], grad_weights[j], sum);
    sum = warp_reduce(sum, Sum{});
    if (grad_lse != nullptr) sum -= grad_lse[row];
    for (int64_t j = lane; j < columns; j += WARP) grad_weights[j] = weights[j] * (grad_weights[j] - sum);
}

/// The gradient of a mask: each of its elements is the sum of `summands` scores' gradients, of which `own` finds the first
/// and `shared` the others. WIDTH threads, one or the whole block, have an element.
template <int WIDTH, typename T>
__global__ void attention_naive_mask_backward_kernel(T* grad_mask, const float* grad_scores,
                                                     const __grid_constant__ Strided own,
                                                     const __grid_constant__ Strided shared, int64_t elements,
                                                     int64_t summands) {
    const int64_t element = (int64_t{blockIdx.x} * THREADS + threadIdx.x) / WIDTH;
    if (element >= elements) return;
    grad_scores += own.offset(element);
    const int thread = threadIdx.x % WIDTH;
    float sum = 0.0f;
    for (int64_t first = thread; first < summands; first += PARTIAL * WIDTH) {
        float partial = 0.0f;
        for (int64_t i = first; i < min(first + PARTIAL * WIDTH, summands); i += WIDTH) {
            partial += grad_scores[shared.offset(i)];
        }
        sum += partial;
    }
    if constexpr (WIDTH == THREADS) {
        __shared__ float scratch[THREADS / WARP];
        sum = block_reduce(sum, Sum{}, scratch);
    }
    if (thread == 0) grad_mask[element] = from_float<T>(sum);
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

// Sets every element to −inf.
__global__ void attention_naive_fill_kernel(float* values, int64_t count) {
    const int64_t index = int64_t{blockIdx.x} * THREADS + threadIdx.x;
    if (index < count) values[index] = -INFINITE;
}

// softmax(Q · Kᵀ · scale + mask), in memory: float32 (…, H, S_q, S_k).
template <typename T>
Tensor attention_weights(const Attention& a, const Mask& mask, const Tensor& query, const Tensor& key, Tensor& lse,
                         cudaStream_t stream) {
    const auto shape = query.sizes();
    std::vector<int64_t> sizes(shape.begin(), shape.end() - 1);
    sizes.push_back(a.S_k);
    Tensor weights = empty(query, ScalarType::Float, sizes);
    if (weights.numel() == 0) return weights;
    product(make_view<float>(weights), make_view<T>(query), transpose(make_view<T>(key, a.group())),
            {a.batches, a.S_q, a.S_k, a.D, a.heads, 1, a.scale, true, a.first, a.last, mask}, stream);
    const int64_t rows = a.rows();
    attention_naive_softmax_kernel<<<grid_size(ceil_div(rows, THREADS / WARP)), THREADS, 0, stream>>>(
        static_cast<float*>(weights.data_ptr()), static_cast<float*>(lse.data_ptr()), rows, a.S_k);
    KL_LAUNCH_CHECK();
    return weights;
}

// The gradient of the scores, in memory as they are.
template <typename T>
Tensor attention_grad_scores(const Attention& a, const View<T>& grad, const float* grad_lse, const Tensor& weights,
                             const Tensor& value, cudaStream_t stream) {
    const Tensor grad_scores = empty_dense(weights);
    const auto ds = make_view<float>(grad_scores);
    product(ds, grad, transpose(make_view<T>(value, a.group())), {a.batches, a.S_q, a.S_k, a.D_v, a.heads, 1, 1.0f},
            stream);
    if (const int64_t rows = a.rows(); rows * a.S_k > 0) {
        attention_naive_softmax_backward_kernel<<<grid_size(ceil_div(rows, THREADS / WARP)), THREADS, 0, stream>>>(
            ds.data, static_cast<const float*>(weights.data_ptr()), grad_lse, rows, a.S_k);
        KL_LAUNCH_CHECK();
    }
    return grad_scores;
}

// A thread has an element of the mask with fewer summands than this, else a block.
constexpr int64_t SUMMANDS_OF_A_BLOCK = 2 * WARP;

template <int WIDTH, typename T>
void sum_grad_scores(const Tensor& grad_mask, const Tensor& grad_scores, const BroadcastMask& mask,
                     cudaStream_t stream) {
    const int64_t dim = grad_scores.dim();
    const auto grid = grid_size(ceil_div(mask.elements, THREADS / WIDTH));
    attention_naive_mask_backward_kernel<WIDTH, T><<<grid, THREADS, 0, stream>>>(
        static_cast<T*>(grad_mask.data_ptr()), static_cast<const float*>(grad_scores.data_ptr()), mask.walk_own(dim),
        mask.walk_shared(dim), mask.elements, mask.summands);
    KL_LAUNCH_CHECK();
}

}  // namespace

void attention_fill_negative_infinity(Tensor& lse, cudaStream_t stream) {
    const int64_t count = lse.numel();
    if (count == 0) return;
    attention_naive_fill_kernel<<<grid_size(ceil_div(count, THREADS)), THREADS, 0, stream>>>(
        static_cast<float*>(lse.data_ptr()), count);
    KL_LAUNCH_CHECK();
}

std::tuple<Tensor, Tensor> attention_naive(const Tensor& query, const Tensor& key, const Tensor& value,
                                           const std::optional<Tensor>& attn_mask, int64_t first, int64_t last,
                                           double scale, bool enable_gqa) {
    const Attention a = prepare_attention(query, key, value, first, last, scale, enable_gqa);
    const Mask mask = make_mask(attn_mask, query, a);
    const Launch launch(query);
    Tensor output = empty_ordered_like(query, a.D_v);
    Tensor lse = empty_like_query(query, ScalarType::Float, 0);
    if (output.numel() == 0) return {output, lse};
    if (a.S_k == 0) attention_fill_negative_infinity(lse, launch.stream);
    dispatch(query.scalar_type(), "attention", [&](auto zero) {
        using T = decltype(zero);
        const Tensor weights = attention_weights<T>(a, mask, query, key, lse, launch.stream);
        product(make_view<T>(output), make_view<float>(weights), make_view<T>(value, a.group()),
                {a.batches, a.S_q, a.D_v, a.S_k, a.heads, 1, 1.0f}, launch.stream);
    });
    return {output, lse};
}

std::tuple<Tensor, Tensor, Tensor> attention_backward_naive(const Tensor& grad, const std::optional<Tensor>& grad_lse,
                                                            const Tensor& query, const Tensor& key, const Tensor& value,
                                                            const std::optional<Tensor>& attn_mask, int64_t first,
                                                            int64_t last, double scale, bool enable_gqa) {
    const Attention a = prepare_attention(query, key, value, first, last, scale, enable_gqa);
    const Mask mask = make_mask(attn_mask, query, a);
    check_attention_output(grad, query, a, "grad");
    const float* of_lse = grad_lse_pointer(grad_lse, query, a);
    const Launch launch(query);
    Tensor grad_query = empty_ordered_like(query, a.D), grad_key = empty_ordered_like(key, a.D),
           grad_value = empty_ordered_like(value, a.D_v);
    Tensor lse = empty_like_query(query, ScalarType::Float, 0);
    dispatch(query.scalar_type(), "attention_backward", [&](auto zero) {
        using T = decltype(zero);
        const cudaStream_t stream = launch.stream;
        const Tensor weights = attention_weights<T>(a, mask, query, key, lse, stream);
        const auto p = make_view<float>(weights);
        const auto g = make_view<T>(grad);
        product(make_view<T>(grad_value), transpose(p), g,
                {a.batches, a.S_k, a.D_v, a.S_q, a.heads_kv, a.group(), 1.0f}, stream);

        const Tensor grad_scores = attention_grad_scores<T>(a, g, of_lse, weights, value, stream);
        const auto ds = make_view<float>(grad_scores);
        product(make_view<T>(grad_query), ds, make_view<T>(key, a.group()),
                {a.batches, a.S_q, a.D, a.S_k, a.heads, 1, a.scale}, stream);
        product(make_view<T>(grad_key), transpose(ds), make_view<T>(query),
                {a.batches, a.S_k, a.D, a.S_q, a.heads_kv, a.group(), a.scale}, stream);
    });
    return {grad_query, grad_key, grad_value};
}

Tensor attention_mask_backward_naive(const Tensor& grad, const std::optional<Tensor>& grad_lse, const Tensor& query,
                                     const Tensor& key, const Tensor& value, const Tensor& attn_mask, int64_t first,
                                     int64_t last, double scale, bool enable_gqa) {
    const Attention a = prepare_attention(query, key, value, first, last, scale, enable_gqa);
    const BroadcastMask mask(attn_mask, query, a);
    check_attention_output(grad, query, a, "grad");
    const float* of_lse = grad_lse_pointer(grad_lse, query, a);
    const Launch launch(query);
    Tensor grad_mask = empty_dense(attn_mask);
    if (a.rows() * a.S_k == 0) {
        fill_zero(grad_mask, launch.stream);
        return grad_mask;
    }
    Tensor lse = empty_like_query(query, ScalarType::Float, 0);
    dispatch(query.scalar_type(), "attention_mask_backward", [&](auto zero) {
        using T = decltype(zero);
        const Tensor weights = attention_weights<T>(a, mask.mask, query, key, lse, launch.stream);
        const Tensor grad_scores =
            attention_grad_scores<T>(a, make_view<T>(grad), of_lse, weights, value, launch.stream);
        if (mask.summands < SUMMANDS_OF_A_BLOCK) {
            sum_grad_scores<1, T>(grad_mask, grad_scores, mask, launch.stream);
        } else {
            sum_grad_scores<THREADS, T>(grad_mask, grad_scores, mask, launch.stream);
        }
    });
    return grad_mask;
}

void attention_naive_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    dispatch(dtype, "attention", [&](auto zero) {
        using T = decltype(zero);
        attributes.push_back(
            kernel_attributes<attention_naive_product_kernel<float, T, T>>("attention.naive.scores", THREADS));
        attributes.push_back(kernel_attributes<attention_naive_softmax_kernel>("attention.naive.softmax", THREADS));
        attributes.push_back(
            kernel_attributes<attention_naive_product_kernel<T, float, T>>("attention.naive.output", THREADS));
        attributes.push_back(
            kernel_attributes<attention_naive_softmax_backward_kernel>("attention_backward.naive.softmax", THREADS));
        attributes.push_back(kernel_attributes<attention_naive_mask_backward_kernel<1, T>>(
            "attention_backward.naive.mask.thread", THREADS));
        attributes.push_back(kernel_attributes<attention_naive_mask_backward_kernel<THREADS, T>>(
            "attention_backward.naive.mask.block", THREADS));
        attributes.push_back(kernel_attributes<attention_naive_fill_kernel>("attention.naive.fill", THREADS));
    });
}

}  // namespace kl
