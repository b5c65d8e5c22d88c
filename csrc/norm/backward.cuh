// layer_norm, rms_norm, add_rms_norm: the backward pass of every rung from `registers` on, and of
// bias_dropout_add_layer_norm.
// Idea      One read of input and gradient, one write. cp.async stages the next rows in shared memory while threads
//           compute on one. Each thread keeps the sums of its columns over all its rows in registers: stage one of the
//           weights' gradients.
// Predicts  3·N·sizeof(T) bytes per row; `block` moves up to 7·N: each operand twice, and once more for the weights.
// Kernels   This file takes any rows, on one block or a cluster. backward_short.cuh and backward_persistent.cuh take
//           16-bit rows of some lengths; select_backward.cuh selects among the three.
#pragma once

#include "core/pdl.cuh"
#include "norm/norm.cuh"
#include "reduce/cluster_reduce.cuh"
#include "sm90/smem_stages.cuh"

namespace kl {

constexpr int REGISTER_VECTORS = 2;  // vectors of a row that a thread holds beside its column sums
template <int V>
constexpr bool IN_REGISTERS = V <= REGISTER_VECTORS;

// Rows staged at a time: 64 KiB per SM in flight, twice what memory latency requires. Rows that are not IN_REGISTERS
// are processed two at a time where shared memory has room for a third.
__host__ __device__ constexpr int backward_stages(int v, bool roomy) {
    return v <= REGISTER_VECTORS ? 4 : roomy ? 3 : 2;
}

// Staged vectors per thread: input and gradient of all stages, and the weight where it is not in registers.
__host__ __device__ constexpr int backward_stage_vectors(int v, bool roomy) {
    return 2 * v * backward_stages(v, roomy) + (v <= REGISTER_VECTORS ? 0 : v);
}

// Whether an architecture (90 for sm_90) has room for a third row: Hopper and Blackwell have 228 KiB of shared memory
// per SM, Blackwell's workstation and consumer GPUs (12.x) 100 KiB.
__host__ __device__ constexpr bool is_roomy(int architecture) { return architecture >= 90 && architecture < 120; }

// The same for the architecture being compiled.
__device__ constexpr bool is_roomy_here() {
#if defined(__CUDA_ARCH__)
    return is_roomy(__CUDA_ARCH__ / 10);
#else
    return false;
#endif
}

// Stores the sums of four columns to the partials.
template <bool VECTORIZED>
__device__ void store_columns(float* partials, int64_t column, const float4& sums, int64_t length) {
    if constexpr (VECTORIZED) {
        if (column < length) *reinterpret_cast<float4*>(partials + column) = sums;
    } else {
        if (column < length) partials[column] = sums.x;
        if (column + 1 < length) partials[column + 1] = sums.y;
        if (column + 2 < length) partials[column + 2] = sums.z;
        if (column + 3 < length) partials[column + 3] = sums.w;
    }
}

// The means that a row's gradient subtracts, from the sums of w·dy (layer_norm only) and w·dy·x̂.
__device__ inline Pair means_of(const Pair& sums, float per_element) {
    return {sums.first * per_element, sums.second * per_element};
}
__device__ inline Pair means_of(float sum, float per_element) { return {0.0f, sum * per_element}; }

// One vector of a row, unpacked: x̂, the gradient, and the gradient times the weight.
template <typename T, bool IS_LAYERNORM>
struct UnpackedVector {
    static constexpr int E = Vec<T>::size;
    float x_hat[E], g[E], weighted[E];

