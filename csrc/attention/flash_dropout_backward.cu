// The backward pass of attention's `flash` with dropped weights: the instances of flash_backward.cuh that draw dropout's
// mask again. With F its factors, dV = (P ∘ F)ᵀ · dO and dS = P ∘ (F ∘ dP − delta); delta is still rowsum(dO ∘ O). A
// thread draws a call of Philox for two weights, and for each in the key kernel, whose tiles are transposed.

#include "attention/flash_backward.cuh"

namespace kl {

std::tuple<Tensor, Tensor, Tensor> attention_dropout_backward_flash(
    const Tensor& grad, const std::optional<Tensor>& grad_lse, const Tensor& query, const Tensor& key,
    const Tensor& value, const Tensor& output, const Tensor& lse, const std::optional<Tensor>& attn_mask, int64_t first,
    int64_t last, double scale, bool enable_gqa, int64_t threshold, double drop_scale, int64_t seed) {
    const Attention a = prepare_attention(query, key, value, first, last, scale, enable_gqa);
    return flash_backward(grad, grad_lse, query, key, value, output, lse, make_mask(attn_mask, query, a),
                          a.hides_left(), a, Dropped(DropoutMask(threshold, drop_scale, seed, "attention")));
}

}  // namespace kl
