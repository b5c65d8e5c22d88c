// The backward pass of 16-bit rows that would take all vectors a thread can share: by clusters that stay, a thread with one
// vector of each of their rows. Of columns it has a quarter as many sums, so that an SM has 32 warps in place
// of 16, and no warp waits for a row's sums before it has gone over the next one.
#pragma once

#include "norm/backward.cuh"
#include "reduce/short_rows.cuh"

namespace kl {

// How such a kernel works: a turn has ROWS rows, STAGES turns are on the chip, a block has THREADS.
template <int ROWS_, int STAGES_, int THREADS_>
struct Stay {
    static constexpr int ROWS = ROWS_, STAGES = STAGES_, THREADS = THREADS_, WARPS = THREADS / WARP;
    static constexpr int SLOTS = 2 * ROWS * STAGES;  // vectors of a thread in shared memory
};

// Where warps, and the blocks of a cluster, leave what they found in a turn's rows. In shared memory.
//
// A value of turn t + 4 is sent by a block that has received turn t + 2, for which every warp had to leave its own, and each
// did that after it had received turn t: nothing is overwritten before it is read. Nor are the warps' values: one that
// leaves its own of turn t + 2 has received turn t.
template <typename V, typename STAY>
struct StayMail {
    static constexpr int TURNS = 4, ROWS = STAY::ROWS, WARPS = STAY::WARPS;
    V of_blocks[TURNS][ROWS][MAX_CLUSTER], of_warps[2][ROWS][WARPS];
    uint64_t arrived[TURNS], filled[2];  // mbarriers

#if __CUDA_ARCH__ >= 900
    // To be called before all else, and cluster::wait() before the first value is left. Best with loads under way.
    __device__ void open() {
        if (threadIdx.x == 0) {
            for (uint64_t& barrier : arrived) mbarrier_init(shared_address(&barrier), 1);
            for (uint64_t& barrier : filled) mbarrier_init(shared_address(&barrier), WARPS * ROWS);
            mbarrier_init_fence();
        }
        cluster::arrive_relaxed();  // the fence has made the barriers known, and there is nothing else to see
    }

    // Leaves what this warp found, in the lanes that finish its rows. The first warps, one a row, make one value of all of the
    // block's and send it.
    template <typename Op>
    __device__ void leave(int turn, const V& value, Op op) {
        constexpr int LANES = WARP / ROWS;
        const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, box = turn % TURNS;
        const uint32_t full = shared_address(&filled[turn % 2]), arrives = shared_address(&arrived[box]);
        if (lane % LANES == 0) {
            of_warps[turn % 2][lane / LANES][warp] = value;
            mbarrier_arrive(full);
        }
        if (warp >= ROWS) return;
        const int blocks = static_cast<int>(cluster::blocks());
        if (threadIdx.x == 0) mbarrier_arrive_expect(arrives, ROWS * blocks * sizeof(V));
        mbarrier_wait(full, turn / 2 % 2);
        const V of_block = over_lanes(of_warps[turn % 2][warp][lane % WARPS], op, WARPS);
        if (lane < blocks)
            cluster::send(shared_address(&of_blocks[box][warp][cluster::rank()]), of_block, arrives, lane);
    }

    // Waits for what the blocks sent.
    __device__ void wait(int turn) { mbarrier_wait(shared_address(&arrived[turn % TURNS]), turn / TURNS % 2); }

    // Its sum for a row, the same in all threads. Clusters are small: an exchange among lanes would cost more.
    template <typename Op>
    __device__ V sum(int turn, int row, Op op) const {
        const int blocks = static_cast<int>(cluster::blocks());
        V total = of_blocks[turn % TURNS][row][0];
#pragma unroll 1
        for (int block = 1; block < blocks; ++block) total = op(total, of_blocks[turn % TURNS][row][block]);
        return total;
    }
#endif
};

// This thread's vectors of its cluster's rows, which come in turns: every `apart`-th from row `first` on.
template <typename T, bool CENTRED, typename STAY>
struct StayRows {
    static constexpr int E = Vec<T>::size, ROWS = STAY::ROWS, THREADS = STAY::THREADS;

    const NormBackward<T>& p;
    const int at, count, apart, first;
    const bool inside;  // of a row
    uint4* const own;   // slots
    uint4 weight;
    const T *input, *grad;  // of the next turn that is fetched
    Worked<T, CENTRED> part;

    __device__ StayRows(const NormBackward<T>& p_in, int group, int rank, uint4* shared)
        : p(p_in),
          at(rank * THREADS + static_cast<int>(threadIdx.x)),
          count(static_cast<int>(p.count)),
          apart(static_cast<int>(p.apart)),
          first(group * ROWS),
          inside(at * E < static_cast<int>(p.length)),
          own(shared + threadIdx.x),
          weight(filled<T>(1.0f)),
          input(p.input + first * p.even_in.step + at * E),
          grad(p.grad + first * p.even_g.step + at * E) {}

    __device__ uint4* slots(int stage) const { return own + stage * (2 * ROWS * THREADS); }