    __device__ void unpack_row(const Vec<T>& x, const Vec<T>& grad, const uint4& weight, const Stats& stats) {
        unpack(x, x_hat);
        unpack(grad, g);
        unpack(reinterpret_cast<const Vec<T>&>(weight), weighted);
#pragma unroll
        for (int e = 0; e < E; ++e) {
            x_hat[e] = normalized<IS_LAYERNORM, SHIFTED<T>>(x_hat[e], stats);
            weighted[e] *= g[e];
        }
    }
};

// Stores a thread's column sums over its rows as partials, stage one of the weights' gradients. The partials of the
// bias lie `apart` from those of the weight. Rows that share a block are summed in shared memory first, to keep
// partials few.
template <bool VECTORIZED, typename Partition, int SUMS, int V, int E>
__device__ void store_partials(float* partials, int64_t apart, const float (&own)[SUMS][V][E],
                               const Partition& partition, uint4* in_shared, int64_t length) {
    constexpr int FOURS = E / 4;
    constexpr int PIECES = V * FOURS;
    const int lanes = blockDim.x, stripes = Partition::ONE_ROW_PER_CTA ? 1 : static_cast<int>(blockDim.y),
              width = lanes * PIECES;
    auto* const rows = reinterpret_cast<float4*>(in_shared);
    if (stripes > 1) __syncthreads();  // the stages have been read
#pragma unroll
    for (int s = 0; s < SUMS; ++s) {
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            const float* const sum = own[s][i / FOURS] + i % FOURS * 4;
            const float4 four = make_float4(sum[0], sum[1], sum[2], sum[3]);
            const int64_t column = int64_t{partition.at(i / FOURS)} * E + i % FOURS * 4;
            if (stripes == 1 && partition.at(i / FOURS) < partition.end)
                store_columns<VECTORIZED>(partials + s * apart, column, four, length);
            if (stripes > 1) rows[(s * stripes + threadIdx.y) * width + i * lanes + threadIdx.x] = four;
        }
    }
    if (stripes == 1) return;
    __syncthreads();
    // All are powers of two. Shifts instead of divisions: code that runs once is bound by instruction fetch.
    const int log_lanes = __ffs(lanes) - 1;
    for (int at = threadIdx.y * lanes + threadIdx.x; at < SUMS * width; at += lanes * stripes) {
        const int piece = at >> log_lanes, s = piece / PIECES, i = piece % PIECES, lane = at & (lanes - 1);
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
        for (int y = 0; y < stripes; ++y) {
            const float4 more = rows[(s * stripes + y) * width + i * lanes + lane];
            sum = make_float4(sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w);
        }
        const int64_t column = int64_t{lane + i / FOURS * lanes} * E + i % FOURS * 4;
        store_columns<VECTORIZED>(partials + s * apart, column, sum, length);
    }
}

// Number of rows from `row` on at distance `apart`. The host divides: on the GPU a 64-bit division would delay the
// first load.
template <typename T>
__device__ int iterations_of(int64_t row, const NormBackward<T>& p) {
    return p.iterations + (row < p.rest ? 1 : 0);
}

// Iterates over a thread's rows of an operand, every `apart`-th from `row` on. EVEN: rows lie evenly apart, and one
// addition leads to the next.
template <bool EVEN, typename T>
struct RowIterator {
    T *base, *at;
    int64_t row;

    __device__ RowIterator(T* base_in, const EvenRows& even, int64_t row_in) : base(base_in), at(base), row(row_in) {
        if constexpr (EVEN) at += row * even.step;
    }

    // Returns the start of the current row, if it exists (`has_row`), and advances. The host precomputes the distance: a
    // kernel argument takes no register.
    __device__ T* next(const Rows& rows, const EvenRows& even, int64_t apart, bool has_row) {
        T* const start = EVEN ? at : base + (has_row ? rows.start(row) : 0);
        if constexpr (EVEN) at += even.apart;
        row += apart;
        return start;
    }
};

/// A thread's part of its rows, every `apart`-th from `row` on, one per iteration. IN_REGISTERS: the unpacked row stays
/// in registers between the two passes, and so does the weight.
template <typename T, bool IS_LAYERNORM, bool HAS_RESIDUAL, int V, bool VECTORIZED, bool CLUSTER>
struct BackwardPart {
    static constexpr int E = Vec<T>::size, STAGES = backward_stages(V, is_roomy_here()), WEIGHT = 2 * V * STAGES;
    static constexpr int SUMS = IS_LAYERNORM ? 2 : 1, KEPT = IN_REGISTERS<V> ? V : 1;
    // One row at a time in a block, shared by all its threads.
    static constexpr bool ONE_ROW_PER_CTA = CLUSTER || (VECTORIZED && !HAS_RESIDUAL && !IN_REGISTERS<V>);
    using Sums = std::conditional_t<IS_LAYERNORM, Pair, float>;
    using Partition = RowPartition<CLUSTER, ONE_ROW_PER_CTA>;

