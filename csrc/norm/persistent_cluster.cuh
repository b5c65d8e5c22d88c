// layer_norm, rung 6 of 6: persistent_cluster
// Idea      Persistent clusters loop over rows and keep weight and bias in shared memory. Bulk copies (TMA) prefetch
//           the next rows, one copy per warp for its segment of a row. One reduction warp merges the partials of the
//           other warps and sends them to the cluster's blocks. Meanwhile the row warps make the first pass over the
//           next row.
// Predicts  `cluster` reads weight and bias from the L2 again for every row: two thirds of its reads, which this
//           rung saves.
// Limit now Memory bandwidth. 16-bit rows of 65537 to 131072 elements, for which a block's part fits shared memory.
// Backward  backward.cuh, shared with `registers`.
#pragma once

#include "norm/smem_pipeline.cuh"

namespace kl {

// A cluster has BLOCKS blocks of THREADS threads: one reduction warp, and row warps whose threads have VECTORS vectors
// of a row. STAGES rows are staged at a time; more of the longest rows make memory slower. FULL: rows of the greatest
// length, which need no bounds checks.
template <int VECTORS_, int THREADS_, int BLOCKS_, int STAGES_, bool FULL_>
struct PersistentShape {
    static constexpr int VECTORS = VECTORS_, THREADS = THREADS_ + WARP, BLOCKS = BLOCKS_, STAGES = STAGES_;
    static constexpr bool FULL = FULL_;
    using BLOCK_SHAPE = PipelineShape<1, VECTORS, THREADS_, 1>;
    static constexpr int STAGE_VECTORS = BLOCK_SHAPE::REACH,
                         BYTES = (STAGES + 2) * STAGE_VECTORS * static_cast<int>(sizeof(uint4));
    static constexpr bool takes(int64_t vectors) {
        constexpr int64_t MOST = BLOCKS * STAGE_VECTORS;
        return FULL ? vectors == MOST : vectors < MOST && vectors > MOST / 2;
    }
};

// Shared-memory scratch: partial statistics of the warps and of the blocks, and their mbarriers. Nothing is overwritten
// before it is read. A warp that arrives for row t + 2 has received row t, for which all warps had arrived. A block
// sends row t + 4 once all its warps have received row t + 2. Every block sent t + 2 once all of its warps had read row
// t.
template <typename SHAPE>
struct PersistentReduceSmem {
    static constexpr int WARP_STAGES = 2, BLOCK_STAGES = 4;
    Pair of_warps[WARP_STAGES][SHAPE::BLOCK_SHAPE::WARPS], of_blocks[BLOCK_STAGES][SHAPE::BLOCKS];
    uint64_t warps_arrived[WARP_STAGES], arrived[BLOCK_STAGES], full[SHAPE::STAGES][SHAPE::BLOCK_SHAPE::WARPS],
        parameters;  // mbarriers

    __device__ void open() {
        for (uint64_t& barrier : warps_arrived) mbarrier_init(shared_address(&barrier), SHAPE::BLOCK_SHAPE::WARPS);
        for (uint64_t& barrier : arrived) mbarrier_init(shared_address(&barrier), 1);
        mbarrier_init(shared_address(&parameters), 1);
        mbarrier_init_fence();
    }
    __device__ void open(int warp) {
        for (auto& of_stage : full) mbarrier_init(shared_address(&of_stage[warp]), 1);
        mbarrier_init_fence();
    }
};

// Merges the partials of a row's blocks, all of which have `usual` elements but the last. The divisions are
// precomputed: every warp runs this between a row's last partial and its first store.
struct MergeBlocks {
    float usual, last, per_usual, per_last;

    __device__ MergeBlocks(int of_block, int of_last)
        : usual(static_cast<float>(of_block)),
          last(static_cast<float>(of_last)),
          per_usual(1.0f / usual),
          per_last(1.0f / last) {}

    template <int BLOCKS>
    __device__ Stats stats(const Pair (&blocks)[BLOCKS], float per_element, float eps) const {
        float sum = 0.0f, squares = 0.0f;
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) sum += blocks[b].first;
        const float mean = sum * per_element;
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) {
            const bool whole = b + 1 < BLOCKS;
            const float off = fmaf(blocks[b].first, whole ? per_usual : per_last, -mean);
            squares += fmaf(off * off, whole ? usual : last, blocks[b].second);
        }
        return stats_of_deviations(mean, {0.0f, squares}, per_element, eps);
    }
};

