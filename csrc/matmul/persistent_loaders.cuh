// Producers of the persistent kernels: who fills the stages of shared memory, TMA or warps with plain loads. The warps
// that multiply do not see the difference.
#pragma once

#include "matmul/hopper.cuh"
#include "matmul/plain_loader.cuh"

namespace kl {
namespace persistent {

constexpr int BM = 128, BN = 256, STAGES = 4, CONSUMERS = 2;
constexpr int A_BYTES = BM * SWIZZLE_ROW, B_BYTES = BN * SWIZZLE_ROW, STAGE_BYTES = A_BYTES + B_BYTES;

// One warp issues TMA loads, in clusters of two blocks that share by multicast what both read.
template <typename T, Major A_MAJOR, Major B_MAJOR>
struct TmaLoader {
    using Element = T;
    using Source = TmaOperands;
    static constexpr Major A = A_MAJOR, B = B_MAJOR;
    static constexpr int BLOCKS = CLUSTER, WARPGROUPS = 1, ARRIVALS = 1, REGISTERS = 40, CONSUMER_REGISTERS = 232,
                         PARTS = 1;

    const Source& from;
    int m0, n0, a_batch, b_batch;
    bool below;

    __device__ TmaLoader(const Source& from, const Tiled& p, bool below, int batch, int m0, int n0)
        : from(from), m0(m0), n0(n0), a_batch(batch * p.a_step), b_batch(batch * p.b_step), below(below) {}
    __device__ static void prefetch(const Source& from) { from.prefetch(); }
    __device__ static bool takes_part() { return warp_index() == 0 && elect_one(); }
    __device__ void load(uint32_t stage, uint32_t barrier, int k) const {
        mbarrier_arrive_expect_tx(barrier, STAGE_BYTES);
        load_pair<A, B, BM, BN>(stage, from, barrier, below, m0, n0, k, a_batch, b_batch);
    }
};

// Two warpgroups load with plain loads, each block for itself. TMA loads an operand that it can read along k.
template <typename T>
struct PlainLoader {
    using Element = T;
    struct Source {
        TmaOperands tma;
        bool a_by_tma, b_by_tma;
        const T *a, *b;
        Product product;
    };
    static constexpr Major A = Major::K, B = Major::K;
    static constexpr int BLOCKS = 1, WARPGROUPS = 2, ARRIVALS = WARPGROUPS * WARPGROUP / WARP + 1;
    static constexpr int REGISTERS = 88, CONSUMER_REGISTERS = 168, PARTS = 2;

    const Source& from;
    PlainOperand<T, WARPGROUPS * WARPGROUP> a, b;
    int K, m0, n0, a_batch, b_batch;

    __device__ PlainLoader(const Source& from, const Tiled& p, bool, int batch, int m0, int n0)
        : from(from), K(p.K), m0(m0), n0(n0), a_batch(batch * p.a_step), b_batch(batch * p.b_step) {
        const Product& q = from.product;
        int64_t a_offset, b_offset;
        q.batch_offsets(batch, &a_offset, &b_offset);
        a = {from.a + a_offset + m0 * q.a_m, q.a_m, q.a_k, p.M - m0};
        b = {from.b + b_offset + n0 * q.b_n, q.b_n, q.b_k, p.N - n0};
    }
    __device__ static void prefetch(const Source&) {}
    __device__ static bool takes_part() { return true; }
    __device__ void load(uint32_t stage, uint32_t barrier, int k) const {
        const auto thread = static_cast<int>(threadIdx.x);
        if (thread == 0) {
            mbarrier_arrive_expect_tx(barrier, (from.a_by_tma ? A_BYTES : 0) + (from.b_by_tma ? B_BYTES : 0));
            if (from.a_by_tma) load_tile<Major::K, BM>(stage, from.tma.a, barrier, m0, k, a_batch);
            if (from.b_by_tma) load_tile<Major::K, BN>(stage + A_BYTES, from.tma.b, barrier, n0, k, b_batch);
        }
        if (!from.a_by_tma) a.template load<BM>(stage, thread, k, K - k);
        if (!from.b_by_tma) b.template load<BN>(stage + A_BYTES, thread, k, K - k);
        fence_async_shared();
        __syncwarp();
        if (threadIdx.x % WARP == 0) mbarrier_arrive(barrier);
    }
};

}  // namespace persistent
}  // namespace kl
