// layer_norm, rung 4 of 6: smem_pipeline
// rms_norm, add_rms_norm, rung 4 of 5: smem_pipeline
// Idea      cp.async copies a 16-bit row into shared memory. Each thread keeps one vector in registers and the rest
//           waits in shared memory. Low register use raises occupancy. One pass takes the statistics, a second one the
//           output.
// Predicts  1536 threads per SM instead of the 1024 of `registers`: 1.5 times as many bytes in flight.
// Limit now One block holds 16384 elements; with a residual, clusters of such blocks hold up to 16 times as many.
// Next      `cluster`: rows over several SMs, in registers, which leaves the L1 to weight and bias.
// Backward  backward.cuh, shared with `registers`.
#pragma once

#include "norm/short_rows.cuh"

namespace kl {

// A thread has VECTORS vectors of each of ROWS rows; an SM runs BLOCKS blocks of THREADS. Of a second operand, RING
// vectors per row are staged at a time.
template <int ROWS_, int VECTORS_, int THREADS_, int BLOCKS_, int RING_ = VECTORS_>
struct PipelineShape {
    static constexpr int ROWS = ROWS_, VECTORS = VECTORS_, THREADS = THREADS_, BLOCKS = BLOCKS_, RING = RING_;
    static constexpr int WARPS = THREADS / WARP, REACH = VECTORS * THREADS;  // REACH: vectors of the longest row
    static constexpr int LANES = WARP / ROWS;  // lanes of a warp that finish the sum of one row
    static constexpr int stage_vectors(int operands) { return ROWS * (VECTORS + (operands - 1) * RING); }
};

/// The rows of a block, and its vectors of them, from `begin` to `end`. In a cluster all blocks have the same rows and
/// equal parts of them, of whole 128-byte lines.
template <typename SHAPE, bool CLUSTER>
struct PipelinePartition {
    int vectors, part, begin = 0, end, group = blockIdx.x;  // `group` numbers blocks, or clusters

    __device__ explicit PipelinePartition(int of_row) : vectors(of_row), part(of_row) {
#if __CUDA_ARCH__ >= 900
        if constexpr (CLUSTER) {
            part = cluster_part(vectors);
            begin = static_cast<int>(cluster_rank()) * part;
            group >>= cluster::log2_blocks();
        }
#endif
        end = min(begin + part, vectors);
    }
    __device__ int64_t row() const { return int64_t{group} * SHAPE::ROWS; }  // first row of the block

    // Index of this thread's vector v of a row, and whether it exists.
    __device__ int at(int v) const { return begin + threadIdx.x + v * SHAPE::THREADS; }
    __device__ bool has(int v) const { return at(v) < end; }

    // Number of a row's vectors that a warp has among the `first` vectors of each thread, and that a block has.
    __device__ int of_warp(int warp, int first) const {
        int count = 0;
#pragma unroll
        for (int v = 0; v < first; ++v) count += max(min(end - (begin + warp * WARP + v * SHAPE::THREADS), WARP), 0);
        return count;
    }
    __device__ int of_block(int block) const { return max(min(vectors - block * part, part), 0); }
};

// cp_async_wait for a number that is constant once loops are unrolled, and at most MOST.
template <int MOST>
__device__ void cp_async_wait_most(int pending) {
    if constexpr (MOST > 0) {
        if (pending < MOST) return cp_async_wait_most<MOST - 1>(pending);
    }
    cp_async_wait<MOST>();
}

/// Copies a thread's vectors into shared memory, v by v. A stage of the second operand is refilled once its vector has
/// been read. Rows past the last are zeros. SINGLE_USE: as in SmemStages.
template <typename T, typename SHAPE, bool CLUSTER, int OPERANDS, bool SINGLE_USE>
struct PipelineRows {
    static constexpr int ROWS = SHAPE::ROWS, V = SHAPE::VECTORS, RING = SHAPE::RING;

    const ShortNorm<T>& p;
    const PipelinePartition<SHAPE, CLUSTER>& partition;
    uint4* const own;
    const T* const residual;  // address of this thread's first vector
    const int left;           // rows from this block's first row to the last

    __device__ PipelineRows(const ShortNorm<T>& p_in, const PipelinePartition<SHAPE, CLUSTER>& partition_in,
                            uint4* shared)
        : p(p_in),
          partition(partition_in),
          own(shared + threadIdx.x),
          residual(OPERANDS > 1 ? at(p.residual, p.res_step) : nullptr),
          left(static_cast<int>(min(p.count - partition.row(), int64_t{ROWS}))) {}