    const NormBackward<T>& p;
    const Partition& partition;
    const SmemStages<T, ONE_ROW_PER_CTA ? ROW_THREADS : 0> stages;
    const int64_t row;
    const int own;  // iterations of this thread
    RowIterator<VECTORIZED, const T> input, grad, grad_sum;
    RowIterator<VECTORIZED, T> grad_input;
    float of_columns[SUMS][V][E] = {};  // column sums: the weight's gradient, the bias's
    float scale[KEPT][E], x_hat[KEPT][E], weighted[KEPT][E], g[E];
    Vec<T> more[HAS_RESIDUAL ? V : 1];

    __device__ BackwardPart(const NormBackward<T>& p_in, const Partition& partition_in, uint4* in_shared,
                            int64_t row_in)
        : p(p_in),
          partition(partition_in),
          stages(in_shared),
          row(row_in),
          own(iterations_of(row, p)),
          input(p.input, p.even_in, row),
          grad(p.grad, p.even_g, row),
          grad_sum(p.grad_sum, p.even_gs, row),
          grad_input(p.grad_input, p.even_gi, row) {
        if constexpr (!IN_REGISTERS<V>)
            stages.template fetch_parameter<VECTORIZED, V>(WEIGHT, p.weight, p.parameter, partition, p.length, 1.0f);
    }

    // To be called after the first copies are issued, since it waits for memory.
    __device__ void load_weight() {
        if constexpr (IN_REGISTERS<V>) {
#pragma unroll
            for (int v = 0; v < V; ++v) {
                const int first = partition.at(v) * E;
                unpack(load_parameter<VECTORIZED>(p.weight, p.parameter, first, p.length, 1.0f), scale[v]);
            }
        }
    }

    // Copies the rows of an iteration to their stage. Must be called for every iteration, in order.
    __device__ void fetch(int iteration) {
        const bool has_row = iteration < own;
        const int begin = iteration % STAGES * 2 * V;
        stages.template fetch<VECTORIZED, V>(begin, input.next(p.in, p.even_in, p.apart, has_row), p.in, partition,
                                             has_row, p.length);
        stages.template fetch<VECTORIZED, V>(begin + V, grad.next(p.g, p.even_g, p.apart, has_row), p.g, partition,
                                             has_row, p.length);
        cp_async_commit();
    }
    __device__ Stats stats(int iteration) const {
        return iteration < own ? load_stats<IS_LAYERNORM>(p.stats, row + iteration * p.apart) : Stats{0.0f, 0.0f, 0.0f};
    }
    // Loads grad_sum of this iteration's row, which its gradient adds. Rows by elements load it later.
    __device__ void load_grad_sum(int iteration) {
        if constexpr (HAS_RESIDUAL && VECTORIZED) {
            const bool has_row = ONE_ROW_PER_CTA || iteration < own;
            load_row<VECTORIZED>(more, grad_sum.next(p.gs, p.even_gs, p.apart, has_row), p.gs, partition, has_row,
                                 p.length, 0.0f);
        }
    }

    // Unpacks x̂ and the weighted gradient of vector v.
    __device__ void unpack_row(int iteration, int v, const Stats& stats) {
        const int begin = iteration % STAGES * 2 * V + v, at = v % KEPT;
        stages.read(begin, x_hat[at]);
        stages.read(begin + V, g);
        if constexpr (!IN_REGISTERS<V>) stages.read(WEIGHT + v, scale[at]);
#pragma unroll
        for (int e = 0; e < E; ++e) {
            x_hat[at][e] = normalized<IS_LAYERNORM, SHIFTED<T>>(x_hat[at][e], stats);
            weighted[at][e] = g[e] * scale[at][e];
        }
    }