#if __CUDA_ARCH__ >= 900

/// A block's part of its cluster's rows, one row per iteration.
template <typename T, typename SHAPE>
struct PersistentPart {
    static constexpr int E = Vec<T>::size, V = SHAPE::VECTORS;
    using BLOCK_SHAPE = typename SHAPE::BLOCK_SHAPE;
    using Scratch = PersistentReduceSmem<SHAPE>;

    const ShortNorm<T>& p;
    Scratch& smem;
    uint4 *const weight, *const bias, *const rows;
    const PipelinePartition<BLOCK_SHAPE, true> partition;
    const int mine, segment, first, apart, iterations;  // vectors of this block, of a warp; rows
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;

    __device__ PersistentPart(const ShortNorm<T>& p_in, Scratch& smem_in, uint4* shared)
        : p(p_in),
          smem(smem_in),
          weight(shared),
          bias(weight + SHAPE::STAGE_VECTORS),
          rows(bias + SHAPE::STAGE_VECTORS),
          partition(p.length / E),
          mine(partition.end - partition.begin),
          segment(SHAPE::FULL ? V * WARP : (mine + BLOCK_SHAPE::THREADS - 1) / BLOCK_SHAPE::THREADS * WARP),
          first(partition.group),
          apart(static_cast<int>(gridDim.x) / SHAPE::BLOCKS),
          iterations((static_cast<int>(p.count) - first + apart - 1) / apart) {}

    __device__ bool is_reduction_warp() const { return warp == BLOCK_SHAPE::WARPS; }
    // Number of a warp's vectors, of those of this block.
    __device__ int of_warp(int one) const { return max(min(mine - one * segment, segment), 0); }
    // Index of this thread's vector v in the block's part; whether it exists, and whether that of any lane does.
    __device__ int own(int v) const { return warp * segment + v * WARP + lane; }
    __device__ bool has(int v) const { return SHAPE::FULL || v * WARP + lane < of_warp(warp); }
    __device__ bool any_has(int v) const { return SHAPE::FULL || v * WARP < of_warp(warp); }
    // Address of this block's part of an operand whose rows lie `step` elements apart.
    template <typename P>
    __device__ P* at(P* operand, int64_t step, int iteration) const {
        return operand + (first + int64_t{iteration} * apart) * step + int64_t{partition.begin} * E;
    }

    // Starts the bulk copy of this warp's segment of a row. Called by one thread of the warp.
    __device__ void fetch(int iteration, int stage) const {
        const uint32_t bytes = of_warp(warp) * sizeof(uint4);
        if (iteration >= iterations || bytes == 0) return;
        uint64_t* const full = &smem.full[stage][warp];
        mbarrier_arrive_expect_tx(shared_address(full), bytes);
        bulk_load<true>(rows + stage * SHAPE::STAGE_VECTORS + warp * segment,
                        at(p.input, p.in_step, iteration) + warp * segment * E, bytes, full);
    }
    __device__ void begin() const {
        if (!is_reduction_warp()) {
            smem.open(warp);
            for (int stage = 0; stage < SHAPE::STAGES; ++stage) fetch(stage, stage);
            return;
        }
        smem.open();
        const uint32_t bytes = mine * sizeof(uint4), wanted = (p.weight != nullptr) + (p.bias != nullptr);
        mbarrier_arrive_expect_tx(shared_address(&smem.parameters), wanted * bytes);
        if (p.weight != nullptr) bulk_load<false>(weight, at(p.weight, 0, 0), bytes, &smem.parameters);
        if (p.bias != nullptr) bulk_load<false>(bias, at(p.bias, 0, 0), bytes, &smem.parameters);
    }
    // Writes what no copy writes: absent parameters, and zeros past the end.
    __device__ void fill() const {
        for (int i = threadIdx.x; i < SHAPE::STAGE_VECTORS; i += SHAPE::THREADS) {
            if (p.weight == nullptr) weight[i] = filled<T>(1.0f);
            if (p.bias == nullptr) bias[i] = filled<T>(0.0f);
            for (int stage = 0; i >= mine && stage < SHAPE::STAGES; ++stage) {
                rows[stage * SHAPE::STAGE_VECTORS + i] = filled<T>(0.0f);
            }
        }
    }

