// matmul, ninth and tenth step; the table of the climb stands in matmul.cuh.
//
//   persistent        blocks stay; loading runs ahead into the next tile     few tiles leave SMs idle
//   stream_k          the last turns' k-tiles, not tiles, are shared out     parts that wait for each other
//
// While the multiplying warpgroups round and store a tile, the stages already fill with the next one's operands. Sums
// leave by stmatrix into shared memory, in the swizzle of TMA, which writes them out while the warps go on: 64×64 at a
// time, in two buffers a warpgroup.
//
// Both warpgroups work on one 128×256 tile ("cooperative"), as in the steps before, rather than on tiles of their own,
// one storing while the other multiplies ("ping-pong"). A warpgroup alone would make 64×256 or 128×128, which asks L2
// for 5/3 or 4/3 of the bytes an output; at large sizes the GPU lowers its clock to stay within its power, and bytes
// cost power; and what ping-pong would hide, a tile's rounding, is about a hundredth of its products at K = 4096.
//
// stream_k (Osama et al., "Stream-K", arXiv:2301.03598) is the same kernel where the tiles of the last turn, which does
// not fill the GPU, and of the turn before are cut into equal parts along k (hopper.cuh, Shares). A block begins with
// the end of a tile that another begins, and ends with the beginning of one that others end; so that whoever adds up waits
// for what was made first.
//
// Who loads is the kernel's argument: TMA; or for operands whose rows begin anywhere TMA row by eighth row
// (unaligned.cu); or for all others warps with plain loads (plain.cu). For the last two tiles are always shared out.

#include "persistent.cuh"

namespace kl {

// One warp asks TMA, in clusters of two blocks that share what both read.
template <typename T, Major A, Major B>
struct TmaLoader {
    using Element = T;
    using Source = TmaOperands;
    using Multiply = MultiplyShared<T, A, B>;
    static constexpr int BLOCKS = CLUSTER, WARPGROUPS = 1, ARRIVALS = 1, REGISTERS = 40, CONSUMER_REGISTERS = 232;
    static constexpr Sums SUMS = Sums::in_order;

    const Source& from;
    int m0, n0, a_batch, b_batch;
    bool below;

    __device__ TmaLoader(const Source& from, const Tiled& p, bool below, int batch, int m0, int n0)
        : from(from), m0(m0), n0(n0), a_batch(batch * p.a_step), b_batch(batch * p.b_step), below(below) {}
    __device__ static void prefetch(const Source& from) {
        tma_prefetch(from.a);
        tma_prefetch(from.b);
    }
    __device__ static bool takes_part() { return warp_index() == 0 && elect_one(); }
    __device__ void load(uint32_t stage, uint32_t barrier, int k) const {
        mbarrier_arrive_expect(barrier, STAGE_BYTES);
        load_pair<A, B, BM, BN>(stage, from, barrier, below, m0, n0, k, a_batch, b_batch);
    }
};

void launch_persistent(const HopperCall& call, ScalarType dtype, const Launch& on, bool share) {
    dispatch_hopper(call, dtype, [&](auto zero, auto a_major, auto b_major) {
        using Loader = TmaLoader<decltype(zero), a_major(), b_major()>;
        launch_from<Loader>(call.operands(), call, call.tiled, pair_order(call.tiled, BM, BN), on, share);
    });
}

Tensor matmul_persistent(const Tensor& input, const Tensor& other, bool allow_tf32) {
    return run_hopper(input, other, allow_tf32, "persistent", [&](const HopperCall& call, const Launch& on) {
        launch_persistent(call, input.scalar_type(), on, false);
    });
}

Tensor matmul_stream_k(const Tensor& input, const Tensor& other, bool allow_tf32) {
    return run_hopper(input, other, allow_tf32, "stream_k", [&](const HopperCall& call, const Launch& on) {
        launch_persistent(call, input.scalar_type(), on, true);
    });
}

void matmul_persistent_facts(std::vector<KernelFacts>& facts, ScalarType dtype) {
    dispatch(dtype, "matmul", [&](auto zero) {
        using T = decltype(zero);
        using ByTma = TmaLoader<T, Major::K, sizeof(T) == 2 ? Major::MN : Major::K>;
        facts.push_back(kernel_facts<matmul_persistent_kernel<ByTma>>("matmul.persistent", 3 * WARPGROUP, SHARED));
    });
    unaligned_facts(facts, dtype);
    plain_facts(facts, dtype);
}

}  // namespace kl
