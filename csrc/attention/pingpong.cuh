// The consumer mainloop of the ping-pong schedule, which the rungs pingpong, persistent and attention_varlen share.
//
// Two overlaps. Within a warpgroup, softmax i runs while the tensor cores compute O += P(i−1) · V(i−1):
//
//   tensor cores   ├─ S(i) ─┤├─ O += P(i−1) · V(i−1) ─┤├─ S(i+1) ─┤├─ O += P(i) · V(i) ─┤
//   CUDA cores               ├─ softmax i ────────────┤            ├─ softmax i + 1 ────┤
//
// Between warpgroups, named barriers order the products, so that one's softmax falls under the other's products:
//
//   consumer 0     products ─┐ softmax        ┌ products ─┐ softmax        ┌ products
//   barrier                  └► 2             │ 1 ◄┐      └► 2             │ 1 ◄┐
//   consumer 1     waits        products ─────┴────┘        products ──────┴────┘
//
// "products" is the issue of S(i) and O(i−1). A warpgroup arrives at the next one's barrier as soon as it has issued its own.
#pragma once

#include "attention/hopper.cuh"

namespace kl {

#if KL_SM90A

/// Ping-pong: named barrier 1 + n lets consumer warpgroup n issue its next products. The arrival here stands for the
/// predecessor of consumer 0, so that it starts. Must be called once per kernel.
__device__ inline void init_pingpong_barriers(int consumer) {
    if (consumer == 0) named_barrier_arrive(1, 2 * WARPGROUP);
}

/// Mainloop of one consumer warpgroup over work tile number `iteration` of the block, whose first step is pipeline tile
/// `begin`. The prologue computes S(0) and its softmax, the epilogue the last O. Each step between issues both products,
/// S(step) and O(step − 1), and computes the softmax of S(step) while O(step − 1) is still running.
template <typename T, typename S>
__device__ inline void pingpong_mainloop(float (&output)[S::VALUE_DIM / 2], OnlineSoftmaxState<S::KEYS>& softmax,
                                         const AttentionSmem<S>& smem, const Attention& a, const QueryTile<S>& tile,
                                         const ThreadRows& rows, int consumer, int iteration, int begin) {
    const int next_consumer = (consumer + 1) % S::CONSUMERS;
    const uint32_t q = smem.q + consumer * 64 * SWIZZLE_ROW;
    const float scale = a.scale * LOG2E;  // exp(x) = 2^(x · log2 e)
    float scores[S::KEYS / 2];
    uint32_t weights[S::KEYS / 16][4];

    // Prologue: S(0) and its softmax.
    mbarrier_wait(smem.key_full(begin), phase_of(begin));
    mbarrier_wait(smem.query_full(), iteration % 2);
    gemm_qk<T, S>(scores, q, smem.key(begin));
    wgmma_wait<0>();
    wgmma_pin(scores);
    release_stage(smem.key_empty(begin));
    if (tile.steps == 1) release_stage(smem.query_empty());
    apply_mask<S::KEYS>(scores, a, rows, tile.first_key(0));
    softmax.update(scores, scale);
    round_weights<T, S::KEYS>(weights, scores);

    if (tile.steps > 1) mbarrier_wait(smem.key_full(begin + 1), phase_of(begin + 1));
    for (int step = 1; step < tile.steps; ++step) {
        const int i = begin + step;
        named_barrier_sync(1 + consumer, 2 * WARPGROUP);
        gemm_qk<T, S>(scores, q, smem.key(i));
        if (step > 1) softmax.rescale_output(output);  // while S(step) is computed
        mbarrier_wait(smem.value_full(i - 1), phase_of(i - 1));
        gemm_pv<T, S>(output, weights, smem.value(i - 1), step > 1);
        named_barrier_arrive(1 + next_consumer, 2 * WARPGROUP);
        wgmma_wait<1>();  // S(step) is there; O(step − 1) may still run
        wgmma_pin(scores);
        release_stage(smem.key_empty(i));
        if (step + 1 == tile.steps) release_stage(smem.query_empty());
        apply_mask<S::KEYS>(scores, a, rows, tile.first_key(step));
        softmax.update(scores, scale);
        // The softmax overlaps O(step − 1) only if it precedes the wait for it below. ptxas hoists such a wait as far as it
        // can, but not over the loop that polls a barrier.
        wgmma_pin(scores);
        if (step + 1 < tile.steps) mbarrier_wait(smem.key_full(i + 1), phase_of(i + 1));
        wgmma_wait<0>();
        wgmma_pin(output);
        release_stage(smem.value_empty(i - 1));
        round_weights<T, S::KEYS>(weights, scores);
    }
    // Epilogue: the last O.
    if (tile.steps > 1) softmax.rescale_output(output);
    const int i = begin + tile.steps - 1;
    mbarrier_wait(smem.value_full(i), phase_of(i));
    gemm_pv<T, S>(output, weights, smem.value(i), tile.steps > 1);
    wgmma_wait<0>();
    wgmma_pin(output);
    release_stage(smem.value_empty(i));
}

#endif

}  // namespace kl
