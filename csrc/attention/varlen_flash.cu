// attention_varlen, rung 1 of 2: flash
// Idea      The kernel of attention's `flash`, on sequences of several lengths packed one after the other. Each block looks
//           up where its sequence begins and how long it is (FlashAttention-2, Dao, arXiv:2307.08691).
// Predicts  The rate of attention's `flash` on the tiles that the sequences fill.
// Limit now mma.sync: Hopper's full tensor-core rate needs wgmma.
// Next      `pingpong`: TMA, wgmma and the ping-pong schedule.
//
// Tiles are filled with zeros past the end of a sequence, so that no row of the next one is read.

#include "attention/flash.cuh"

namespace kl {

std::tuple<Tensor, Tensor> attention_varlen_flash(const Tensor& query, const Tensor& key, const Tensor& value,
                                                  const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
                                                  int64_t max_seqlen_q, int64_t left, int64_t right, double scale,
                                                  bool enable_gqa) {
    const Attention a = prepare_attention(query, key, value, -MAX_LENGTH, MAX_LENGTH, scale, enable_gqa);
    const Packed packed = make_packed(query, a, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, a.S_k, left, right);
    const Launch launch(query);
    Tensor output = empty(query, query.scalar_type(), {a.S_q, a.heads, a.D_v});
    Tensor lse = empty(query, ScalarType::Float, {a.heads, a.S_q});
    if (sums_nothing(a, output, lse, launch.stream)) return {output, lse};
    dispatch_16bit(query.scalar_type(), "attention_varlen", [&](auto zero) {
        using T = decltype(zero);
        const FlashOperands<T> operands{packed_view<T>(output),       make_view<T>(query),
                                        make_view<T>(key, a.group()), make_view<T>(value, a.group()),
                                        make_lse(lse, Mask{}, a),     Mask{}};
        launch_flash(operands, a, packed, packed.hides_left(), {}, launch);
    });
    return {output, lse};
}

}  // namespace kl
