// attention: O = softmax(Q · Kᵀ · scale) · V, with the shapes of scaled_dot_product_attention. What every rung shares.
//
//   rung               the idea it adds                                            what limits it now
//   naive              one thread per element; scores go to memory and come back   memory, and CUDA cores
//   flash              tiles and an online softmax keep scores on chip; mma.sync   Hopper's full rate needs wgmma
//   wgmma              TMA loads tiles, wgmma multiplies from shared memory        products and softmax alternate
//   warp_specialized   a producer warp loads; consumer warpgroups share tiles      tensor cores idle during softmax
//   pingpong           softmax of one warpgroup under another's products           idle where a block begins and ends
//   persistent         persistent kernel with a tile scheduler                     tensor cores
//   split_kv           few queries: keys are split among blocks, for all SMs       reading keys and values
//
// query (…, H, S_q, D), key (…, H_kv, S_k, D), value (…, H_kv, S_k, D_v); query head h reads head h / (H / H_kv) of key
// and value. Query i sees the keys j of a band, i + first ≤ j ≤ i + last: causal masks and windows are such bands.
//
//   keys →           causal: last = 0      window: first = −1, last = 1      tiles of a causal mask
//   query 0          x . . . . .           x x . . . .                       ┌───┐
//   query 1          x x . . . .           x x x . . .                       │ ◣ │  ◣ on the diagonal: scores are tested
//   query 2          x x x . . .           . x x x . .                       ├───┼───┐
//   query 3          x x x x . .           . . x x x .                       │ ■ │ ◣ │  ■ every score is visible
//   query 4          x x x x x .           . . . x x x                       └───┴───┘  tiles to the right are skipped
//
// A mask in memory adds to or hides single scores. Operands may have any strides.
//
// The backward pass of `pingpong` and `persistent` is the faster of those of `wgmma` and `warp_specialized`:
// backward_on_hopper in kernel_ladder/selection/attention.py names it. `split_kv` has that of `flash`.
#pragma once

#include <numeric>
#include <optional>

#include "core/common.cuh"
#include "core/layout.h"
#include "core/ops.h"

namespace kl {

constexpr int MAX_HEAD_DIM = 256;
constexpr int MAX_LENGTH = 1 << 29;  // the sum of two lengths and a tile past the end fit in 32 bits
constexpr float INFINITE = std::numeric_limits<float>::infinity();

/// Layout of one operand: element (batch, head, row, column). Strides count elements.
template <typename T>
struct View {
    T* data;
    Strided batch;
    int64_t head, row, column;
    int group;   // consecutive query heads that share one head of this operand
    bool whole;  // rows consist of aligned vectors of 16 bytes

    __device__ T* at(int64_t batch_index, int head_index) const {
        return data + batch.offset(batch_index) + head_index / group * head;
    }
};

enum class MaskKind { NONE, BOOLEAN, ADDITIVE };

/// A mask in memory: element (batch, head, query, key), with strides of zero where it broadcasts.
struct Mask {
    const void* data = nullptr;
    Strided batch;
    int64_t head = 0, row = 0, column = 0;
    MaskKind kind = MaskKind::NONE;

    __device__ int64_t at(int64_t batch_index, int head_index) const {
        return batch.offset(batch_index) + head_index * head;
    }
    __host__ __device__ bool additive() const { return kind == MaskKind::ADDITIVE; }
    /// Applies the mask to a product of query and key: returns product · scale + bias, or for a boolean mask −inf or the
    /// product itself.
    template <typename T>
    __device__ float apply(float product, int64_t element, float scale) const {
        if (kind == MaskKind::BOOLEAN) return static_cast<const uint8_t*>(data)[element] != 0 ? product : -INFINITE;
        return fmaf(product, scale, to_float(static_cast<const T*>(data)[element]));
    }
};

/// Log-sum-exp of a row, as the fused kernels save it: max + log(sum). Under an additive mask the two are stored apart,
/// because the logarithm would vanish next to the numbers that such a mask may hold.
struct Lse {
    float* data;
    float* log_sum;  // null without an additive mask

    __device__ void store(int64_t row, float max, float log_of_sum) const {
        data[row] = log_sum == nullptr ? max + log_of_sum : max;
        if (log_sum != nullptr) log_sum[row] = log_of_sum;
    }
};

/// The sizes of one call, checked.
struct Attention {
    int64_t batches;  // 64 bits: products with the others may pass 2³¹
    int heads, heads_kv;
    int S_q, S_k;
    int D, D_v;
    int first, last;  // query i sees keys i + first … i + last; −S_q and S_k where a side hides nothing
    float scale;