    // Address of this thread's first vector of the first row. The asm makes it one value, from which later addresses
    // differ by constants. Otherwise ptxas keeps its terms in registers and adds them for each vector.
    template <typename P>
    __device__ P* at(P* operand, int64_t step) const {
        P* first = operand + partition.row() * step + int64_t{partition.at(0)} * Vec<T>::size;
        asm volatile("" : "+l"(first));
        return first;
    }
    __device__ bool in_range(int r, int v) const { return r < left && partition.has(v); }
    __device__ uint4& stage(int operand, int r, int v) const {
        return own[(operand == 0 ? r * V + v : ROWS * V + r * RING + v % RING) * SHAPE::THREADS];
    }
    // Copies vector v of all rows. `first` is the address of this thread's first vector of the first row.
    __device__ void fetch(int operand, const T* first, int v) const {
        const T* from = first + v * SHAPE::THREADS * Vec<T>::size;
#pragma unroll
        for (int r = 0; r < ROWS; ++r, from += operand == 0 ? p.in_step : p.res_step) {
            cp_async16_if<SINGLE_USE>(shared_address(&stage(operand, r, v)), from, in_range(r, v));
        }
    }
    __device__ void fetch_first() const {
        const T* const input = at(p.input, p.in_step);
#pragma unroll
        for (int v = 0; v < V; ++v) {
            fetch(0, input, v);
            if (OPERANDS > 1 && v < RING) fetch(1, residual, v);
            cp_async_commit();
        }
    }
    // Waits for vector v of all rows. One group of copies is committed per v, and one more after each release.
    __device__ void wait(int v) const {
        cp_async_wait_most<V>(OPERANDS == 1 || RING == V ? V - 1 - v : v < RING ? V - 1 : RING - 1);
    }
    __device__ void release(int v) const {
        if (OPERANDS == 1 || RING == V) return;
        if (v + RING < V) fetch(1, residual, v + RING);
        cp_async_commit();
    }
    // Reads vector v of row r as `make` left it.
    __device__ void read(int r, int v, float (&x)[Vec<T>::size]) const {
        const uint4 word = stage(0, r, v);
        unpack(reinterpret_cast<const Vec<T>&>(word), x);
    }
};

// Partial statistics: the sum, and the sum of squared deviations from the mean; for rms_norm, the sum of squares.
template <bool IS_LAYERNORM>
using RowPartial = std::conditional_t<IS_LAYERNORM, Pair, float>;

/// Merges the partials of parts of `elements` elements, one part per lane. `per_element` is 1 / the number of all
/// elements. Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances",
/// 1979.
template <bool IS_LAYERNORM>
__device__ RowPartial<IS_LAYERNORM> merge_moments(const RowPartial<IS_LAYERNORM>& part, int elements, float per_element,
                                                  int lanes) {
    if constexpr (!IS_LAYERNORM) {
        return over_lanes(part, Sum{}, lanes);
    } else {
        const float sum = over_lanes(part.first, Sum{}, lanes), of_part = static_cast<float>(elements);
        const float off = part.first * rcp_approx(fmaxf(of_part, 1.0f)) - sum * per_element;
        return {sum, over_lanes(fmaf(of_part * off, off, part.second), Sum{}, lanes)};
    }
}

// Shared-memory scratch for the partials of the warps, and of the blocks of a cluster.
template <bool IS_LAYERNORM, typename SHAPE, bool CLUSTER>
struct PipelineReduceSmem {
    static constexpr int ROWS = SHAPE::ROWS;
    using Value = RowPartial<IS_LAYERNORM>;
    Value of_warps[ROWS][SHAPE::WARPS], of_blocks[CLUSTER ? ROWS : 1][MAX_CLUSTER];
    uint64_t arrived;  // mbarrier that counts the bytes received

    // Must be called before anything else.
    __device__ void open() {
#if __CUDA_ARCH__ >= 900
        if constexpr (CLUSTER) {
            if (threadIdx.x == 0) {
                mbarrier_init(shared_address(&arrived), 1);
                mbarrier_init_fence();
            }
            cluster::arrive_relaxed();  // relaxed: the fence has published the mbarrier, all that others read
        }
#endif
    }

