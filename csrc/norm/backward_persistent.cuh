// layer_norm, rms_norm: the shared backward pass (backward.cuh) for 16-bit rows that nearly fill a block.
// Idea      Persistent clusters of two blocks, one vector of a row per thread. A quarter of the column sums per thread
//           allows 32 warps per SM instead of 16. No warp waits for a row's sums before it has passed over the next
//           row. backward.cuh costs 3 to 10 % more at rows of 12289 to 16384 elements.
#pragma once

#include "norm/backward.cuh"
#include "reduce/short_rows.cuh"

namespace kl {

// An iteration has ROWS rows; STAGES iterations are staged at a time; a block has THREADS threads.
template <int ROWS_, int STAGES_, int THREADS_>
struct PersistentBackwardShape {
    static constexpr int ROWS = ROWS_, STAGES = STAGES_, THREADS = THREADS_, WARPS = THREADS / WARP;
    static constexpr int STAGE_VECTORS = 2 * ROWS * STAGES;  // per thread
};

// Shared-memory scratch for the partials of the warps, and of the blocks of a cluster, of an iteration's rows. Nothing
// is overwritten before it is read. A block sends iteration t + 4 once it has received t + 2. Every warp arrived for t
// + 2 after it had received t. A warp that arrives for iteration t + 2 has received iteration t.
template <typename V, typename SHAPE>
struct PersistentBackwardReduceSmem {
    static constexpr int ITERATIONS = 4, ROWS = SHAPE::ROWS, WARPS = SHAPE::WARPS;
    V of_blocks[ITERATIONS][ROWS][MAX_CLUSTER], of_warps[2][ROWS][WARPS];
    uint64_t arrived[ITERATIONS], filled[2];  // mbarriers

#if __CUDA_ARCH__ >= 900
    // Must be called before anything else, and cluster::wait() before the first arrival, best with loads in flight.
    __device__ void open() {
        if (threadIdx.x == 0) {
            for (uint64_t& barrier : arrived) mbarrier_init(shared_address(&barrier), 1);
            for (uint64_t& barrier : filled) mbarrier_init(shared_address(&barrier), WARPS * ROWS);
            mbarrier_init_fence();
        }
        cluster::arrive_relaxed();  // relaxed: the fence has published the mbarriers, all that others read
    }

    // Stores this warp's partial, which the lanes that finish a row hold. The first warps, one per row, merge the
    // block's partials and send the result.
    template <typename Op>
    __device__ void reduce_arrive(int iteration, const V& value, Op op) {
        constexpr int LANES = WARP / ROWS;
        const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, buffer = iteration % ITERATIONS;
        const uint32_t full = shared_address(&filled[iteration % 2]), arrives = shared_address(&arrived[buffer]);
        if (lane % LANES == 0) {
            of_warps[iteration % 2][lane / LANES][warp] = value;
            mbarrier_arrive(full);
        }
        if (warp >= ROWS) return;
        const int blocks = static_cast<int>(cluster::blocks());
        if (threadIdx.x == 0) mbarrier_arrive_expect_tx(arrives, ROWS * blocks * sizeof(V));
        mbarrier_wait(full, iteration / 2 % 2);
        const V of_block = over_lanes(of_warps[iteration % 2][warp][lane % WARPS], op, WARPS);
        if (lane < blocks)
            cluster::send(shared_address(&of_blocks[buffer][warp][cluster_rank()]), of_block, arrives, lane);
    }

    // Waits for the partials of all blocks.
    __device__ void reduce_wait(int iteration) {
        mbarrier_wait(shared_address(&arrived[iteration % ITERATIONS]), iteration / ITERATIONS % 2);
    }

    // Sums them for a row, with the same result in all threads. Clusters are small: a shuffle reduction would cost
    // more.
    template <typename Op>
    __device__ V sum(int iteration, int row, Op op) const {
        const int blocks = static_cast<int>(cluster::blocks());
        V total = of_blocks[iteration % ITERATIONS][row][0];
#pragma unroll 1
        for (int block = 1; block < blocks; ++block) total = op(total, of_blocks[iteration % ITERATIONS][row][block]);
        return total;
    }
#endif
};

// This thread's vectors of its cluster's rows: ROWS of them per iteration, every `apart`-th from row `first` on.
template <typename T, bool IS_LAYERNORM, typename SHAPE>
struct PersistentRows {
    static constexpr int E = Vec<T>::size, ROWS = SHAPE::ROWS, THREADS = SHAPE::THREADS;

