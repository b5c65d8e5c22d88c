// The schedule of pingpong.cu, which persistent.cu has too: what a consumer warpgroup does for a tile of queries.
#pragma once

#include "attention/hopper.cuh"

namespace kl {

#if KL_SM90A

// Whose turn it is to issue products: barrier 1 + n lets consumer n go on, and the first goes first. Once a kernel.
__device__ inline void begin_turns(int consumer) {
    if (consumer == 0) named_barrier_arrive(1, 2 * WARPGROUP);
}

// The block's `turn`-th tile of queries, whose first step has place `begin` of the rings.
template <typename T, typename S>
__device__ inline void attend_in_turns(float (&output)[S::HEAD_DIM / 2], RunningSoftmax<S::KEYS>& softmax,
                                       const AttentionShared<S>& at, const Attention& a, const QueryTile<S>& tile,
                                       const ThreadRows& rows, int consumer, int turn, int begin) {
    const int next_consumer = (consumer + 1) % S::CONSUMERS;
    const uint32_t q = at.q + consumer * 64 * SWIZZLE_ROW;
    const float scale = a.scale * LOG2E;  // exp(x) = 2^(x · log2 e)
    float scores[S::KEYS / 2];
    uint32_t weights[S::KEYS / 16][4];

    mbarrier_wait(at.key_full(begin), phase_of(begin));
    mbarrier_wait(at.query_full(), turn % 2);
    issue_scores<T, S>(scores, q, at.key(begin));
    wgmma_wait<0>();
    wgmma_pin(scores);
    done_with(at.key_empty(begin));
    if (tile.steps == 1) done_with(at.query_empty());
    hide<S::KEYS>(scores, a, rows, tile.first_key(0));
    softmax.next(scores, scale);
    round_weights<T, S::KEYS>(weights, scores);

    if (tile.steps > 1) mbarrier_wait(at.key_full(begin + 1), phase_of(begin + 1));
    for (int step = 1; step < tile.steps; ++step) {
        const int i = begin + step;
        named_barrier_sync(1 + consumer, 2 * WARPGROUP);
        issue_scores<T, S>(scores, q, at.key(i));
        if (step > 1) softmax.rescale_output(output);  // under the product of the scores, where it costs no one time
        mbarrier_wait(at.value_full(i - 1), phase_of(i - 1));
        issue_output<T, S>(output, weights, at.value(i - 1), step > 1);
        named_barrier_arrive(1 + next_consumer, 2 * WARPGROUP);
        wgmma_wait<1>();
        wgmma_pin(scores);
        done_with(at.key_empty(i));
        if (step + 1 == tile.steps) done_with(at.query_empty());
        hide<S::KEYS>(scores, a, rows, tile.first_key(step));
        softmax.next(scores, scale);
        // The softmax must stand before the wait that follows, else it would not run beside the products of the values;
        // the assembler moves a wait up as far as it may, but not past the loop in which a barrier is asked.
        wgmma_pin(scores);
        if (step + 1 < tile.steps) mbarrier_wait(at.key_full(i + 1), phase_of(i + 1));
        wgmma_wait<0>();
        wgmma_pin(output);
        done_with(at.value_empty(i - 1));
        round_weights<T, S::KEYS>(weights, scores);
    }
    if (tile.steps > 1) softmax.rescale_output(output);
    const int i = begin + tile.steps - 1;
    mbarrier_wait(at.value_full(i), phase_of(i));
    issue_output<T, S>(output, weights, at.value(i), tile.steps > 1);
    wgmma_wait<0>();
    wgmma_pin(output);
    done_with(at.value_empty(i));
}

#endif

}  // namespace kl