    // First pass: returns this thread's part of the row's sums and adds to its column sums.
    __device__ Sums sums(int iteration, const Stats& stats) {
        Sums sums{};
#pragma unroll
        for (int v = 0; v < V; ++v) {
            const int at = v % KEPT;
            unpack_row(iteration, v, stats);
            Pair partial{0.0f, 0.0f};
#pragma unroll
            for (int e = 0; e < E; ++e) {
                of_columns[0][v][e] = fmaf(g[e], x_hat[at][e], of_columns[0][v][e]);
                if constexpr (IS_LAYERNORM) of_columns[1][v][e] += g[e];
                partial = {partial.first + weighted[at][e], fmaf(weighted[at][e], x_hat[at][e], partial.second)};
            }
            if constexpr (IS_LAYERNORM) sums = PairSum{}(sums, partial);
            if constexpr (!IS_LAYERNORM) sums += partial.second;
        }
        return sums;
    }

    // Second pass: computes and stores the gradient.
    __device__ void store_gradient(int iteration, const Sums& sums, const Stats& stats) {
        const bool has_row = ONE_ROW_PER_CTA || iteration < own;
        const Pair means = means_of(sums, p.per_element);
        T* const to = grad_input.next(p.gi, p.even_gi, p.apart, has_row);
        const T* const added = HAS_RESIDUAL && !VECTORIZED ? grad_sum.next(p.gs, p.even_gs, p.apart, has_row) : nullptr;
#pragma unroll(VECTORIZED ? V : 1)
        for (int v = 0; v < V; ++v) {
            const int at = v % KEPT, first = partition.at(v) * E;
            if constexpr (!IN_REGISTERS<V>) unpack_row(iteration, v, stats);
            float x[E];
#pragma unroll
            for (int e = 0; e < E; ++e) {
                x[e] = gradient<IS_LAYERNORM>(x_hat[at][e], weighted[at][e], means, stats.rstd);
            }
            if constexpr (HAS_RESIDUAL) {
                if constexpr (VECTORIZED) unpack(more[v], g);
                if constexpr (!VECTORIZED)
                    unpack(load_chunk(added, p.gs, first,
                                      has_row && (!CLUSTER || partition.template has<T>(v, p.length)) ? p.length : 0,
                                      0.0f),
                           g);
#pragma unroll
                for (int e = 0; e < E; ++e) x[e] += g[e];
            }
            store_part<VECTORIZED, CLUSTER>(to, p.gi, pack<T>(x), v, partition, has_row, p.length);
        }
    }
};

