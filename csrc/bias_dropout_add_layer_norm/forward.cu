// Bias, dropout, residual sum and LayerNorm: layer_norm(residual + dropout(input + bias)), with the mask of
// kernel_ladder/semantics/philox.py. Formulas and their sources are in dropout.cu and layer_norm.cu. The kernels of
// layer_norm.cu give the gradient of the sum. From it, a kernel of backward.cu makes those of input and bias.
//
// Elements are counted in row-major order whatever the strides, so that a view has the mask of its copy.

#include "core/philox.cuh"
#include "norm/launch.cuh"

namespace kl {
namespace {

// `norm.input` is the branch, to which dropout applies. `norm.sum` is null where the sum is not saved.
template <typename T>
struct DropoutAddNorm {
    NormForward<T> norm;
    const T* bias;  // of the branch, dense
};

// ---- naive: one thread a row ---------------------------------------------------------------------------------------
//
// bias_dropout_add_layer_norm, rung 1 of 4: naive
// Idea      One thread per row; backward, one thread per column.
// Predicts  Each load of a warp fetches a 32-byte sector for one element.
// Limit now Uncoalesced reads; few rows leave most of the GPU idle.
// Next      `registers`: threads share a row, which stays in registers.

// One element of the sum, rounded to T.
template <typename T>
__device__ T sum_at(const DropoutAddNorm<T>& p, const DropoutMask& mask, int64_t row, int64_t i) {
    const float branch = to_float(p.norm.input[p.norm.in.start(row) + i * p.norm.in.stride]) + to_float(p.bias[i]);
    const float residual = to_float(p.norm.residual[p.norm.res.start(row) + i * p.norm.res.stride]);
    return from_float<T>(residual + branch * mask.of(row * p.norm.length + i));
}

// `of_sum` are the operands of the norm of `sum`.
template <typename T>
__global__ void bias_dropout_add_layer_norm_naive_kernel(__grid_constant__ const DropoutAddNorm<T> p,
                                                         __grid_constant__ const NormForward<T> of_sum, T* sum,
                                                         __grid_constant__ const DropoutMask mask) {
    const int64_t row = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (row >= p.norm.count) return;
    for (int64_t i = 0; i < p.norm.length; ++i) {
        sum[p.norm.out.start(row) + i * p.norm.out.stride] = sum_at(p, mask, row, i);
    }
    norm_naive<T, true, false>(of_sum);
}

// ---- registers, cluster: one row per part of a block, per block, or per cluster ---------------------------------------
//
// bias_dropout_add_layer_norm, rung 2 of 4: registers
// Idea      The sum is computed in registers, one call of Philox for eight elements, and normalised there.
// Predicts  Input and residual are read once, sum and output written once: 4·N·sizeof(T) bytes per row.
// Limit now Rows that fill an SM's registers.
// Next      `smem_pipeline`: operands wait in shared memory, so that more threads fit on an SM.
//
// bias_dropout_add_layer_norm, rung 4 of 4: cluster
// Idea      The blocks of a cluster share a row that outgrows one block, each its part in registers.
// Predicts  4·N·sizeof(T) bytes per row, as `registers`.
// Limit now Memory bandwidth, closely followed by the integer arithmetic of Philox.

// Without the cache policy of evict_last(): where Philox is the limit, it makes short rows 2 to 5 % slower and long ones no
// faster.
template <typename T, int THREADS = 0>
using DrawnStages = SmemStages<T, THREADS, false>;

// Staged vectors per thread: input and residual, their sum where rows come by elements, or none.
template <bool VECTORIZED, bool CLUSTER>
constexpr int DROPOUT_ADD_NORM_STAGE_VECTORS = !VECTORIZED ? ROW_VECTORS
                                               : CLUSTER   ? 0
                                                           : 2 * ROW_VECTORS;

/// Computes one row of the sum. VECTORIZED: one call of Philox draws for eight elements, and both operands pass through
/// shared memory. Registers do not suffice to have all vectors in flight: ptxas would load one after the other. A
/// cluster loads that way all the same: its blocks wait for each other, and some warps draw while others load. Not
/// VECTORIZED: a thread computes its elements one by one, in its stages.
template <bool VECTORIZED, bool CLUSTER, typename T>
__device__ void gather_sum(Vec<T> (&tile)[ROW_VECTORS], const DropoutAddNorm<T>& p, const DropoutMask& mask,
                           const RowPartition<CLUSTER>& partition, const DrawnStages<T>& stages, int64_t row,
                           bool has_row) {
    constexpr int V = ROW_VECTORS, E = Vec<T>::size;
    const int64_t length = p.norm.length;
    if constexpr (VECTORIZED) {
        const T* const input = p.norm.input + p.norm.in.start(row);
        const T* const residual = p.norm.residual + p.norm.res.start(row);
        [[maybe_unused]] Vec<T> added[V];
        if constexpr (CLUSTER) {
            load_row<VECTORIZED>(tile, input, p.norm.in, partition, has_row, length, 0.0f);
            load_row<VECTORIZED>(added, residual, p.norm.res, partition, has_row, length, 0.0f);
        } else {
            stages.template fetch<VECTORIZED, V>(0, input, p.norm.in, partition, has_row, length);
            stages.template fetch<VECTORIZED, V>(V, residual, p.norm.res, partition, has_row, length);
            cp_async_commit();
        }
        const int64_t vector0 = (row * length + int64_t{partition.first} * E) / E;
        const auto bias_of = [&](int v) {  // zeros past the end of this block's part
            const int first = partition.template has<T>(v, length) ? partition.at(v) * E : static_cast<int>(length);
            return load_parameter<VECTORIZED, CLUSTER>(p.bias, p.norm.parameter, first, length, 0.0f);
        };
        // One vector ahead where registers allow: ptxas moves no load across the branch for ties.
        Vec<T> next = bias_of(0);
#pragma unroll
        for (int v = 0; v < V; ++v) {
            if (CLUSTER && v > 0) next = bias_of(v);
            const Vec<T> bias = next;
            if (!CLUSTER && v + 1 < V) next = bias_of(v + 1);
            // Before vectors are unpacked, which doubles their registers.
            const uint4 words = mask.draw<E>(vector0 + int64_t{v} * partition.step());
            float x[E], more[E];
            unpack(bias, more);
            if (!CLUSTER && v == 0) cp_async_wait<0>();
            if constexpr (CLUSTER) unpack(tile[v], x);
            if constexpr (!CLUSTER) stages.read(v, x);
#pragma unroll
            for (int e = 0; e < E; ++e) x[e] += more[e];
            if constexpr (CLUSTER) unpack(added[v], more);
            if constexpr (!CLUSTER) stages.read(V + v, more);
            mask.apply(x, words, more);
            tile[v] = pack<T>(x);
        }
    } else {
#pragma unroll 1
        for (int i = 0; i < V * E; ++i) {
            const int64_t column = int64_t{partition.at(i / E)} * E + i % E;
            T* const place = reinterpret_cast<T*>(stages.stage(i / E)) + i % E;
            *place = has_row && partition.template has<T>(i / E, length) && column < length
                         ? sum_at(p, mask, row, column)
                         : from_float<T>(0.0f);
        }
        stages.take(tile, 0);
    }
    if (p.norm.sum != nullptr) {
        store_row<VECTORIZED>(p.norm.sum + p.norm.out.start(row), p.norm.out, tile, partition, has_row, length);
    }
}

template <typename T, bool VECTORIZED, bool CLUSTER>
__device__ void dropout_add_norm_registers(const DropoutAddNorm<T>& p, const DropoutMask& mask) {
    if (!exists_here<CLUSTER>()) return;
    extern __shared__ __align__(STAGE_ALIGNMENT) uint4 in_shared[];
    const DrawnStages<T> stages(in_shared);
    norm_registers_of<T, true, ROW_VECTORS, VECTORIZED, CLUSTER, false>(
        p.norm, [&](Vec<T>(&tile)[ROW_VECTORS], const RowPartition<CLUSTER>& partition, int64_t row, bool has_row) {
            gather_sum<VECTORIZED>(tile, p, mask, partition, stages, row, has_row);
        });
}

template <typename T, bool VECTORIZED>
__global__ void __launch_bounds__(ROW_THREADS, BLOCKS_AN_SM<VECTORIZED>)
    bias_dropout_add_layer_norm_registers_kernel(__grid_constant__ const DropoutAddNorm<T> p,
                                                 __grid_constant__ const DropoutMask mask) {
    dropout_add_norm_registers<T, VECTORIZED, false>(p, mask);
}

template <typename T, bool VECTORIZED>
__global__ void __launch_bounds__(ROW_THREADS, BLOCKS_AN_SM<VECTORIZED>)
    bias_dropout_add_layer_norm_cluster_kernel(__grid_constant__ const DropoutAddNorm<T> p,
                                               __grid_constant__ const DropoutMask mask) {
    dropout_add_norm_registers<T, VECTORIZED, true>(p, mask);
}

// ---- registers, short rows: several per warp --------------------------------------------------------------------------

template <typename T>
struct ShortDropoutAddNorm {
    ShortNorm<T> norm;
    const T* bias;
};

// Rows whose random words are drawn in one go.
template <typename T, int ROWS>
constexpr int ROWS_PER_DRAW = sizeof(T) == 2 && ROWS > 1 ? 2 : 1;

/// Short rows. As above, both operands pass through shared memory. PRELOAD_PARAMS: the norm's parameters are loaded
/// with them. THREADS: see SmemStages.
template <typename T, int ROWS, bool BY_BLOCK, int V, bool PRELOAD_PARAMS, int THREADS>
__device__ void dropout_add_norm_short(const ShortDropoutAddNorm<T>& p, const DropoutMask& mask, uint4* input,
                                       uint4* residual) {
    pdl_begin();
    constexpr int E = Vec<T>::size, DRAWS = ROWS_PER_DRAW<T, ROWS>;
    const MultiRowPartition<ROWS, BY_BLOCK> partition(p.norm.count, p.norm.length);
    const DrawnStages<T, THREADS> inputs(input), residuals(residual);
    const auto gather = [&](Vec<T>(&tile)[ROWS][V], auto&& meanwhile) {
        partition.template fetch<V>(inputs, p.norm.input, p.norm.in_step);
        partition.template fetch<V>(residuals, p.norm.residual, p.norm.res_step);
        cp_async_commit();
        meanwhile();
        T* const sums = p.norm.sum;
        Vec<T> next = partition.parameter(p.bias, 0, 0.0f);
#pragma unroll
        for (int v = 0; v < V; ++v) {
            float x[E], more[E], bias[E];
            uint4 drawn[DRAWS];
            unpack(next, bias);
            if (v + 1 < V)
                next = partition.parameter(p.bias, v + 1, 0.0f);  // before the stores: ptxas moves no load across them
            if (v == 0) cp_async_wait<0>();
            T* to = partition.begin(sums, p.norm.out_step, v);
#pragma unroll
            for (int r = 0; r < ROWS; ++r, to += partition.next(p.norm.out_step)) {
                if (r % DRAWS == 0) {
                    mask.template draw<E>(drawn, [&](int i) -> uint64_t {
                        return ((partition.row + (r + i) * partition.apart) * partition.length + partition.at(v) * E) /
                               E;
                    });
                }
                inputs.read(r * V + v, x);
                residuals.read(r * V + v, more);
#pragma unroll
                for (int e = 0; e < E; ++e) x[e] += bias[e];
                mask.apply(x, drawn[r % DRAWS], more);
                tile[r][v] = pack<T>(x);
                if (sums != nullptr) partition.store(to, r, v, tile[r][v]);
            }
        }
    };
    norm_short_of<T, true, ROWS, BY_BLOCK, V, PRELOAD_PARAMS>(p.norm, partition, gather);
}

template <typename T, int ROWS>
__global__ void __launch_bounds__(MIN_BLOCK, sizeof(T) == 4 ? 8 : 11)
    bias_dropout_add_layer_norm_registers_short_kernel(__grid_constant__ const ShortDropoutAddNorm<T> p,
                                                       __grid_constant__ const DropoutMask mask) {
    constexpr int V = SHORT_VECTORS<T, ROWS>;
    __shared__ uint4 input[ROWS * V * MIN_BLOCK], residual[ROWS * V * MIN_BLOCK];
    dropout_add_norm_short<T, ROWS, false, V, ROWS == SHORT_ROWS, MIN_BLOCK>(p, mask, input, residual);
}

using DropoutAddNormBlockRows = BlockRowsShape<2, 2, 512, 4096>;
constexpr int DROPOUT_ADD_NORM_ROWS_STAGE_VECTORS =
    DropoutAddNormBlockRows::ROWS * DropoutAddNormBlockRows::VECTORS;  // per thread and operand

template <typename T>
__global__ void __launch_bounds__(DropoutAddNormBlockRows::THREADS, 3)
    bias_dropout_add_layer_norm_registers_block_rows_kernel(__grid_constant__ const ShortDropoutAddNorm<T> p,
                                                            __grid_constant__ const DropoutMask mask) {
    extern __shared__ __align__(STAGE_ALIGNMENT) uint4 in_shared[];
    dropout_add_norm_short<T, DropoutAddNormBlockRows::ROWS, true, DropoutAddNormBlockRows::VECTORS, true, 0>(
        p, mask, in_shared, in_shared + DROPOUT_ADD_NORM_ROWS_STAGE_VECTORS * blockDim.x);
}

// ---- smem_pipeline ---------------------------------------------------------------------------------------------------
//
// bias_dropout_add_layer_norm, rung 3 of 4: smem_pipeline
// Idea      16-bit rows: cp.async stages input and residual in shared memory, and two rows per block share their
//           parameters. Rows longer than a block take clusters of such blocks.
// Predicts  The same bytes as `registers`; 1024 to 1280 threads per SM, each with one vector in registers.
// Limit now Memory bandwidth, closely followed by the integer arithmetic of Philox.
// Next      `cluster`: long rows of float32, and those that are not evenly spaced or aligned.

// One block takes rows of at most 4096, 8192 and 16384 elements. Longer rows take clusters of the second shape up to
// the portable size, then of the third. Two rows per block share the loads of three parameters, which come from the L2.
using ShortDropoutAddNormPipeline = PipelineShape<2, 2, 256, 5>;
using DropoutAddNormPipeline = PipelineShape<2, 4, 256, 4, 2>;
using WideDropoutAddNormPipeline = PipelineShape<2, 4, 512, 2, 2>;

template <typename T, typename SHAPE, bool CLUSTER>
__global__ void __launch_bounds__(SHAPE::THREADS, SHAPE::BLOCKS)
    bias_dropout_add_layer_norm_smem_pipeline_kernel(__grid_constant__ const ShortDropoutAddNorm<T> p,
                                                     __grid_constant__ const DropoutMask mask) {
    if (!exists_here<CLUSTER>()) return;
    constexpr int E = Vec<T>::size;
    // Registers suffice either for the bias one vector ahead or for the random words of all rows at once.
    constexpr bool AHEAD = SHAPE::VECTORS <= 2;
    constexpr int DRAWS = AHEAD ? 1 : SHAPE::ROWS;
    const PipelinePartition<SHAPE, CLUSTER> partition(p.norm.length / E);
    uint4 bias, next, drawn[DRAWS];
    const auto fetch_bias = [&](uint4& to, int v) {
        to = filled<T>(0.0f);
        load_if<CLUSTER>(to, p.bias + partition.at(v) * E, partition.has(v));
    };
    norm_smem_pipeline_of<true, SHAPE, CLUSTER, 2, false>(
        p.norm, partition, [&](int r, int v, const auto& words, bool in_range) {
            if (r == 0) {  // the load overlaps with Philox
                if (AHEAD && v > 0) bias = next;
                if (!AHEAD || v == 0) fetch_bias(bias, v);
                if (AHEAD && v + 1 < SHAPE::VECTORS) fetch_bias(next, v + 1);
            }
            if (r % DRAWS == 0) {
                mask.template draw<E>(drawn, [&](int i) -> uint64_t {
                    return (partition.row() + r + i) * partition.vectors + partition.at(v);
                });
            }
            float x[E], more[E];
            unpack(reinterpret_cast<const Vec<T>&>(words[0]), x);
            unpack(reinterpret_cast<const Vec<T>&>(bias), more);
#pragma unroll
            for (int e = 0; e < E; ++e) x[e] += more[e];
            unpack(reinterpret_cast<const Vec<T>&>(words[1]), more);
            mask.apply(x, drawn[r % DRAWS], more);
            const Vec<T> sum = pack<T>(x);
            if (p.norm.sum != nullptr) {
                store_if(p.norm.sum + (partition.row() + r) * p.norm.out_step + int64_t{partition.at(v)} * E, sum,
                         in_range);
            }
            return sum;
        });
}

// ---- host ----------------------------------------------------------------------------------------------------------

constexpr const char* NAME = "bias_dropout_add_layer_norm";

/// Launches the kernel for any rows: one block or a part of it per row, or one cluster per row.
template <bool CLUSTER, typename T>
void launch_dropout_add_norm_rows(const DropoutAddNorm<T>& p, const DropoutMask& mask, bool vectorized,
                                  const Launch& launch) {
    const int64_t vectors = ceil_div(p.norm.length, Vec<T>::size);
    RowLaunch shape = row_launch(vectors, CLUSTER);
    if (CLUSTER) shape = {ROW_THREADS, 1, std::max(2u, shape.cluster)};  // as in launch_cluster
    with_constant(vectorized, [&](auto w) {
        constexpr bool VECTORIZED = decltype(w)::value;
        constexpr auto kernel = CLUSTER ? bias_dropout_add_layer_norm_cluster_kernel<T, VECTORIZED>
                                        : bias_dropout_add_layer_norm_registers_kernel<T, VECTORIZED>;
        static DeviceSet asked;
        constexpr int STAGE_VECTORS = DROPOUT_ADD_NORM_STAGE_VECTORS<VECTORIZED, CLUSTER>;
        allow_shared_up_to(kernel, stage_bytes(ROW_THREADS, STAGE_VECTORS), launch.device, asked);
        allow_clusters(kernel, shape.cluster);
        KL_CHECK(!CLUSTER || has_hopper_code(kernel, launch.device), NO_CLUSTERS);
        LaunchConfig(dim3(shape.grid(p.norm.count)), shape.block(),
                     stage_bytes(shape.threads * shape.rows, STAGE_VECTORS), launch)
            .clusters_of(shape.cluster)
            .pdl(!CLUSTER && has_hopper_code(kernel, launch.device))
            .run(kernel, p, mask);
    });
}

/// The instance for rows that lie evenly apart, or else the one for any rows: chosen here as in launch_registers.
template <typename T>
void launch_dropout_add_norm_registers(const DropoutAddNorm<T>& p, const DropoutMask& mask, bool vectorized,
                                       const Launch& launch) {
    const ShortDropoutAddNorm<T> args{short_norm(p.norm), p.bias};
    const auto by_block = [&](auto, unsigned grid, dim3 block) {
        constexpr auto kernel = bias_dropout_add_layer_norm_registers_block_rows_kernel<T>;
        LaunchConfig(dim3(grid), block, stage_bytes(block.x, 2 * DROPOUT_ADD_NORM_ROWS_STAGE_VECTORS), launch)
            .pdl(has_hopper_code(kernel, launch.device))
            .run(kernel, args, mask);
    };
    const auto by_rows = [&](auto rows, unsigned grid, dim3 block) {
        launch_pdl(bias_dropout_add_layer_norm_registers_short_kernel<T, rows()>, grid, block, launch, args, mask);
    };
    if (are_even(vectorized, p.norm.in, p.norm.res, p.norm.out) &&
        with_even_rows<T>(std::tuple<DropoutAddNormBlockRows>{}, p.norm.count, p.norm.length, by_block, by_rows)) {
        return;
    }
    launch_dropout_add_norm_rows<false>(p, mask, vectorized, launch);
}

/// Launches the first shape whose block holds the row, else a cluster. Every GPU has the shared memory: 97 KiB at most.
template <typename T>
void launch_dropout_add_norm_pipeline(const DropoutAddNorm<T>& p, const DropoutMask& mask, bool vectorized,
                                      const Launch& launch) {
    check_takes(sizeof(T) == 2 && are_even(vectorized, p.norm.in, p.norm.res, p.norm.out), NAME, p.norm.length);
    if constexpr (sizeof(T) == 2) {
        const ShortDropoutAddNorm<T> args{short_norm(p.norm), p.bias};
        const int64_t vectors = p.norm.length / Vec<T>::size;
        const auto run = [&](auto shape, auto in_cluster, unsigned most) {
            using SHAPE = decltype(shape);
            constexpr bool CLUSTER = decltype(in_cluster)::value;
            const unsigned cluster = cluster_blocks(vectors, SHAPE::REACH);
            if (cluster > most) return false;
            static DeviceSet asked;
            launch_pipeline<SHAPE, 2>(bias_dropout_add_layer_norm_smem_pipeline_kernel<T, SHAPE, CLUSTER>, asked,
                                      p.norm.count, cluster, launch, args, mask);
            return true;
        };
        const std::false_type block;
        const std::true_type cluster;
        const bool ran = run(ShortDropoutAddNormPipeline{}, block, 1) || run(DropoutAddNormPipeline{}, block, 1) ||
                         run(WideDropoutAddNormPipeline{}, block, 1) ||
                         run(DropoutAddNormPipeline{}, cluster, PORTABLE_CLUSTER) ||
                         run(WideDropoutAddNormPipeline{}, cluster, MAX_CLUSTER);
        check_takes(ran, NAME, p.norm.length);
    }
}

}  // namespace

template <NormStep STEP>
std::tuple<Tensor, Tensor, Tensor> bias_dropout_add_layer_norm(
    const Tensor& input, const Tensor& bias, const Tensor& residual, const std::optional<Tensor>& weight,
    const std::optional<Tensor>& norm_bias, int64_t threshold, double scale, int64_t seed, double eps, bool keep) {
    check_cuda(input, NAME, "input");
    KL_CHECK(input.dim() > 0, NAME, ": argument `input` must have at least one dimension");
    check_like(residual, input, NAME, "residual");
    check_same_shape(residual, input, NAME, "residual");
    check_parameter(bias, input, NAME, "bias");
    check_parameter(weight, input, NAME, "weight");
    check_parameter(norm_bias, input, NAME, "norm_bias");
    const DropoutMask mask(threshold, scale, seed, NAME);
    const Launch launch(input);
    const RowLayout layout(input, -1, NAME, /*row_major=*/true);
    // Both contiguous, so that LayerNorm's backward pass numbers the rows in the same order.
    const std::vector<int64_t> sizes(input.sizes().begin(), input.sizes().end());
    Tensor output = empty(input, input.scalar_type(), sizes);
    Tensor sum = empty(input, input.scalar_type(), keep ? sizes : std::vector<int64_t>{0});
    Tensor stats = empty(input, ScalarType::Float, {keep ? layout.count : 0, STATS<true>});
    if (input.numel() == 0) return {output, sum, stats};
    dispatch(input.scalar_type(), NAME, [&](auto zero) {
        using T = decltype(zero);
        DropoutAddNorm<T> p{};
        p.bias = pointer<T>(bias);
        p.norm.output = pointer<T>(output);
        p.norm.sum = keep ? pointer<T>(sum) : nullptr;
        p.norm.out = layout.rows(output, NAME);
        p.norm.stats = keep ? pointer<float>(stats) : nullptr;
        p.norm.input = pointer<T>(input);
        p.norm.in = layout.rows(input, NAME);
        p.norm.residual = pointer<T>(residual);
        p.norm.res = layout.rows(residual, NAME);
        p.norm.weight = optional_pointer<T>(weight);
        p.norm.bias = optional_pointer<T>(norm_bias);
        p.norm.parameter = parameter_rows(weight, norm_bias);
        p.norm.parameter.whole = p.norm.parameter.whole && is_aligned16(p.bias);
        p.norm.count = layout.count;
        p.norm.length = layout.length;
        p.norm.eps = static_cast<float>(eps);
        p.norm.per_element = 1.0f / static_cast<float>(layout.length);
        if constexpr (STEP == NormStep::naive) {
            const auto grid = grid_size(ceil_div(layout.count, NORM_NAIVE_THREADS));
            // A sum that is not saved is stored in the output's place.
            T* const at = keep ? p.norm.sum : p.norm.output;
            NormForward<T> of_sum = p.norm;
            of_sum.input = at;
            of_sum.in = p.norm.out;
            bias_dropout_add_layer_norm_naive_kernel<T>
                <<<grid, NORM_NAIVE_THREADS, 0, launch.stream>>>(p, of_sum, at, mask);
        } else {
            const bool vectorized = p.norm.in.template vectors<T>(layout.length) &&
                                    p.norm.res.template vectors<T>(layout.length) &&
                                    p.norm.out.template vectors<T>(layout.length) && p.norm.parameter.whole;
            if constexpr (STEP == NormStep::registers) launch_dropout_add_norm_registers(p, mask, vectorized, launch);
            if constexpr (STEP == NormStep::smem_pipeline)
                launch_dropout_add_norm_pipeline(p, mask, vectorized, launch);
            if constexpr (STEP == NormStep::cluster) launch_dropout_add_norm_rows<true>(p, mask, vectorized, launch);
        }
    });
    KL_LAUNCH_CHECK();
    return {output, sum, stats};
}

KL_NORM_RUNG(bias_dropout_add_layer_norm, naive)
KL_NORM_RUNG(bias_dropout_add_layer_norm, registers)
KL_NORM_RUNG(bias_dropout_add_layer_norm, smem_pipeline)
KL_NORM_RUNG(bias_dropout_add_layer_norm, cluster)

void bias_dropout_add_layer_norm_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    dispatch(dtype, NAME, [&](auto zero) {
        using T = decltype(zero);
        const std::string forward = std::string(NAME) + ".";
        const auto add = [&](const std::string& name, KernelAttributes fact) {
            fact.name = name;
            attributes.push_back(fact);
        };
        add(forward + "naive", kernel_attributes<bias_dropout_add_layer_norm_naive_kernel<T>>("", NORM_NAIVE_THREADS));
        add(forward + "registers",
            kernel_attributes<bias_dropout_add_layer_norm_registers_kernel<T, true>>(
                "", MIN_BLOCK, stage_bytes(MIN_BLOCK, DROPOUT_ADD_NORM_STAGE_VECTORS<true, false>)));
        add(forward + "registers (short rows)",
            kernel_attributes<bias_dropout_add_layer_norm_registers_short_kernel<T, SHORT_ROWS>>("", MIN_BLOCK));
        if constexpr (sizeof(T) == 2) {
            add(forward + "registers (rows by blocks)",
                kernel_attributes<bias_dropout_add_layer_norm_registers_block_rows_kernel<T>>(
                    "", DropoutAddNormBlockRows::THREADS,
                    stage_bytes(DropoutAddNormBlockRows::THREADS, 2 * DROPOUT_ADD_NORM_ROWS_STAGE_VECTORS)));
            const auto pipeline = [&](const std::string& name, auto shape, auto cluster) {
                using SHAPE = decltype(shape);
                constexpr auto* KERNEL =
                    bias_dropout_add_layer_norm_smem_pipeline_kernel<T, SHAPE, decltype(cluster)::value>;
                add(forward + name, kernel_attributes<KERNEL>("", SHAPE::THREADS,
                                                              stage_bytes(SHAPE::THREADS, SHAPE::stage_vectors(2))));
            };
            pipeline("smem_pipeline (up to 4096)", ShortDropoutAddNormPipeline{}, std::false_type{});
            pipeline("smem_pipeline (up to 8192)", DropoutAddNormPipeline{}, std::false_type{});
            pipeline("smem_pipeline", WideDropoutAddNormPipeline{}, std::false_type{});
            pipeline("smem_pipeline (cluster)", DropoutAddNormPipeline{}, std::true_type{});
            pipeline("smem_pipeline (cluster, longest rows)", WideDropoutAddNormPipeline{}, std::true_type{});
        }
        add(forward + "cluster",
            kernel_attributes<bias_dropout_add_layer_norm_cluster_kernel<T, true>>("", ROW_THREADS));
    });
}

}  // namespace kl
