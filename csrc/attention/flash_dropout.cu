// attention's `flash` with dropped weights: the instances of flash.cuh that draw dropout's mask.
//
// A thread draws a call of Philox for two weights. Weights are summed before they are dropped, so that the log-sum-exp is
// that of a call that keeps them.

#include "attention/flash.cuh"

namespace kl {

std::tuple<Tensor, Tensor> attention_dropout_flash(const Tensor& query, const Tensor& key, const Tensor& value,
                                                   const std::optional<Tensor>& attn_mask, int64_t first, int64_t last,
                                                   double scale, bool enable_gqa, int64_t threshold, double drop_scale,
                                                   int64_t seed) {
    const Attention a = prepare_attention(query, key, value, first, last, scale, enable_gqa);
    return flash_forward(query, key, value, attn_mask, a,
                         Dropped(DropoutMask(threshold, drop_scale, seed, "attention")));
}

}  // namespace kl
