// attention, rung 2 of 7: flash
// Idea      A block has BLOCK queries and walks over tiles of STREAM keys and values. An online softmax keeps scores on
//           chip; mma.sync multiplies on tensor cores (FlashAttention-2, Dao, arXiv:2307.08691).
// Predicts  Reads of Q, K, V and one write of O: no S_q × S_k matrix in memory.
// Limit now mma.sync: Hopper's full tensor-core rate needs wgmma.
// Next      `wgmma`: TMA and wgmma.

#include "attention/flash.cuh"

namespace kl {

namespace {

std::tuple<Tensor, Tensor> flash_forward(const Tensor& query, const Tensor& key, const Tensor& value,
                                         const std::optional<Tensor>& attn_mask, int64_t first, int64_t last,
                                         double scale, bool enable_gqa, const std::optional<DropoutMask>& dropout) {
    const Attention a = prepare_attention(query, key, value, first, last, scale, enable_gqa);
    const Mask mask = make_mask(attn_mask, query, a);
    const Launch launch(query);
    Tensor output = empty_ordered_like(query, a.D_v);
    Tensor lse = empty_lse(query, mask);
    if (sums_nothing(a, output, lse, launch.stream)) return {output, lse};
    dispatch_16bit(query.scalar_type(), "attention", [&](auto zero) {
        using T = decltype(zero);
        const FlashOperands<T> operands{make_view<T>(output),         make_view<T>(query),
                                        make_view<T>(key, a.group()), make_view<T>(value, a.group()),
                                        make_lse(lse, mask, a),       mask};
        launch_flash(operands, a, Batched{}, a.hides_left(), dropout, launch);
    });
    return {output, lse};
}

}  // namespace

std::tuple<Tensor, Tensor> attention_flash(const Tensor& query, const Tensor& key, const Tensor& value,
                                           const std::optional<Tensor>& attn_mask, int64_t first, int64_t last,
                                           double scale, bool enable_gqa) {
    return flash_forward(query, key, value, attn_mask, first, last, scale, enable_gqa, {});
}

std::tuple<Tensor, Tensor> attention_dropout_flash(const Tensor& query, const Tensor& key, const Tensor& value,
                                                   const std::optional<Tensor>& attn_mask, int64_t first, int64_t last,
                                                   double scale, bool enable_gqa, int64_t threshold, double drop_scale,
                                                   int64_t seed) {
    return flash_forward(query, key, value, attn_mask, first, last, scale, enable_gqa,
                         DropoutMask(threshold, drop_scale, seed, "attention"));
}

void attention_flash_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    flash_attributes<Any, Shape64, Shape128>(attributes, dtype, "attention.flash.");
}

}  // namespace kl