    const NormBackward<T>& p;
    const int at, count, apart, first;
    const bool inside;  // of a row
    uint4* const own;   // stages
    uint4 weight;
    const T *input, *grad;  // of the next iteration to copy
    UnpackedVector<T, IS_LAYERNORM> part;

    __device__ PersistentRows(const NormBackward<T>& p_in, int group, int rank, uint4* shared)
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

    __device__ uint4* stage_of(int stage) const { return own + stage * (2 * ROWS * THREADS); }

    // Copies the rows from `row` on. Must be called for every iteration, in order.
    __device__ void fetch(int row, int stage) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const bool wanted = inside && row + r < count;
            cp_async16_if<true>(shared_address(stage_of(stage) + r * THREADS), input + r * p.even_in.step, wanted);
            cp_async16_if<true>(shared_address(stage_of(stage) + (ROWS + r) * THREADS), grad + r * p.even_g.step,
                                wanted);
        }
        cp_async_commit();
        input += p.even_in.apart;
        grad += p.even_g.apart;
    }

    // To be called after the first copies are issued, since it waits for memory.
    __device__ void load_weight() { load_if<false>(weight, p.weight + at * E, p.weight != nullptr && inside); }

    __device__ Stats stats(int row) const {
        return row < count ? load_stats<IS_LAYERNORM>(p.stats, row) : Stats{0.0f, 0.0f, 0.0f};
    }

    // Unpacks this thread's vector of the iteration's r-th row.
    __device__ void unpack_row(int stage, int r, const Stats& stats) {
        const uint4 x = stage_of(stage)[r * THREADS], y = stage_of(stage)[(ROWS + r) * THREADS];
        part.unpack_row(reinterpret_cast<const Vec<T>&>(x), reinterpret_cast<const Vec<T>&>(y), weight, stats);
    }
};

