// attention, rung 7 of 7: split_kv. Layout of shared memory, and how partial softmaxes are merged: those of a block's warps,
// then in a cluster those of its runs.
//
// A partial softmax over some keys is (o, max, sum) with o = Σ exp(s_j − max) · v_j. Two of them merge by rescaling both to
// the larger maximum; o / sum is the output, and max + log(sum) the log-sum-exp.
//
//   warps of a block    (o, max, sum) in shared memory      merge_warps
//   runs of a cluster   (o / sum, log-sum-exp) over DSMEM   finish_rows
//   runs of a grid      (o / sum, log-sum-exp) in memory    attention_split_kv_combine_kernel, in split_kv.cu
#pragma once

#include "attention/tile.cuh"
#include "core/divisor.cuh"
#include "core/occupancy.cuh"
#include "sm90/cluster.cuh"

namespace kl {
namespace {

constexpr int ROWS = 16;  // of the tile of queries

/// Tile shape by head dimension. Each of WARPS warps has STAGES stages of TILE keys and values.
template <int HEAD_DIM_, int TILE_, int STAGES_, int WARPS_, int BLOCKS_, bool CLUSTER_ = false>
struct SplitShape {
    static constexpr int HEAD_DIM = HEAD_DIM_, TILE = TILE_, STAGES = STAGES_, WARPS = WARPS_, THREADS = WARPS * WARP;
    static constexpr int BLOCKS = BLOCKS_;     // per SM
    static constexpr bool CLUSTER = CLUSTER_;  // the runs of a head are a cluster
    using InCluster = SplitShape<HEAD_DIM, TILE, STAGES, WARPS * BLOCKS, 1, true>;
    static constexpr int Q_BYTES = ROWS * HEAD_DIM * 2, TILE_BYTES = TILE * HEAD_DIM * 2;
    static constexpr int STAGE_BYTES = WARPS * STAGES * 2 * TILE_BYTES;
    // With CLUSTER: received (output, lse) of rows, and the mbarrier that counts their bytes.
    static constexpr int ROW_FLOATS = HEAD_DIM + 4, RECEIVED = Q_BYTES + STAGE_BYTES,
                         BARRIER = RECEIVED + ROWS * ROW_FLOATS * 4;
    static constexpr int SHARED = CLUSTER ? BARRIER + 8 : RECEIVED;
    // The partial results of the warps reuse the memory of the stages.
    static_assert(WARPS * ROWS * (HEAD_DIM + 2) * 4 <= STAGE_BYTES);
};
//                       head dim, keys, stages, warps, blocks
using Split64 = SplitShape<64, 32, 3, 4, 2>;
using Split128 = SplitShape<128, 16, 3, 4, 2>;
using Split256 = SplitShape<256, 16, 2, 4, 1>;

template <typename T>
struct Operands {
    View<T> query, key, value;
    T* output;       // (batch, head, query, D_v), dense
    float* partial;  // the same for each run, where there are several
    Lse lse;         // (run, batch, head, query)
    Mask mask;
};

/// How the visible keys are split: run r has the keys from begin + r · length on.
struct Runs {
    int begin, end;              // the keys that are seen at all
    int length, count;           // keys per run; runs
    Divisor by_count, by_heads;  // divide by `count`, and by the heads of key and value
};

struct MaxAndSum {
    float max, sum;
};

/// Combines four columns of a row over its runs, and returns maximum and sum for its log-sum-exp. `first` points to the
/// results of run 0; those of the next run follow ROW_FLOATS later:
///
///   0 … D−1   output
///   D         log-sum-exp; under an additive mask the maximum
///   D + 1     0; under an additive mask the logarithm of the sum
///   D + 2 …   unused, so that a row consists of whole vectors of 16 bytes
template <typename S>
__device__ MaxAndSum combine_runs(float (&four)[4], const float* first, int runs, int column) {
    float lse[PORTABLE_CLUSTER], highest = -INFINITE, sum = 0.0f;
#pragma unroll
    for (int r = 0; r < PORTABLE_CLUSTER; ++r) {
        lse[r] = r < runs ? first[r * S::ROW_FLOATS + S::HEAD_DIM] : -INFINITE;
        highest = fmaxf(highest, lse[r]);
    }
    const float shift = highest == -INFINITE ? 0.0f : highest;
#pragma unroll
    for (int r = 0; r < PORTABLE_CLUSTER; ++r) {
        if (r >= runs) break;
        const float weight = exp2_approx((lse[r] - shift + first[r * S::ROW_FLOATS + S::HEAD_DIM + 1]) * LOG2E);
        sum += weight;
#pragma unroll
        for (int e = 0; e < 4; ++e) four[e] = fmaf(weight, first[r * S::ROW_FLOATS + column + e], four[e]);
    }
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
#pragma unroll
    for (float& x : four) x *= inverse;
    return {highest, sum};
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

// Shared memory of a block. Once the mainloop is done, the partial results of the warps overwrite the stages.
//
//   0 …           queries: ROWS × HEAD_DIM
//   Q_BYTES …     per warp a ring of STAGES: TILE keys, TILE values
//                 then results (warp, row, HEAD_DIM) and stats (warp, row): maximum, sum
//   RECEIVED …    CLUSTER alone: (row that this block finishes, run): ROW_FLOATS
//   BARRIER       CLUSTER alone: the mbarrier that counts the received bytes
template <typename S>
struct SplitSmem {
    unsigned char* bytes;

    __device__ uint32_t queries() const { return shared_address(bytes); }
    __device__ uint32_t ring(int warp) const { return queries() + S::Q_BYTES + warp * S::STAGES * 2 * S::TILE_BYTES; }
    __device__ float* results() const { return reinterpret_cast<float*>(bytes + S::Q_BYTES); }
    __device__ float* stats() const { return results() + S::WARPS * ROWS * S::HEAD_DIM; }
    __device__ float* received() const { return reinterpret_cast<float*>(bytes + S::RECEIVED); }
    __device__ uint32_t arrived() const { return queries() + S::BARRIER; }
};

/// The queries of a block: those of all heads that share a head of keys, head by head, packed as the rows of one tile.
struct PackedQueries {
    int64_t batch;
    int head0, rows;

    /// Index of a row in (batch, head, query).
    __device__ int64_t index(int row, const Attention& a) const {
        return ((batch * a.heads + head0 + row / a.S_q) * a.S_q) + row % a.S_q;
    }
};

/// Stores four columns of a row, those inside D_v.
template <typename To>
__device__ __forceinline__ void store_four(To* to, const float (&four)[4], int column, const Attention& a) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        if (column + e < a.D_v) to[column + e] = from_float<To>(four[e]);
    }
}

/// Sends four floats of a row's result to the block of the cluster that finishes the row: block `row mod count`.
template <typename S>
__device__ __forceinline__ void send_to_finisher(const SplitSmem<S>& smem, const Runs& runs, int run, int row,
                                                 int column, const float4& four) {
#if __CUDA_ARCH__ >= 900
    const uint32_t slot = runs.by_count.quotient(row), to = row - slot * runs.count;
    float* const place = smem.received() + (slot * runs.count + run) * S::ROW_FLOATS + column;
    if (to == run) {
        *reinterpret_cast<float4*>(place) = four;
    } else {
        cluster::send(shared_address(place), four, smem.arrived(), to);
    }
#endif
}

/// Merges the warps' partial results of each row. The result of a single run goes to the output, and one of several runs to
/// `partial`. In a cluster it goes to the block that finishes the row.
template <bool CLUSTER, typename S, typename T>
__device__ __forceinline__ void merge_warps(const SplitSmem<S>& smem, const Operands<T>& p, const Attention& a,
                                            const Runs& runs, const PackedQueries& queries, int run,
                                            const MaskedUnits& units) {
    constexpr int D = S::HEAD_DIM, WARPS = S::WARPS;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const float *results = smem.results(), *stats = smem.stats();
    const int64_t all_rows = a.batches * a.heads * a.S_q;
    for (int row = warp; row < queries.rows; row += WARPS) {
        float max_of_all = -INFINITE, sum = 0.0f, factor[WARPS];
#pragma unroll
        for (int w = 0; w < WARPS; ++w) max_of_all = fmaxf(max_of_all, stats[(w * ROWS + row) * 2]);
        const float shift = max_of_all == -INFINITE ? 0.0f : max_of_all;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            factor[w] = exp2_approx((stats[(w * ROWS + row) * 2] - shift) * units.factor);
            sum = fmaf(factor[w], stats[(w * ROWS + row) * 2 + 1], sum);
        }
        const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
        const float highest = max_of_all * units.to_log, log_of_sum = logf(sum);
        const int64_t index = queries.index(row, a);
        if (lane == 0) {
            if constexpr (CLUSTER) {
                const bool apart = p.mask.additive();
                send_to_finisher(
                    smem, runs, run, row, D,
                    make_float4(apart ? highest : highest + log_of_sum, apart ? log_of_sum : 0.0f, 0.0f, 0.0f));
            } else {
                p.lse.store(run * all_rows + index, highest, log_of_sum);
            }
        }
        for (int column = lane * 4; column < D; column += WARP * 4) {
            float four[4] = {};
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    four[e] = fmaf(factor[w], results[(w * ROWS + row) * D + column + e], four[e]);
                }
            }
#pragma unroll
            for (float& x : four) x *= inverse;
            if constexpr (CLUSTER) {
                send_to_finisher(smem, runs, run, row, column, make_float4(four[0], four[1], four[2], four[3]));
            } else if (runs.count > 1) {
                store_four(p.partial + (run * all_rows + index) * a.D_v, four, column, a);
            } else {
                store_four(p.output + index * a.D_v, four, column, a);
            }
        }
    }
}