    // Merges the partials of all warps into one value per row. `own` is in all lanes that finish the row. In a cluster
    // the first warps, one per row, send the block's value to the other blocks. `meanwhile()` runs before the wait.
    template <typename T, typename F>
    __device__ void exchange(Value (&rows)[ROWS], const Value& own, const PipelinePartition<SHAPE, CLUSTER>& partition,
                             float per_element, F&& meanwhile) {
        constexpr int E = Vec<T>::size, WARPS = SHAPE::WARPS, LANES = SHAPE::LANES;
        const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
        if (lane % LANES == 0) of_warps[lane / LANES][warp] = own;
        __syncthreads();
        const auto of_block = [&](int r, float per) {
            const int elements = partition.of_warp(lane % WARPS, SHAPE::VECTORS) * E;
            return merge_moments<IS_LAYERNORM>(of_warps[r][lane % WARPS], elements, per, WARPS);
        };
        if constexpr (!CLUSTER) {
            meanwhile();
#pragma unroll
            for (int r = 0; r < ROWS; ++r) rows[r] = of_block(r, per_element);
        }
#if __CUDA_ARCH__ >= 900
        if constexpr (CLUSTER) {
            const int blocks = static_cast<int>(cluster::blocks()), rank = static_cast<int>(cluster_rank());
            cluster::wait();  // until every block has initialised its mbarrier
            if (threadIdx.x == 0) mbarrier_arrive_expect_tx(shared_address(&arrived), ROWS * blocks * sizeof(Value));
            if (warp < ROWS) {
                const Value value =
                    of_block(warp, rcp_approx(static_cast<float>(max(partition.of_block(rank) * E, 1))));
                if (lane < blocks) cluster::send(&of_blocks[warp][rank], value, &arrived, lane);
            }
            meanwhile();
            mbarrier_wait(shared_address(&arrived), 0);
            constexpr int ROWS_PER_WARP = ROWS > 1 ? 2 : 1,
                          APART = WARP / ROWS_PER_WARP;  // rows that one warp merges at once
            const int block = lane & (blocks - 1);
#pragma unroll
            for (int r = 0; r < ROWS; r += ROWS_PER_WARP) {
                const Value part = of_blocks[r + lane / APART][block];
                const Value whole =
                    merge_moments<IS_LAYERNORM>(part, partition.of_block(block) * E, per_element, blocks);
#pragma unroll
                for (int i = 0; i < ROWS_PER_WARP; ++i) rows[r + i] = shuffle_from(whole, i * APART);
            }
        }
#endif
    }
};

/// The partials of this warp's rows, in the lanes that finish them. One pass about the mean of the warp's first
/// vectors, as in registers.cuh. `make(r, v)` returns a vector, zeros past the row's end. The first vectors of all rows
/// are made first; `read(r, x)` then returns them again.
template <bool IS_LAYERNORM, typename T, typename SHAPE, bool CLUSTER, typename Make, typename Read>
__device__ RowPartial<IS_LAYERNORM> partial_of_warp(const PipelinePartition<SHAPE, CLUSTER>& partition, Make&& make,
                                                    Read&& read) {
    constexpr int E = Vec<T>::size, ROWS = SHAPE::ROWS, V = SHAPE::VECTORS, LANES = SHAPE::LANES;
    float x[E], centre[ROWS] = {};
    Pair found[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) found[r] = {-0.0f, -0.0f};  // -0 + x is x: the compiler drops the first addition
    const auto accumulate = [&](int r, int v) {
        const float inside = IS_LAYERNORM && partition.has(v) ? centre[r] : 0.0f;
        Pair partial{-0.0f, -0.0f};
#pragma unroll
        for (int e = 0; e < E; ++e) {
            const float deviation = IS_LAYERNORM ? x[e] - inside : x[e];
            partial = {partial.first + deviation, fmaf(deviation, deviation, partial.second)};
        }
        found[r] = PairSum{}(found[r], partial);
    };
    float sums[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        unpack(make(r, 0), x);
        sums[r] = -0.0f;
#pragma unroll
        for (int e = 0; e < E; ++e) sums[r] += x[e];
    }
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if constexpr (IS_LAYERNORM) {
        const float per_element = rcp_approx(static_cast<float>(max(partition.of_warp(warp, 1) * E, 1)));
        const float mean = reduce_rows_over_lanes(sums, Sum{}, WARP) * per_element;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) centre[r] = ROWS == 1 ? mean : shuffle_from(mean, r * LANES);
    }
#pragma unroll
    for (int v = 0; v < V; ++v) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            if (v > 0) unpack(make(r, v), x);
            if (v == 0 && ROWS > 1) read(r, x);
            accumulate(r, v);
        }
    }
    if constexpr (IS_LAYERNORM) {
        Pair own = reduce_rows_over_lanes(found, PairSum{}, WARP);
        float about = centre[0];
#pragma unroll
        for (int r = 1; r < ROWS; ++r) about = chosen(lane / LANES == r, centre[r], about);
        const auto elements = static_cast<float>(partition.of_warp(warp, V) * E);
        own.second -= own.first * (own.first * rcp_approx(fmaxf(elements, 1.0f)));  // its square may overflow
        return {fmaf(elements, about, own.first), own.second};
    } else {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) sums[r] = found[r].second;
        return reduce_rows_over_lanes(sums, Sum{}, WARP);
    }
}