/// Each iteration computes the partial sums and column sums of its rows and publishes the former. Then it waits for the
/// partial sums of the iteration before and stores its gradients.
template <class Op, typename T, typename SHAPE>
__global__ void __launch_bounds__(SHAPE::THREADS, 1)
    norm_backward_registers_persistent_kernel(const NormWeights<T> w, __grid_constant__ const NormBackward<T> p) {
#if __CUDA_ARCH__ >= 900
    constexpr bool IS_LAYERNORM = Op::IS_LAYERNORM;
    using Value = std::conditional_t<IS_LAYERNORM, Pair, float>;
    constexpr int E = Vec<T>::size, ROWS = SHAPE::ROWS, STAGES = SHAPE::STAGES, SUMS = IS_LAYERNORM ? 2 : 1;
    // Whether a stage is refilled before the gradients are stored. With one row the stage has been read by then.
    constexpr bool REFILL_FIRST = ROWS == 1;
    const std::conditional_t<IS_LAYERNORM, PairSum, Sum> add;
    extern __shared__ __align__(STAGE_ALIGNMENT) uint4 in_shared[];
    __shared__ PersistentBackwardReduceSmem<Value, SHAPE> smem;
    griddepcontrol_launch_dependents();
    smem.open();
    griddepcontrol_wait();
    const int group = static_cast<int>(blockIdx.x) >> cluster::log2_blocks();
    PersistentRows<T, IS_LAYERNORM, SHAPE> rows(p, group, static_cast<int>(cluster_rank()), in_shared);
#pragma unroll 1
    for (int iteration = 0; iteration < STAGES; ++iteration) rows.fetch(rows.first + iteration * rows.apart, iteration);
    rows.load_weight();
    T* to = p.grad_input + rows.first * p.even_gi.step + rows.at * E;
    Stats next[ROWS], stats[ROWS], before[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) next[r] = rows.stats(rows.first + r), stats[r] = {};
    float of_columns[SUMS][E] = {};
    cluster::wait();
    int row = rows.first, stage = 0, stage_before = 0;
    for (int iteration = 0;; ++iteration) {
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
                rows.unpack_row(stage, r, stats[r]);
                Pair partial{-0.0f, -0.0f};  // -0 + x is x: the compiler drops the first addition
#pragma unroll
                for (int e = 0; e < E; ++e) {
                    of_columns[0][e] = fmaf(rows.part.g[e], rows.part.x_hat[e], of_columns[0][e]);
                    if constexpr (IS_LAYERNORM) of_columns[1][e] += rows.part.g[e];
                    partial = {partial.first + rows.part.weighted[e],
                               fmaf(rows.part.weighted[e], rows.part.x_hat[e], partial.second)};
                }
                if constexpr (IS_LAYERNORM) sums[r] = partial;
                if constexpr (!IS_LAYERNORM) sums[r] = partial.second;
            }
            smem.reduce_arrive(iteration, reduce_rows_over_lanes(sums, add, WARP), add);
            // Loaded an iteration ahead: nothing else in an iteration waits for memory.
#pragma unroll
            for (int r = 0; r < ROWS; ++r) next[r] = rows.stats(row + rows.apart + r);
        }
        if (iteration > 0) {
            smem.reduce_wait(iteration - 1);
            T* out = to;
#pragma unroll
            for (int r = 0; r < ROWS; ++r, out += p.even_gi.step) {
                const Pair means = means_of(smem.sum(iteration - 1, r, add), p.per_element);
                rows.unpack_row(stage_before, r, before[r]);
                if (REFILL_FIRST) rows.fetch(row + (STAGES - 1) * rows.apart, stage_before);
                float x[E];
#pragma unroll
                for (int e = 0; e < E; ++e) {
                    x[e] = gradient<IS_LAYERNORM>(rows.part.x_hat[e], rows.part.weighted[e], means, before[r].rstd);
                }
                if (rows.inside && row - rows.apart + r < rows.count && p.grad_input != nullptr) {
                    store_evict_first(out, pack<T>(x));
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

// ---- host ----------------------------------------------------------------------------------------------------------

template <typename SHAPE>
constexpr int PERSISTENT_BACKWARD_BYTES = stage_bytes(SHAPE::THREADS, SHAPE::STAGE_VECTORS);

/// Whether a GPU has clusters and the shared memory of a block.
template <class Op, typename T>
bool has_room_for_backward_persistent(const Launch& launch) {
    using SHAPE = typename Op::PersistentBackward;
    constexpr int shared =
        PERSISTENT_BACKWARD_BYTES<SHAPE> + static_cast<int>(sizeof(PersistentBackwardReduceSmem<Pair, SHAPE>));
    return has_hopper_code(norm_backward_registers_persistent_kernel<Op, T, SHAPE>, launch.device) &&
           shared <= shared_limit(launch.device);
}

/// Rows of whole vectors that lie evenly, of at most MAX_BLOCK_CHUNKS vectors.
template <class Op, typename T>
void launch_backward_persistent(NormWeights<T> w, NormBackward<T> p, const Tensor& like, const Launch& launch) {
    using SHAPE = typename Op::PersistentBackward;
    constexpr auto kernel = norm_backward_registers_persistent_kernel<Op, T, SHAPE>;
    constexpr int bytes = PERSISTENT_BACKWARD_BYTES<SHAPE>;
    static DeviceSet asked;
    static OccupancyCache resident;
    allow_shared(kernel, bytes, launch.device, asked);
    const unsigned cluster = cluster_blocks(p.length / Vec<T>::size, SHAPE::THREADS);
    const int64_t fit = resident.clusters(kernel, dim3(SHAPE::THREADS), cluster, bytes, launch);
    const auto partials = distribute_rows<Op::IS_LAYERNORM>(w, p, SHAPE::ROWS, fit, like);
    LaunchConfig(dim3(w.groups * cluster), dim3(SHAPE::THREADS), bytes, launch).clusters_of(cluster).run(kernel, w, p);
    if (w.wanted()) launch_column_sum<Op>(w, p.length, launch);
}

}  // namespace kl