/// Column sums are computed even where no weight gradient is wanted: that moves no byte and halves the instances. Rows
/// that are not IN_REGISTERS overlap the exchange of a row's sums with the first pass over the next row.
template <class Op, typename T, int V, bool VECTORIZED, bool CLUSTER>
__global__ void __launch_bounds__(ROW_THREADS, 1)
    norm_backward_registers_kernel(const NormWeights<T> w, __grid_constant__ const NormBackward<T> p) {
#if __CUDA_ARCH__ >= 800
    constexpr bool IS_LAYERNORM = Op::IS_LAYERNORM, HAS_RESIDUAL = Op::HAS_RESIDUAL;
    if (!exists_here<CLUSTER>()) return;
    using Part = BackwardPart<T, IS_LAYERNORM, HAS_RESIDUAL, V, VECTORIZED, CLUSTER>;
    using Sums = typename Part::Sums;
    const std::conditional_t<IS_LAYERNORM, PairSum, Sum> add;
    griddepcontrol_launch_dependents();  // each block fills its SM: the next kernel's blocks start as these exit
    extern __shared__ __align__(STAGE_ALIGNMENT) uint4 in_shared[];
    __shared__ ClusterReduceSmem<CLUSTER, Sums> reduce_smem[2];
    const typename Part::Partition partition(vectors_of<T>(p.length));
    partition.open(reduce_smem[0], reduce_smem[1]);
    griddepcontrol_wait();
    // A block's rows lie a grid apart, so that the last rows are spread over all SMs.
    const int64_t first_row = CLUSTER ? partition.row : blockIdx.x;
    Part part(p, partition, in_shared, first_row + (Part::ONE_ROW_PER_CTA ? 0 : int64_t{gridDim.x} * threadIdx.y));
#pragma unroll 1
    for (int iteration = 0; iteration < Part::STAGES; ++iteration) part.fetch(iteration);
    part.load_weight();
    const int iterations = Part::ONE_ROW_PER_CTA ? part.own : iterations_of(first_row, p);
    const bool gradient = p.grad_input != nullptr;
    Stats next = part.stats(0);
    partition.meet();
    if constexpr (IN_REGISTERS<V> || !is_roomy_here()) {
        for (int iteration = 0; iteration < iterations; ++iteration) {
            const Stats stats = next;
            next = part.stats(iteration + 1);
            part.load_grad_sum(iteration);
            cp_async_wait<Part::STAGES - 1>();
            Sums sums = part.sums(iteration, stats);
            if constexpr (IN_REGISTERS<V>) part.fetch(iteration + Part::STAGES);
            if (gradient) {
                sums = reduce_arrive<Part::ONE_ROW_PER_CTA>(sums, add, reduce_smem[iteration % 2]);
                sums = reduce_wait<Part::ONE_ROW_PER_CTA>(sums, add, reduce_smem[iteration % 2], iteration / 2);
                part.store_gradient(iteration, sums, stats);
            }
            if constexpr (!IN_REGISTERS<V>) part.fetch(iteration + Part::STAGES);
        }
    } else {
        Stats stats = next;
        Sums sent{};
        for (int iteration = -1; iteration < iterations; ++iteration) {
            const Stats before = stats;
            stats = next;
            next = part.stats(iteration + 2);
            if (iteration >= 0) part.load_grad_sum(iteration);
            cp_async_wait<Part::STAGES - 2>();
            Sums sums = part.sums(iteration + 1, stats);
            Sums of_row{};
            if (iteration >= 0 && gradient)
                of_row = reduce_wait<Part::ONE_ROW_PER_CTA>(sent, add, reduce_smem[iteration % 2], iteration / 2);
            if (iteration + 1 < iterations && gradient)
                sent = reduce_arrive<Part::ONE_ROW_PER_CTA>(sums, add, reduce_smem[(iteration + 1) % 2]);
            if (iteration < 0) continue;
            if (gradient) part.store_gradient(iteration, of_row, before);
            part.fetch(iteration + Part::STAGES);
        }
    }
    cp_async_wait<0>();
    if (w.partials == nullptr) return;
    float* const partials = w.partials + first_row * p.length;
    const typename Part::Partition anew(vectors_of<T>(p.length));  // recomputed, to hold no register during the loop
    store_partials<VECTORIZED>(partials, w.groups * p.length, part.of_columns, anew, in_shared, p.length);
#endif
}

// ---- host ----------------------------------------------------------------------------------------------------------

// Threads of a block of several rows. A block that fills an SM makes the fewest partials. For 16 bits two blocks per SM
// are faster: while one ends an iteration, the other has loads in flight.
template <typename T>
constexpr int BACKWARD_BLOCK = sizeof(T) == 2 ? ROW_THREADS / 2 : ROW_THREADS;

