// attention, backward pass of rung 2 of 7: flash. Later rungs without kernels of their own use these.
// Idea      Recompute the weights on chip, tile by tile, from the saved log-sum-exp (FlashAttention-2, Dao,
//           arXiv:2307.08691).
// Predicts  Reads of Q, K, V, O, dO per kernel and writes of dQ, dK, dV: no S_q × S_k matrix in memory.
// Limit now Weights and dP are computed twice, once per kernel.
// Next      –

#include "attention/flash_backward.cuh"

namespace kl {

void launch_flash_delta(const Tensor& delta, const float* grad_lse, const Tensor& grad, const Tensor& output,
                        const Attention& a, const Launch& launch) {
    dispatch_16bit(grad.scalar_type(), "attention_backward", [&](auto zero) {
        using T = decltype(zero);
        const auto grid = grid_size(ceil_div(a.rows(), DELTA_THREADS / WARP));
        attention_flash_delta_kernel<T><<<grid, DELTA_THREADS, 0, launch.stream>>>(
            static_cast<float*>(delta.data_ptr()), grad_lse, make_view<T>(grad), make_view<T>(output), a);
        KL_LAUNCH_CHECK();
    });
}

std::tuple<Tensor, Tensor, Tensor> attention_backward_flash(const Tensor& grad, const std::optional<Tensor>& grad_lse,
                                                            const Tensor& query, const Tensor& key, const Tensor& value,
                                                            const Tensor& output, const Tensor& lse,
                                                            const std::optional<Tensor>& attn_mask, int64_t first,
                                                            int64_t last, double scale, bool enable_gqa) {
    const Attention a = prepare_attention(query, key, value, first, last, scale, enable_gqa);
    return flash_backward(grad, grad_lse, query, key, value, output, lse, make_mask(attn_mask, query, a),
                          a.hides_left(), a, Batched{});
}

std::tuple<Tensor, Tensor, Tensor> attention_dropout_backward_flash(
    const Tensor& grad, const std::optional<Tensor>& grad_lse, const Tensor& query, const Tensor& key,
    const Tensor& value, const Tensor& output, const Tensor& lse, const std::optional<Tensor>& attn_mask, int64_t first,
    int64_t last, double scale, bool enable_gqa, int64_t threshold, double drop_scale, int64_t seed) {
    const Attention a = prepare_attention(query, key, value, first, last, scale, enable_gqa);
    return flash_backward(grad, grad_lse, query, key, value, output, lse, make_mask(attn_mask, query, a),
                          a.hides_left(), a, Batched{}, DropoutMask(threshold, drop_scale, seed, "attention"));
}

void attention_flash_backward_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    flash_backward_attributes<Any>(attributes, dtype, "attention_backward.flash.");
}

}  // namespace kl
