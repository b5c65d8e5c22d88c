// attention_varlen, backward pass of rung 1 of 2: the kernels of attention's flash, on packed sequences. `pingpong` has it
// at head dimensions above 128; else warp_specialized_backward.cu.
// Idea      Each block looks up where its sequence begins and how long it is; the rest is flash_backward.cuh.
// Predicts  The time of attention's flash backward on each sequence alone.
// Limit now Every sequence has as many blocks as the longest needs; those past its end exit at once.
// Next      –

#include "attention/flash_backward.cuh"

namespace kl {

std::tuple<Tensor, Tensor, Tensor> attention_varlen_backward_flash(
    const Tensor& grad, const std::optional<Tensor>& grad_lse, const Tensor& query, const Tensor& key,
    const Tensor& value, const Tensor& output, const Tensor& lse, const Tensor& cu_seqlens_q,
    const Tensor& cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k, int64_t left, int64_t right, double scale,
    bool enable_gqa) {
    const Attention a = prepare_attention(query, key, value, -MAX_LENGTH, MAX_LENGTH, scale, enable_gqa);
    const Packed packed = make_packed(query, a, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, left, right);
    return flash_backward(grad, grad_lse, query, key, value, output, lse, Mask{}, packed.hides_left(), a, packed);
}

}  // namespace kl