/// Normalises the rows of a block. `make(r, v, words, in_range)` makes a row's vector from those of the operands. Vector v
/// of all rows comes before vector v + 1.
template <bool IS_LAYERNORM, typename SHAPE, bool CLUSTER, int OPERANDS, bool SINGLE_USE, typename T, typename Make>
__device__ void norm_smem_pipeline_of(const ShortNorm<T>& p, const PipelinePartition<SHAPE, CLUSTER>& partition,
                                      Make&& make) {
    constexpr int E = Vec<T>::size, ROWS = SHAPE::ROWS, V = SHAPE::VECTORS;
    extern __shared__ __align__(STAGE_ALIGNMENT) uint4 in_shared[];
    __shared__ PipelineReduceSmem<IS_LAYERNORM, SHAPE, CLUSTER> reduce_smem;
    reduce_smem.open();
    if constexpr (!CLUSTER) pdl_begin();
    const PipelineRows<T, SHAPE, CLUSTER, OPERANDS, SINGLE_USE> rows(p, partition, in_shared);
    rows.fetch_first();
    const auto make_and_keep = [&](int r, int v) {
        if (r == 0) rows.wait(v);
        uint4 words[OPERANDS];
#pragma unroll
        for (int o = 0; o < OPERANDS; ++o) words[o] = rows.stage(o, r, v);
        const Vec<T> made = make(r, v, words, rows.in_range(r, v));
        if constexpr (OPERANDS > 1) rows.stage(0, r, v) = reinterpret_cast<const uint4&>(made);
        if (r == ROWS - 1) rows.release(v);
        return made;
    };
    const RowPartial<IS_LAYERNORM> by_warp =
        partial_of_warp<IS_LAYERNORM, T>(partition, make_and_keep, [&](int r, float (&x)[E]) { rows.read(r, 0, x); });
    cp_async_wait<0>();

    uint4 weight, bias;
    const auto fetch_parameters = [&](int v) {
        weight = filled<T>(1.0f);
        load_if<CLUSTER>(weight, p.weight + partition.at(v) * E, p.weight != nullptr && partition.has(v));
        if constexpr (!IS_LAYERNORM) return;
        bias = filled<T>(0.0f);
        load_if<CLUSTER>(bias, p.bias + partition.at(v) * E, p.bias != nullptr && partition.has(v));
    };
    RowPartial<IS_LAYERNORM> found[ROWS];
    reduce_smem.template exchange<T>(found, by_warp, partition, p.per_element, [&] { fetch_parameters(0); });
    Stats stats[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        if constexpr (IS_LAYERNORM) {
            stats[r] =
                stats_of_deviations(found[r].first * p.per_element, {0.0f, found[r].second}, p.per_element, p.eps);
        } else {
            stats[r] = stats_of_squares(found[r] * p.per_element, p.eps);
        }
        if (partition.at(0) == 0 && r < rows.left) store_stats<IS_LAYERNORM>(p.stats, partition.row() + r, stats[r]);
    }
    T* const to = rows.at(p.output, p.out_step);
#pragma unroll
    for (int v = 0; v < V; ++v) {
        float x[E], scale[E], offset[E];
        unpack(reinterpret_cast<const Vec<T>&>(weight), scale);
        if constexpr (IS_LAYERNORM) unpack(reinterpret_cast<const Vec<T>&>(bias), offset);
        if (v + 1 < V) fetch_parameters(v + 1);  // before the stores: ptxas moves no load across them
        T* out = to + v * SHAPE::THREADS * E;
#pragma unroll
        for (int r = 0; r < ROWS; ++r, out += p.out_step) {
            rows.read(r, v, x);
#pragma unroll
            for (int e = 0; e < E; ++e) {
                x[e] = normalized<IS_LAYERNORM, SHIFTED<T>>(x[e], stats[r]);
                x[e] = IS_LAYERNORM ? fmaf(x[e], scale[e], offset[e]) : x[e] * scale[e];
            }
            store_if(out, pack<T>(x), rows.in_range(r, v));
            keep_order();
        }
    }
}

