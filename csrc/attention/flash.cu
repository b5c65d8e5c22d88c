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
    return flash_forward(query, key, value, attn_mask, a, Batched{});
}

void attention_flash_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    flash_attributes<Batched>(attributes, dtype, "attention.flash.");
}

}  // namespace kl
