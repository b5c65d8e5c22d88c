// attention, rung 2 of 7: flash
// Idea      A block has BLOCK queries and walks over tiles of STREAM keys and values. An online softmax keeps scores on
//           chip; mma.sync multiplies on tensor cores (FlashAttention-2, Dao, arXiv:2307.08691).
// Predicts  Reads of Q, K, V and one write of O: no S_q × S_k matrix in memory.
// Limit now mma.sync: Hopper's full tensor-core rate needs wgmma.
// Next      `wgmma`: TMA and wgmma.

#include "attention/flash.cuh"

namespace kl {

std::tuple<Tensor, Tensor> attention_flash(const Tensor& query, const Tensor& key, const Tensor& value,
                                           const std::optional<Tensor>& attn_mask, int64_t first, int64_t last,
                                           double scale, bool enable_gqa) {
    const Attention a = prepare_attention(query, key, value, first, last, scale, enable_gqa);
    const Mask mask = make_mask(attn_mask, query, a);
    const Launch launch(query);
    Tensor output = empty_like_query(query, query.scalar_type(), a.D_v);
    Tensor lse = empty_lse(query, mask);
    if (sums_nothing(a, output, lse, launch.stream)) return {output, lse};
    dispatch_16bit(query.scalar_type(), "attention", [&](auto zero) {
        using T = decltype(zero);
        const Operands<T> operands{make_view<T>(output),           make_view<T>(query),    make_view<T>(key, a.group()),
                                   make_view<T>(value, a.group()), make_lse(lse, mask, a), mask};
        launch_flash(operands, a, Batched{}, a.hides_left(), launch);
    });
    return {output, lse};
}

void attention_flash_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    flash_attributes<Batched>(attributes, dtype, "attention.flash.");
}

}  // namespace kl