using NormPipeline = PipelineShape<1, 4, 512, 3>;

template <class Op, typename T, typename SHAPE, bool CLUSTER>
__global__ void __launch_bounds__(SHAPE::THREADS, SHAPE::BLOCKS)
    norm_smem_pipeline_kernel(__grid_constant__ const ShortNorm<T> p) {
    if (!exists_here<CLUSTER>()) return;
    const PipelinePartition<SHAPE, CLUSTER> partition(p.length / Vec<T>::size);
    norm_smem_pipeline_of<Op::IS_LAYERNORM, SHAPE, CLUSTER, Op::HAS_RESIDUAL ? 2 : 1, true>(
        p, partition, [&](int r, int v, const auto& words, bool in_range) {
            const auto& x = reinterpret_cast<const Vec<T>&>(words[0]);
            if constexpr (!Op::HAS_RESIDUAL) {
                return x;
            } else {
                const Vec<T> sum = add_vec(x, reinterpret_cast<const Vec<T>&>(words[1]));
                store_if(p.sum + (partition.row() + r) * p.out_step + int64_t{partition.at(v)} * Vec<T>::size, sum,
                         in_range);
                return sum;
            }
        });
}

// ---- host ----------------------------------------------------------------------------------------------------------

// Launches kernel(arguments…) for `count` rows, on clusters of `cluster` blocks.
template <typename SHAPE, int OPERANDS, typename... Parameters, typename... Arguments>
void launch_pipeline(void (*kernel)(Parameters...), DeviceSet& asked, int64_t count, unsigned cluster,
                     const Launch& launch, const Arguments&... arguments) {
    const int bytes = stage_bytes(SHAPE::THREADS, SHAPE::stage_vectors(OPERANDS));
    allow_shared(kernel, bytes, launch.device, asked);
    allow_clusters(kernel, cluster);
    KL_CHECK(cluster == 1 || has_hopper_code(kernel, launch.device), NO_CLUSTERS);
    const dim3 grid(grid_size(ceil_div(count, SHAPE::ROWS) * cluster));
    LaunchConfig(grid, dim3(SHAPE::THREADS), bytes, launch)
        .clusters_of(cluster)
        .pdl(cluster == 1 && has_hopper_code(kernel, launch.device))
        .run(kernel, arguments...);
}

/// Rows of 16-bit elements that consist of whole vectors and lie evenly, in one block; with a residual also in
/// clusters.
template <class Op, typename T>
void launch_smem_pipeline(const NormForward<T>& p, bool vectorized, const Launch& launch) {
    using SHAPE = NormPipeline;
    constexpr int OPERANDS = Op::HAS_RESIDUAL ? 2 : 1;
    const unsigned cluster = cluster_blocks(p.length / Vec<T>::size, SHAPE::REACH);
    check_takes(sizeof(T) == 2 && are_even(vectorized, p.in, p.res, p.out), Op::NAME, p.length);
    check_takes(cluster <= (Op::HAS_RESIDUAL ? MAX_CLUSTER : 1), Op::NAME, p.length);
    if constexpr (sizeof(T) == 2) {
        const auto run = [&](auto in_cluster) {
            static DeviceSet asked;
            launch_pipeline<SHAPE, OPERANDS>(norm_smem_pipeline_kernel<Op, T, SHAPE, in_cluster()>, asked, p.count,
                                             cluster, launch, short_norm(p));
        };
        if (cluster == 1) return run(std::false_type{});
        if constexpr (Op::HAS_RESIDUAL) run(std::true_type{});
    }
}

}  // namespace kl