#if __CUDA_ARCH__ >= 900

/// Prepares the mbarrier for `bytes` from the other blocks of the cluster. cluster_wait must precede the first send.
template <typename S>
__device__ __forceinline__ void expect_runs(const SplitSmem<S>& smem, int bytes) {
    if (threadIdx.x == 0) {
        mbarrier_init(smem.arrived(), 1);
        mbarrier_init_fence();
        mbarrier_arrive_expect_tx(smem.arrived(), bytes);
    }
    __syncwarp();
    cluster_arrive_relaxed();
}

/// Waits for the runs of the rows that this block finishes, combines them and stores the results.
template <typename S, typename T>
__device__ __forceinline__ void finish_rows(const SplitSmem<S>& smem, const Operands<T>& p, const Attention& a,
                                            const Runs& runs, const PackedQueries& queries, int run, int finished) {
    constexpr int D = S::HEAD_DIM;
    __syncthreads();
    mbarrier_wait(smem.arrived(), 0);
    for (int i = threadIdx.x; i < finished * (D / 4); i += S::THREADS) {
        const int slot = i / (D / 4), column = i % (D / 4) * 4;
        float four[4] = {};
        const MaxAndSum row =
            combine_runs<S>(four, smem.received() + slot * runs.count * S::ROW_FLOATS, runs.count, column);
        const int64_t index = queries.index(slot * runs.count + run, a);
        if (column == 0) p.lse.store(index, row.max, logf(row.sum));
        store_four(p.output + index * a.D_v, four, column, a);
    }
}

#endif

#endif

}  // namespace
}  // namespace kl
