// The gradient of an additive mask is dS, summed over the dimensions that the mask broadcasts over. What of it `naive` and
// `flash` share: an additive mask in its own shape.
#pragma once

#include "attention/attention.cuh"

namespace kl {

/// An additive mask in its own shape, which broadcasts to that of the scores.
struct BroadcastMask {
    Mask mask;                           // by indices of the scores: strides of zero where it broadcasts
    std::vector<int64_t> sizes;          // of the mask, with as many dimensions as the scores
    std::vector<int64_t> shared;         // by dimension: scores that share an element of the mask
    int64_t elements = 1, summands = 1;  // the products of these

    BroadcastMask(const Tensor& attn_mask, const Tensor& query, const Attention& a) {
        const char* op = "attention_mask_backward";
        check_like(attn_mask, query, op, "attn_mask");
        const int64_t dim = query.dim(), missing = dim - attn_mask.dim();
        std::vector<int64_t> scores(query.sizes().begin(), query.sizes().end()), strides;
        scores.back() = a.S_k;
        for (int64_t d = 0; d < dim; ++d) {
            const int64_t size = d < missing ? 1 : attn_mask.size(d - missing);
            KL_CHECK(missing >= 0 && (size == 1 || size == scores[d]), op,
                     ": argument `attn_mask` must broadcast to the shape of the scores");
            const bool one = size == 1;
            sizes.push_back(size);
            shared.push_back(one ? scores[d] : 1);
            strides.push_back(one ? 0 : attn_mask.stride(d - missing));
            elements *= sizes[d];
            summands *= shared[d];
        }
        mask = {attn_mask.data_ptr(), collapse(scores.data(), strides.data(), dim - 3, op),
                strides[dim - 3],     strides[dim - 2],
                strides[dim - 1],     MaskKind::ADDITIVE};
    }

    /// A walk over the mask's own elements in a dense tensor of the scores' first `dims` dimensions, and one over those that
    /// share an element.
    Strided walk_own(int64_t dims) const { return walk(sizes, dims); }
    Strided walk_shared(int64_t dims) const { return walk(shared, dims); }

  private:
    Strided walk(const std::vector<int64_t>& over, int64_t dims) const {
        std::vector<int64_t> strides(dims, 1);
        for (int64_t d = dims - 1; d > 0; --d) strides[d - 1] = strides[d] * sizes[d] * shared[d];
        return collapse(over.data(), strides.data(), dims, "attention_mask_backward");
    }
};

}  // namespace kl