    // Partial statistics of a warp's vectors, in one pass about its first element. Where that is far from the mean, the
    // squares are large too. Their loss is below the number of the warp's elements times the spacing of float32.
    __device__ Pair partial_of(const Vec<T> (&tile)[V], float elements, float per_element) const {
        float x[E], centre = 0.0f;
        Pair partial_of_warp{};
#pragma unroll
        for (int v = 0; v < V; ++v) {
            if (v > 0 && !any_has(v)) break;
            unpack(tile[v], x);
            if (v == 0) centre = shuffle_from(x[0], 0);
            const float shift = has(v) ? centre : 0.0f;
            Pair partial{};
#pragma unroll
            for (int e = 0; e < E; ++e) {
                const float deviation = x[e] - shift;
                partial = {partial.first + deviation, fmaf(deviation, deviation, partial.second)};
            }
            partial_of_warp = v == 0 ? partial : PairSum{}(partial_of_warp, partial);
        }
        partial_of_warp = over_lanes(partial_of_warp, PairSum{}, WARP);
        return {fmaf(elements, centre, partial_of_warp.first),
                partial_of_warp.second - partial_of_warp.first * (partial_of_warp.first * per_element)};
    }

    // The reduction warp: merges the partials of this block's warps and sends the result to all blocks of the cluster.
    __device__ void run_reduction_warp() const {
        const int elements = of_warp(lane % BLOCK_SHAPE::WARPS) * E, rank = static_cast<int>(cluster_rank());
        const float per_element = 1.0f / static_cast<float>(mine * E);
        PipelineState<Scratch::WARP_STAGES> warp_stage;
        PipelineState<Scratch::BLOCK_STAGES> block_stage;
        for (int iteration = 0; iteration < iterations; ++iteration, warp_stage.advance(), block_stage.advance()) {
            mbarrier_wait(shared_address(&smem.warps_arrived[warp_stage.stage]), warp_stage.phase);
            const Pair of_warp = smem.of_warps[warp_stage.stage][lane % BLOCK_SHAPE::WARPS];
            uint64_t* const arrived = &smem.arrived[block_stage.stage];
            if (lane == 0) mbarrier_arrive_expect_tx(shared_address(arrived), SHAPE::BLOCKS * sizeof(Pair));
            const Pair of_block = merge_moments<true>(of_warp, elements, per_element, BLOCK_SHAPE::WARPS);
            __syncwarp();  // all lanes have read the warps' partials, which the next rows overwrite
            if (lane < SHAPE::BLOCKS) cluster::send(&smem.of_blocks[block_stage.stage][rank], of_block, arrived, lane);
        }
    }