    // The rows from `row` on, to be called for every turn, in order.
    __device__ void fetch(int row, int stage) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const bool wanted = inside && row + r < count;
            cp_async16_if<true>(shared_address(slots(stage) + r * THREADS), input + r * p.even_in.step, wanted);
            cp_async16_if<true>(shared_address(slots(stage) + (ROWS + r) * THREADS), grad + r * p.even_g.step, wanted);
        }
        cp_async_commit();
        input += p.even_in.apart;
        grad += p.even_g.apart;
    }

    // Once rows are on their way: it waits for memory.
    __device__ void hold_weight() { load_if<false>(weight, p.weight + at * E, p.weight != nullptr && inside); }

    __device__ Stats stats(int row) const {
        return row < count ? load_stats<CENTRED>(p.stats, row) : Stats{0.0f, 0.0f, 0.0f};
    }

    // This thread's part of the turn's r-th row.
    __device__ void work_out(int stage, int r, const Stats& stats) {
        const uint4 x = slots(stage)[r * THREADS], y = slots(stage)[(ROWS + r) * THREADS];
        part.work_out(reinterpret_cast<const Vec<T>&>(x), reinterpret_cast<const Vec<T>&>(y), weight, stats);
    }
};

// What a turn's rows add to the sums of their columns and of themselves is worked out, and the latter sent; then those of the
// turn before are received, and its gradients stored.
template <typename T, bool CENTRED, typename STAY>
__device__ void norm_backward_staying(const NormWeights<T>& w, const NormBackward<T>& p) {
#if __CUDA_ARCH__ >= 900
    using Value = std::conditional_t<CENTRED, Pair, float>;
    constexpr int E = Vec<T>::size, ROWS = STAY::ROWS, STAGES = STAY::STAGES, SUMS = CENTRED ? 2 : 1;
    constexpr bool REFILL_FIRST = ROWS == 1;  // of a turn's slots, which then are all read; else once it is stored
    const std::conditional_t<CENTRED, PairSum, Sum> add;
    extern __shared__ __align__(SLOT_ALIGNMENT) uint4 in_shared[];
    __shared__ StayMail<Value, STAY> mail;
    launch_dependents();
    mail.open();
    wait_for_previous();
    const int group = static_cast<int>(blockIdx.x) >> cluster::log2_blocks();
    StayRows<T, CENTRED, STAY> rows(p, group, static_cast<int>(cluster::rank()), in_shared);
#pragma unroll 1
    for (int turn = 0; turn < STAGES; ++turn) rows.fetch(rows.first + turn * rows.apart, turn);
    rows.hold_weight();
    T* to = p.grad_input + rows.first * p.even_gi.step + rows.at * E;
    Stats next[ROWS], stats[ROWS], before[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) next[r] = rows.stats(rows.first + r), stats[r] = {};
    float of_columns[SUMS][E] = {};
    cluster::wait();
    int row = rows.first, stage = 0, stage_before = 0;
    for (int turn = 0;; ++turn) {
        const bool another = row < rows.count;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            before[r] = stats[r];
            stats[r] = next[r];
        }
        if (another) {
            cp_async_wait<STAGES - 2>();
            Value sums[ROWS];
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                rows.work_out(stage, r, stats[r]);
                Pair partial{-0.0f, -0.0f};  // to which a first value is added for nothing
#pragma unroll
                for (int e = 0; e < E; ++e) {
                    of_columns[0][e] = fmaf(rows.part.g[e], rows.part.x_hat[e], of_columns[0][e]);
                    if constexpr (CENTRED) of_columns[1][e] += rows.part.g[e];
                    partial = {partial.first + rows.part.weighted[e],
                               fmaf(rows.part.weighted[e], rows.part.x_hat[e], partial.second)};
                }
                if constexpr (CENTRED) sums[r] = partial;
                if constexpr (!CENTRED) sums[r] = partial.second;
            }
            mail.leave(turn, own_over_lanes(sums, add, WARP), add);
            // Long before they are wanted: nothing else in a turn waits for memory.
#pragma unroll
            for (int r = 0; r < ROWS; ++r) next[r] = rows.stats(row + rows.apart + r);
        }
        if (turn > 0) {
            mail.wait(turn - 1);
            T* out = to;
#pragma unroll
            for (int r = 0; r < ROWS; ++r, out += p.even_gi.step) {
                const Pair means = means_of(mail.sum(turn - 1, r, add), p.per_element);
                rows.work_out(stage_before, r, before[r]);
                if (REFILL_FIRST) rows.fetch(row + (STAGES - 1) * rows.apart, stage_before);
                float x[E];
#pragma unroll
                for (int e = 0; e < E; ++e) {
                    x[e] = gradient<CENTRED>(rows.part.x_hat[e], rows.part.weighted[e], means, before[r].rstd);
                }
                if (rows.inside && row - rows.apart + r < rows.count && p.grad_input != nullptr) {
                    store_streamed(out, pack<T>(x));
                }
            }
            to += p.even_gi.apart;
            if (!REFILL_FIRST) rows.fetch(row + (STAGES - 1) * rows.apart, stage_before);
        }
        if (!another) break;
        stage_before = stage;
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        row += rows.apart;
    }
    cp_async_wait<0>();
    if (w.partials == nullptr || !rows.inside) return;
#pragma unroll
    for (int s = 0; s < SUMS; ++s) {
        float* const sums = w.partials + (int64_t{s} * w.groups + group) * p.length + rows.at * E;
#pragma unroll
        for (int e = 0; e < E; e += 4) {
            const float* const four = of_columns[s] + e;
            store_columns<true>(sums, e, make_float4(four[0], four[1], four[2], four[3]), E);
        }
    }
#endif
}

}  // namespace kl