    __host__ __device__ int group() const { return heads_kv > 0 ? heads / heads_kv : 1; }
    int64_t rows() const { return batches * heads * S_q; }
    bool hides_left() const { return first > -S_q; }
};

template <typename T>
View<T> make_view(const Tensor& tensor, int group = 1) {
    const auto sizes = tensor.sizes(), strides = tensor.strides();
    const int64_t dim = static_cast<int64_t>(sizes.size());
    View<T> view{static_cast<T*>(tensor.data_ptr()),
                 collapse(sizes.data(), strides.data(), dim - 3, "attention"),
                 strides[dim - 3],
                 strides[dim - 2],
                 strides[dim - 1],
                 std::max(group, 1),
                 false};
    view.whole = view.column == 1 && sizes[dim - 1] % Vec<T>::size == 0 && is_aligned16(view.data);
    // A dimension of one element may have any stride.
    for (int64_t d = 0; d < dim - 1; ++d) view.whole = view.whole && (sizes[d] == 1 || strides[d] % Vec<T>::size == 0);
    return view;
}

/// Checks the operands and returns their sizes. Raises unless they fit together.
inline Attention prepare_attention(const Tensor& query, const Tensor& key, const Tensor& value, int64_t first,
                                   int64_t last, double scale, bool enable_gqa) {
    const char* op = "attention";
    check_cuda(query, op, "query");
    check_like(key, query, op, "key");
    check_like(value, query, op, "value");
    const auto q = query.sizes(), k = key.sizes(), v = value.sizes();
    const size_t dim = q.size();
    KL_CHECK(dim >= 3, op, ": argument `query` must have at least 3 dimensions (..., H, S, D), got ", dim);
    KL_CHECK(k.size() == dim && v.size() == dim, op,
             ": arguments `key` and `value` must have as many dimensions as `query`");
    const int64_t heads = q[dim - 3], S_q = q[dim - 2], D = q[dim - 1];
    const int64_t heads_kv = k[dim - 3], S_k = k[dim - 2], D_v = v[dim - 1];
    const int64_t longest = std::max(std::max(S_q, S_k), std::max(heads, heads_kv));
    KL_CHECK(longest <= MAX_LENGTH, op, ": heads and lengths must be at most ", MAX_LENGTH, ", got ", longest);
    int64_t batches = 1;
    for (size_t d = 0; d + 3 < dim; ++d) {
        KL_CHECK(k[d] == q[d] && v[d] == q[d], op,
                 ": arguments `key` and `value` must have the batch dimensions of `query`");
        batches *= q[d];
    }
    KL_CHECK(v[dim - 3] == heads_kv && v[dim - 2] == S_k, op,
             ": argument `value` must have the heads and length of `key`");
    KL_CHECK(k[dim - 1] == D, op, ": argument `key` must have the head dimension of `query`");
    for (const int64_t size : {D, D_v}) {
        KL_CHECK(size >= 1 && size <= MAX_HEAD_DIM, op, ": head dimensions must be 1 to ", MAX_HEAD_DIM, ", got ",
                 size);
    }
    KL_CHECK(heads == heads_kv || (enable_gqa && heads_kv > 0 && heads % heads_kv == 0), op,
             ": argument `key` must have the heads of `query`, or with `enable_gqa` a divisor of them, got ", heads_kv,
             " for ", heads);
    return {batches,
            static_cast<int>(heads),
            static_cast<int>(heads_kv),
            static_cast<int>(S_q),
            static_cast<int>(S_k),
            static_cast<int>(D),
            static_cast<int>(D_v),
            static_cast<int>(std::min(std::max(first, -S_q), S_k)),
            static_cast<int>(std::min(std::max(last, -S_q), S_k)),
            static_cast<float>(scale)};
}

/// Checks a mask, which must have the shape of the scores (expanded by the caller).
inline Mask make_mask(const std::optional<Tensor>& mask, const Tensor& query, const Attention& a) {
    if (!mask.has_value()) return {};
    const char* op = "attention";
    check_cuda(*mask, op, "attn_mask");
    const bool boolean = mask->scalar_type() == ScalarType::Bool;
    KL_CHECK(boolean || mask->scalar_type() == query.scalar_type(), op,
             ": argument `attn_mask` must be boolean or have the dtype of `query`");
    KL_CHECK(mask->get_device_index() == query.get_device_index(), op,
             ": argument `attn_mask` must be on the device of `query`");
    const int64_t dim = query.dim();
    bool same = mask->dim() == dim && mask->size(dim - 1) == a.S_k;
    for (int64_t d = 0; same && d < dim - 1; ++d) same = mask->size(d) == query.size(d);
    KL_CHECK(same, op, ": argument `attn_mask` must have the shape of the scores");
    const auto strides = mask->strides();
    return {mask->data_ptr(), collapse(mask->sizes().data(), strides.data(), dim - 3, op),
            strides[dim - 3], strides[dim - 2],
            strides[dim - 1], boolean ? MaskKind::BOOLEAN : MaskKind::ADDITIVE};
}

/// Pointer to the gradient of the log-sum-exp, or null where there is none.
inline const float* grad_lse_pointer(const std::optional<Tensor>& grad_lse, const Tensor& query, const Attention& a) {
    if (!grad_lse.has_value()) return nullptr;
    KL_CHECK(grad_lse->is_cuda() && grad_lse->get_device_index() == query.get_device_index() &&
                 grad_lse->scalar_type() == ScalarType::Float && grad_lse->is_contiguous() &&
                 grad_lse->numel() == a.rows(),
             "attention_backward: argument `grad_lse` must be a dense float32 tensor of one value a query");
    return static_cast<const float*>(grad_lse->data_ptr());
}

/// Checks the output or its gradient: query's batches, heads and length, and D_v columns.
inline void check_attention_output(const Tensor& tensor, const Tensor& query, const Attention& a, const char* name) {
    check_like(tensor, query, "attention_backward", name);
    bool same = tensor.dim() == query.dim() && tensor.size(tensor.dim() - 1) == a.D_v;
    for (int64_t d = 0; same && d < query.dim() - 1; ++d) same = tensor.size(d) == query.size(d);
    KL_CHECK(same, "attention_backward: argument `", name, "` must have the shape of the output");
}

/// Allocates log-sum-exps: (…, H, S_q), or under an additive mask (2, …, H, S_q), maxima and logarithms of sums.
inline Tensor empty_lse(const Tensor& query, const Mask& mask) {
    const auto shape = query.sizes();
    std::vector<int64_t> sizes(shape.begin(), shape.end() - 1);
    if (mask.additive()) sizes.insert(sizes.begin(), 2);
    return empty(query, ScalarType::Float, sizes);
}

inline Lse make_lse(const Tensor& lse, const Mask& mask, const Attention& a) {
    float* data = static_cast<float*>(lse.data_ptr());
    return {data, mask.additive() ? data + a.rows() : nullptr};
}

/// Allocates a row-major tensor of query's batches, heads and length, with a last dimension of `columns` unless it is 0.
inline Tensor empty_like_query(const Tensor& query, ScalarType dtype, int64_t columns) {
    const auto shape = query.sizes();
    std::vector<int64_t> sizes(shape.begin(), shape.end() - 1);
    if (columns > 0) sizes.push_back(columns);
    return empty(query, dtype, sizes);
}

/// Allocates (…, H, S, columns) with the heads and length of an operand, in its memory order: (…, S, H, columns) where its
/// heads lie inside. The next layer then reads the result without a copy. `ordered_like` in cuda_impl/attention.py says the
/// same of fake tensors.
inline Tensor empty_ordered_like(const Tensor& operand, int64_t columns) {
    const auto shape = operand.sizes();
    std::vector<int64_t> sizes(shape.begin(), shape.end()), order(sizes.size());
    const size_t dim = sizes.size();
    sizes[dim - 1] = columns;
    std::iota(order.begin(), order.end(), 0);
    if (heads_lie_inside(operand)) std::swap(order[dim - 3], order[dim - 2]);
    const std::vector<int64_t> strides = dense_strides(sizes, order);
    return empty_strided(operand, operand.scalar_type(), sizes.data(), strides.data(), static_cast<int64_t>(dim));
}

inline Tensor empty_dense(const Tensor& like) {
    const auto shape = like.sizes();
    return empty(like, like.scalar_type(), std::vector<int64_t>(shape.begin(), shape.end()));
}

/// For gradients without summands and outputs of queries that see no key.
inline void fill_zero(Tensor& tensor, cudaStream_t stream) {
    const size_t bytes = static_cast<size_t>(tensor.numel()) * tensor.element_size();
    if (bytes > 0) KL_CUDA_CHECK(cudaMemsetAsync(tensor.data_ptr(), 0, bytes, stream));
}

/// For log-sum-exps of queries that see no key. (memset cannot write −inf.)
void attention_fill_negative_infinity(Tensor& lse, cudaStream_t stream);

/// Whether a forward pass has no summands. If there are queries but no keys, it fills in the results.
inline bool sums_nothing(const Attention& a, Tensor& output, Tensor& lse, cudaStream_t stream) {
    if (a.rows() > 0 && a.S_k > 0) return false;
    if (a.rows() > 0) {
        fill_zero(output, stream);
        attention_fill_negative_infinity(lse, stream);
    }
    return true;
}

}  // namespace kl