    // The row warps: the first pass over a row, then the second pass over the row before.
    __device__ void run_row_warps() const {
        const MergeBlocks merge(partition.part * E, partition.of_block(SHAPE::BLOCKS - 1) * E);
        const auto elements = static_cast<float>(of_warp(warp) * E);
        const float per_element = 1.0f / fmaxf(elements, 1.0f);
        PipelineState<SHAPE::STAGES> row;
        PipelineState<Scratch::WARP_STAGES> warp_stage;
        PipelineState<Scratch::BLOCK_STAGES> block_stage;
        Vec<T> tile[V], before[V];
        T* to = at(p.output, p.out_step, 0);
        mbarrier_wait(shared_address(&smem.parameters), 0);
        for (int iteration = 0; iteration <= iterations; ++iteration) {
            if (iteration < iterations) {
                if (any_has(0)) mbarrier_wait(shared_address(&smem.full[row.stage][warp]), row.phase);
#pragma unroll
                for (int v = 0; v < V; ++v) {
                    if (v > 0 && !any_has(v)) break;
                    reinterpret_cast<uint4&>(tile[v]) = rows[row.stage * SHAPE::STAGE_VECTORS + own(v)];
                }
                const Pair partial_of_warp = partial_of(tile, elements, per_element);
                __syncwarp();  // all lanes have read their vectors: the stage may be refilled
                if (lane == 0) {
                    fetch(iteration + SHAPE::STAGES, row.stage);
                    smem.of_warps[warp_stage.stage][warp] = partial_of_warp;
                    mbarrier_arrive(shared_address(&smem.warps_arrived[warp_stage.stage]));
                }
                row.advance();
                warp_stage.advance();
            }
            if (iteration > 0) {
                mbarrier_wait(shared_address(&smem.arrived[block_stage.stage]), block_stage.phase);
                const Stats stats = merge.stats(smem.of_blocks[block_stage.stage], p.per_element, p.eps);
                if (partition.begin == 0 && own(0) == 0)
                    store_stats<true>(p.stats, first + int64_t{iteration - 1} * apart, stats);
                store(to, before, stats);
                to += apart * p.out_step;
                block_stage.advance();
            }
#pragma unroll
            for (int v = 0; v < V; ++v) before[v] = tile[v];
        }
    }
    __device__ void store(T* to, const Vec<T> (&tile)[V], const Stats& stats) const {
#pragma unroll
        for (int v = 0; v < V; ++v) {
            if (!any_has(v)) break;
            const int i = own(v);
            float x[E], scale[E], offset[E];
            unpack(tile[v], x);
            unpack(reinterpret_cast<const Vec<T>&>(weight[i]), scale);
            unpack(reinterpret_cast<const Vec<T>&>(bias[i]), offset);
#pragma unroll
            for (int e = 0; e < E; ++e) x[e] = fmaf(normalized<true, SHIFTED<T>>(x[e], stats), scale[e], offset[e]);
            if (has(v)) store_evict_first(to + i * E, pack<T>(x));
            keep_order();
        }
    }
};

#endif

template <class Op, typename T, typename SHAPE>
__global__ void __launch_bounds__(SHAPE::THREADS, 1)
    norm_persistent_cluster_kernel(__grid_constant__ const ShortNorm<T> p) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(STAGE_ALIGNMENT) uint4 in_shared[];
    __shared__ PersistentReduceSmem<SHAPE> smem;
    const PersistentPart<T, SHAPE> part(p, smem, in_shared);
    if (part.lane == 0) part.begin();
    cluster::arrive_relaxed();  // relaxed: the fence has published the mbarriers
    part.fill();
    cluster::wait();
    __syncthreads();
    // A block may exit once it has received the last row: everything sent to it has arrived by then.
    if (part.is_reduction_warp()) {
        part.run_reduction_warp();
    } else {
        part.run_row_warps();
    }
#endif
}

// ---- host ----------------------------------------------------------------------------------------------------------

/// Rows of 16-bit elements that consist of whole vectors and lie evenly, of a length that one of Op::Persistent takes.
template <class Op, typename T>
void launch_persistent_cluster(const NormForward<T>& p, bool vectorized, const Launch& launch) {
    check_takes(sizeof(T) == 2 && are_even(vectorized, p.in, p.res, p.out), Op::NAME, p.length);
    if constexpr (sizeof(T) == 2) {
        const auto run = [&](auto shape) {
            using SHAPE = decltype(shape);
            if (!SHAPE::takes(p.length / Vec<T>::size)) return false;
            constexpr auto kernel = norm_persistent_cluster_kernel<Op, T, SHAPE>;
            static DeviceSet asked;
            static OccupancyCache resident;
            KL_CHECK(has_hopper_code(kernel, launch.device), NO_CLUSTERS);
            allow_shared(kernel, SHAPE::BYTES, launch.device, asked);
            const int64_t most = resident.clusters(kernel, dim3(SHAPE::THREADS), SHAPE::BLOCKS, SHAPE::BYTES, launch);
            LaunchConfig(dim3(std::min(p.count, most) * SHAPE::BLOCKS), dim3(SHAPE::THREADS), SHAPE::BYTES, launch)
                .clusters_of(SHAPE::BLOCKS)
                .run(kernel, short_norm(p));
            return true;
        };
        const bool ran = std::apply([&](auto... shape) { return (run(shape) || ...); }, typename Op::Persistent{});
        check_takes(ran, Op::NAME, p.length);
    }
}

}  // namespace kl