// Rows are not IN_REGISTERS where the gradient adds another operand, nor where they are long.
template <class Op, typename T>
RowLaunch backward_shape(int64_t chunks, bool whole) {
    RowLaunch shape = row_launch(chunks, /*clusters=*/true);
    if (whole && !Op::HAS_RESIDUAL && chunks <= ROW_THREADS * REGISTER_VECTORS) {
        shape = RowLaunch{row_threads(chunks, REGISTER_VECTORS, ROW_THREADS), 1, 1, REGISTER_VECTORS};
    }
    // One vector less per thread where that suffices: threads compute on missing vectors too.
    if (whole && shape.vectors == ROW_VECTORS && shape.threads == ROW_THREADS &&
        chunks <= ROW_THREADS * (ROW_VECTORS - 1)) {
        --shape.vectors;
    }
    shape.rows = std::max<unsigned>(1, BACKWARD_BLOCK<T> / shape.threads);
    return shape;
}

// Distributes rows over at most `most` blocks or clusters, `rows` to each per iteration. Returns the memory of their
// partials, if weight gradients are wanted.
template <bool IS_LAYERNORM, typename T>
std::optional<Tensor> distribute_rows(NormWeights<T>& w, NormBackward<T>& p, int64_t rows, int64_t most,
                                      const Tensor& like) {
    w.groups = static_cast<int>(std::min(ceil_div(p.count, rows), most));
    p.apart = w.groups * rows;
    const auto even = [&](const Rows& operand) { return EvenRows{operand.step(), operand.step() * p.apart}; };
    p.even_gi = even(p.gi);
    p.even_g = even(p.g);
    p.even_gs = even(p.gs);
    p.even_in = even(p.in);
    p.iterations = static_cast<int>(p.count / p.apart);
    p.rest = p.count % p.apart;
    if (!w.wanted()) return std::nullopt;
    Tensor partials = empty(like, ScalarType::Float, {IS_LAYERNORM ? 2 : 1, w.groups, p.length});
    w.partials = pointer<float>(partials);
    return partials;
}

// Bytes of shared memory for `stages` vectors per thread. Reduces the rows per block where the GPU has less.
inline int rows_that_fit(RowLaunch& shape, int stages, int32_t device) {
    constexpr int FOR_REDUCTIONS = 1024;
    const auto bytes = [&] { return stage_bytes(shape.threads * shape.rows, stages); };
    if (bytes() <= stage_bytes(ROW_THREADS / 2, backward_stage_vectors(REGISTER_VECTORS, false)))
        return bytes();  // every GPU has this much
    const int limit = shared_limit(device) - FOR_REDUCTIONS;
    while (bytes() > limit && shape.rows > 1) shape.rows /= 2;
    KL_CHECK(bytes() <= limit, "the backward pass of a row this long needs ", bytes(),
             " bytes of shared memory a block; this GPU has ", limit);
    return bytes();
}

/// Any rows: on one block, or on a cluster where a row outgrows a block.
template <class Op, typename T>
void launch_backward_rows(NormWeights<T> w, NormBackward<T> p, bool vectorized, const Tensor& like,
                          const Launch& launch) {
    constexpr int FEW = Op::HAS_RESIDUAL ? ROW_VECTORS - 1 : REGISTER_VECTORS;
    RowLaunch shape = backward_shape<Op, T>(ceil_div(p.length, Vec<T>::size), vectorized);
    with_row_shape<FEW, ROW_VECTORS - 1, ROW_VECTORS>(shape, vectorized, [&](auto v, auto a, auto b) {
        constexpr auto kernel = norm_backward_registers_kernel<Op, T, v(), a(), b()>;
        static DeviceSet asked;
        static OccupancyCache resident;
        const int stages = backward_stage_vectors(v(), is_roomy(code_version(kernel, launch.device)));
        allow_shared_up_to(kernel, stage_bytes(ROW_THREADS, stages), launch.device, asked);
        const int bytes = rows_that_fit(shape, stages, launch.device);
        const int64_t most = resident.clusters(kernel, shape.block(), shape.cluster, bytes, launch);
        const auto partials = distribute_rows<Op::IS_LAYERNORM>(w, p, shape.rows, most, like);
        launch_rows(kernel, shape, w.groups * shape.cluster, bytes, launch, w, p);
        if (w.wanted()) launch_column_sum<Op>(w, p.length, launch);
    });
}

}  // namespace kl
