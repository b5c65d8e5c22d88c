// matmul, rung 14 of 16: stream_k
// Idea      The tiles of the last two waves are cut into equal parts along K, one per block, so that no SM is idle.
// Predicts  T tiles on S SMs take T / S tile times instead of ceil(T / S), plus the fix-up. At most one block per SM
//           stores and adds 128 KiB of partial sums.
// Limit now Blocks that wait for the partial sums of others.
// Next      `split_k`: for few tiles, pass partial sums through distributed shared memory.
//
// Osama et al., "Stream-K", arXiv:2301.03598.
//
// Shared code: the kernel of `persistent`, with the schedule of tile_scheduler.cuh and the fix-up of
// stream_k_fixup.cuh. A block begins with the end of a tile that another block begins. It ends with the beginning of a
// tile that others end. So the block that adds waits for what was computed first. Partial sums are added in the order
// of K, so every run gives the same bits.

#include "matmul/hopper.cuh"

namespace kl {
namespace {

// Each part of a product shares its last waves where that pays: fewer tiles fill them differently.
bool shares(const HopperCall& call, ScalarType dtype, const Launch& on) {
    const int64_t block_k = SWIZZLE_ROW / (dtype == ScalarType::Float ? sizeof(float) : sizeof(half));
    const int64_t workers = multiprocessors(on.device) / CLUSTER;
    return !call.part() || worth_sharing(call.tiled, ceil_div(call.tiled.K, block_k), workers);
}

}  // namespace

void launch_stream_k(const HopperCall& call, ScalarType dtype, const Launch& on) {
    launch_persistent(call, dtype, on, shares(call, dtype, on));
}

Tensor matmul_stream_k(const Tensor& input, const Tensor& other, bool allow_tf32) {
    return run_hopper(input, other, allow_tf32, "stream_k", [&](const HopperCall& call, const Launch& on) {
        launch_stream_k(call, input.scalar_type(), on);
    });
}

}  // namespace kl
