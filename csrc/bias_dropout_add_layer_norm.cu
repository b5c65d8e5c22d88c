// Bias, dropout, residual sum and LayerNorm: layer_norm(residual + dropout(input + bias)), with the mask of
// kernel_ladder/semantics/philox.py. Formulas and their sources are in dropout.cu and layer_norm.cu, which has the kernels of the
// sum's gradient too; from that, a kernel here makes those of input and bias.
//
//   variant    the one idea it adds                                         what limits it now
//   naive      one thread a row; backward, one thread a column              uncoalesced reads; few rows, few threads
//   registers  the sum is made in registers, a call of Philox for eight     rows that fill an SM's registers
//              elements, and normalised there; backward, the mask is
//              drawn again, and a block adds up its share of columns
//   cluster    long rows spread over the SMs of a cluster                   memory bandwidth; close behind it, integer
//                                                                           arithmetic
//
// Elements are counted in row-major order whatever the strides, so that a view has the mask of its copy.

#include "core/philox.cuh"
#include "norm/launch.cuh"
#include "norm/smem_pipeline.cuh"
#include "sm90/smem_stages.cuh"

namespace kl {
namespace {

// The residual is that of the norm, whose input is the branch that is dropped from; a sum that is not kept is null.
template <typename T>
struct Chain {
    NormForward<T> norm;
    const T* bias;  // of the branch, dense
};

// ---- naive: one thread a row ---------------------------------------------------------------------------------------

// One element of the sum, rounded.
template <typename T>
__device__ T sum_at(const Chain<T>& p, const DropoutMask& mask, int64_t row, int64_t i) {
    const float branch = to_float(p.norm.input[p.norm.in.start(row) + i * p.norm.in.stride]) + to_float(p.bias[i]);
    const float residual = to_float(p.norm.residual[p.norm.res.start(row) + i * p.norm.res.stride]);
    return from_float<T>(residual + branch * mask.of(row * p.norm.length + i));
}

// `of_sum` is the normalisation of the sum, wherever that is.
template <typename T>
__global__ void bias_dropout_add_layer_norm_naive_kernel(__grid_constant__ const Chain<T> p,
                                                         __grid_constant__ const NormForward<T> of_sum, T* sum,
                                                         __grid_constant__ const DropoutMask mask) {
    const int64_t row = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (row >= p.norm.count) return;
    for (int64_t i = 0; i < p.norm.length; ++i) {
        sum[p.norm.out.start(row) + i * p.norm.out.stride] = sum_at(p, mask, row, i);
    }
    norm_naive<T, true, false>(of_sum);
}

// A thread goes down a column of the sum's gradient.
template <typename T>
__global__ void bias_dropout_add_layer_norm_backward_naive_kernel(T* grad_input, __grid_constant__ const Rows gi,
                                                                  T* grad_bias, const T* grad,
                                                                  __grid_constant__ const Rows g,
                                                                  __grid_constant__ const DropoutMask mask,
                                                                  int64_t count, int64_t length) {
    const int64_t column = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (column >= length) return;
    CompensatedSum sum;
    for (int64_t row = 0; row < count; ++row) {
        const float value = to_float(grad[g.start(row) + column * g.stride]) * mask.of(row * length + column);
        grad_input[gi.start(row) + column * gi.stride] = from_float<T>(value);
        sum.add(value);
    }
    grad_bias[column] = from_float<T>(sum.sum);
}

// ---- registers, cluster --------------------------------------------------------------------------------------------

// Not of what is read once(): where drawing is the limit that makes short rows 2 to 5 % slower, and long ones no faster.
template <typename T, int THREADS = 0>
using DrawnSlots = Slots<T, THREADS, false>;

// Slots of a thread's vectors: of input and residual, of their sum, or of nothing.
template <bool WHOLE, bool CLUSTER>
constexpr int CHAIN_SLOTS = !WHOLE    ? ROW_VECTORS
                            : CLUSTER ? 0
                                      : 2 * ROW_VECTORS;

// One row of the sum. Where vectors are whole, a call of Philox draws for eight of their elements. Both operands come by way
// of shared memory: loaded to registers, which are few, ptxas asks for a vector when the one before is done with. That
// suits a cluster, whose blocks wait for each other: some warps then draw while others load. Elsewhere a thread makes its
// elements one by one, in its slots.
template <bool WHOLE, bool CLUSTER, typename T>
__device__ void gather_sum(Vec<T> (&tile)[ROW_VECTORS], const Chain<T>& p, const DropoutMask& mask,
                           const RowShare<CLUSTER>& share, const DrawnSlots<T>& slots, int64_t row, bool live) {
    constexpr int V = ROW_VECTORS, E = Vec<T>::size;
    const int64_t length = p.norm.length;
    if constexpr (WHOLE) {
        const T* const input = p.norm.input + p.norm.in.start(row);
        const T* const residual = p.norm.residual + p.norm.res.start(row);
        [[maybe_unused]] Vec<T> added[V];
        if constexpr (CLUSTER) {
            load_row<WHOLE>(tile, input, p.norm.in, share, live, length, 0.0f);
            load_row<WHOLE>(added, residual, p.norm.res, share, live, length, 0.0f);
        } else {
            slots.template fetch<WHOLE, V>(0, input, p.norm.in, share, live, length);
            slots.template fetch<WHOLE, V>(V, residual, p.norm.res, share, live, length);
            cp_async_commit();
        }
        const int64_t vector0 = (row * length + int64_t{share.first} * E) / E;
        const auto bias_of = [&](int v) {  // past the end of this block's part, zeros
            const int first = share.template has<T>(v, length) ? share.at(v) * E : static_cast<int>(length);
            return load_parameter<WHOLE, CLUSTER>(p.bias, p.norm.parameter, first, length, 0.0f);
        };
        // One ahead where there are registers, since no load is moved over the branch of ties.
        Vec<T> next = bias_of(0);
#pragma unroll
        for (int v = 0; v < V; ++v) {
            if (CLUSTER && v > 0) next = bias_of(v);
            const Vec<T> bias = next;
            if (!CLUSTER && v + 1 < V) next = bias_of(v + 1);
            // Before vectors are taken apart, which takes twice the registers.
            const uint4 words = mask.draw<E>(vector0 + int64_t{v} * share.step());
            float x[E], more[E];
            unpack(bias, more);
            if (!CLUSTER && v == 0) cp_async_wait<0>();
            if constexpr (CLUSTER) unpack(tile[v], x);
            if constexpr (!CLUSTER) slots.read(v, x);
#pragma unroll
            for (int e = 0; e < E; ++e) x[e] += more[e];
            if constexpr (CLUSTER) unpack(added[v], more);
            if constexpr (!CLUSTER) slots.read(V + v, more);
            mask.apply(x, words, more);
            tile[v] = pack<T>(x);
        }
    } else {
#pragma unroll 1
        for (int i = 0; i < V * E; ++i) {
            const int64_t column = int64_t{share.at(i / E)} * E + i % E;
            T* const place = reinterpret_cast<T*>(slots.slot(i / E)) + i % E;
            *place = live && share.template has<T>(i / E, length) && column < length ? sum_at(p, mask, row, column)
                                                                                     : from_float<T>(0.0f);
        }
        slots.take(tile, 0);
    }
    if (p.norm.sum != nullptr) {
        store_row<WHOLE>(p.norm.sum + p.norm.out.start(row), p.norm.out, tile, share, live, length);
    }
}

template <typename T, bool WHOLE, bool CLUSTER>
__global__ void __launch_bounds__(ROW_THREADS, BLOCKS_AN_SM<WHOLE>)
    bias_dropout_add_layer_norm_registers_kernel(__grid_constant__ const Chain<T> p,
                                                 __grid_constant__ const DropoutMask mask) {
    if (!exists_here<CLUSTER>()) return;
    extern __shared__ __align__(SLOT_ALIGNMENT) uint4 in_shared[];
    const DrawnSlots<T> slots(in_shared);
    norm_registers_of<T, true, ROW_VECTORS, WHOLE, CLUSTER, false>(
        p.norm, [&](Vec<T>(&tile)[ROW_VECTORS], const RowShare<CLUSTER>& share, int64_t row, bool live) {
            gather_sum<WHOLE>(tile, p, mask, share, slots, row, live);
        });
}

// ---- registers, short rows: several a warp ---------------------------------------------------------------------------

template <typename T>
struct ShortChain {
    ShortNorm<T> norm;
    const T* bias;
};

// Of so many rows, those whose words are drawn at once.
template <typename T, int ROWS>
constexpr int AT_ONCE = sizeof(T) == 2 && ROWS > 1 ? 2 : 1;

// As above both operands come by way of shared memory. Parameters of the norm come with them where there are registers for
// them, EARLY. THREADS: see Slots.
template <typename T, int ROWS, bool TEAM, int V, bool EARLY, int THREADS>
__device__ void chain_short(const ShortChain<T>& p, const DropoutMask& mask, uint4* input, uint4* residual) {
    begin_early();
    constexpr int E = Vec<T>::size, DRAWS = AT_ONCE<T, ROWS>;
    const ShortShare<ROWS, TEAM> share(p.norm.count, p.norm.length);
    const DrawnSlots<T, THREADS> inputs(input), residuals(residual);
    const auto gather = [&](Vec<T>(&tile)[ROWS][V], auto&& meanwhile) {
        share.template fetch<V>(inputs, p.norm.input, p.norm.in_step);
        share.template fetch<V>(residuals, p.norm.residual, p.norm.res_step);
        cp_async_commit();
        meanwhile();
        T* const sums = p.norm.sum;
        Vec<T> next = share.parameter(p.bias, 0, 0.0f);
#pragma unroll
        for (int v = 0; v < V; ++v) {
            float x[E], more[E], bias[E];
            uint4 drawn[DRAWS];
            unpack(next, bias);
            if (v + 1 < V)
                next = share.parameter(p.bias, v + 1, 0.0f);  // before the stores, over which no load is moved
            if (v == 0) cp_async_wait<0>();
            T* to = share.begin(sums, p.norm.out_step, v);
#pragma unroll
            for (int r = 0; r < ROWS; ++r, to += share.next(p.norm.out_step)) {
                if (r % DRAWS == 0) {
                    mask.template draw<E>(drawn, [&](int i) -> uint64_t {
                        return ((share.row + (r + i) * share.apart) * share.length + share.at(v) * E) / E;
                    });
                }
                inputs.read(r * V + v, x);
                residuals.read(r * V + v, more);
#pragma unroll
                for (int e = 0; e < E; ++e) x[e] += bias[e];
                mask.apply(x, drawn[r % DRAWS], more);
                tile[r][v] = pack<T>(x);
                if (sums != nullptr) share.store(to, r, v, tile[r][v]);
            }
        }
    };
    norm_short_of<T, true, ROWS, TEAM, V, EARLY>(p.norm, share, gather);
}

template <typename T, int ROWS>
__global__ void __launch_bounds__(MIN_BLOCK, sizeof(T) == 4 ? 8 : 11)
    bias_dropout_add_layer_norm_registers_short_kernel(__grid_constant__ const ShortChain<T> p,
                                                       __grid_constant__ const DropoutMask mask) {
    constexpr int V = SHORT_VECTORS<T, ROWS>;
    __shared__ uint4 input[ROWS * V * MIN_BLOCK], residual[ROWS * V * MIN_BLOCK];
    chain_short<T, ROWS, false, V, ROWS == SHORT_ROWS, MIN_BLOCK>(p, mask, input, residual);
}

using ChainTeam = Team<2, 2, 512, 4096>;
constexpr int CHAIN_TEAM_SLOTS = ChainTeam::ROWS * ChainTeam::VECTORS;  // of a thread, for each operand

template <typename T>
__global__ void __launch_bounds__(ChainTeam::THREADS, 3)
    bias_dropout_add_layer_norm_registers_team_kernel(__grid_constant__ const ShortChain<T> p,
                                                      __grid_constant__ const DropoutMask mask) {
    extern __shared__ __align__(SLOT_ALIGNMENT) uint4 in_shared[];
    chain_short<T, ChainTeam::ROWS, true, ChainTeam::VECTORS, true, 0>(p, mask, in_shared,
                                                                       in_shared + CHAIN_TEAM_SLOTS * blockDim.x);
}

// ---- registers, cluster: rows that wait in shared memory --------------------------------------------------------------

// Rows of at most 4096, 8192 and 16384 elements by a block; longer ones by clusters of the second while those are of portable
// size, then of the third. Two rows share what they have in common: three parameters, from the L2.
using ShortChainSlots = SlotShape<2, 2, 256, 5>;
using ChainSlots = SlotShape<2, 4, 256, 4, 2>;
using WideChainSlots = SlotShape<2, 4, 512, 2, 2>;

template <typename T, typename SHAPE, bool CLUSTER>
__global__ void __launch_bounds__(SHAPE::THREADS, SHAPE::BLOCKS)
    bias_dropout_add_layer_norm_registers_slots_kernel(__grid_constant__ const ShortChain<T> p,
                                                       __grid_constant__ const DropoutMask mask) {
    if (!exists_here<CLUSTER>()) return;
    constexpr int E = Vec<T>::size;
    // There are registers for the next vector of the bias too; or for the words of all rows, which are drawn at once.
    constexpr bool AHEAD = SHAPE::VECTORS <= 2;
    constexpr int DRAWS = AHEAD ? 1 : SHAPE::ROWS;
    const SlotShare<SHAPE, CLUSTER> share(p.norm.length / E);
    uint4 bias, next, drawn[DRAWS];
    const auto fetch_bias = [&](uint4& to, int v) {
        to = filled<T>(0.0f);
        load_if<CLUSTER>(to, p.bias + share.at(v) * E, share.has(v));
    };
    norm_slots_of<true, SHAPE, CLUSTER, 2, false>(p.norm, share, [&](int r, int v, const auto& words, bool live) {
        if (r == 0) {  // it comes while words are drawn
            if (AHEAD && v > 0) bias = next;
            if (!AHEAD || v == 0) fetch_bias(bias, v);
            if (AHEAD && v + 1 < SHAPE::VECTORS) fetch_bias(next, v + 1);
        }
        if (r % DRAWS == 0) {
            mask.template draw<E>(
                drawn, [&](int i) -> uint64_t { return (share.row() + r + i) * share.vectors + share.at(v); });
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
            store_if(p.norm.sum + (share.row() + r) * p.norm.out_step + int64_t{share.at(v)} * E, sum, live);
        }
        return sum;
    });
}

constexpr int DROP_THREADS = 256;
constexpr int ROWS_IN_FLIGHT = 4;
constexpr int DROP_BLOCKS_PER_SM = 4;

// Dropout of the sum's gradient. A block takes blockDim.x vectors of columns, or as many columns where vectors are not
// whole, down its share of the rows, and adds them up: partials are (shares, length).
template <typename T, bool WHOLE>
__global__ void __launch_bounds__(DROP_THREADS, DROP_BLOCKS_PER_SM)
    bias_dropout_add_layer_norm_backward_registers_kernel(T* grad_input, __grid_constant__ const Rows gi,
                                                          float* partials, const T* grad,
                                                          __grid_constant__ const Rows g,
                                                          __grid_constant__ const DropoutMask mask, int64_t count,
                                                          int64_t length, int64_t rows_a_share) {
    begin_early();
    constexpr int E = WHOLE ? Vec<T>::size : 1, DRAWS = AT_ONCE<T, ROWS_IN_FLIGHT>;
    __shared__ float sums[DROP_THREADS * E];
    const int64_t column = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * E, share = blockIdx.y;
    const int64_t end = min(count, (share + 1) * rows_a_share);
    float sum[E] = {};
    for (int64_t first = share * rows_a_share + threadIdx.y; first < end && column < length;
         first += blockDim.y * ROWS_IN_FLIGHT) {
        float x[ROWS_IN_FLIGHT][E];
        uint4 words[ROWS_IN_FLIGHT], drawn[DRAWS];
        if constexpr (WHOLE) {
#pragma unroll
            for (int r = 0; r < ROWS_IN_FLIGHT; ++r) {
                const int64_t row = first + r * blockDim.y;
                if (row < end) words[r] = *reinterpret_cast<const uint4*>(grad + g.start(row) + column);
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS_IN_FLIGHT; ++r) {
            const int64_t row = first + r * blockDim.y;
            if (row >= end) break;
            const uint64_t index = row * length + column;
            if constexpr (WHOLE) {
                if (r % DRAWS == 0) {
                    mask.template draw<E>(drawn,
                                          [&](int i) -> uint64_t { return (index + i * blockDim.y * length) / E; });
                }
                unpack(reinterpret_cast<const Vec<T>&>(words[r]), x[r]);
                mask.apply(x[r], drawn[r % DRAWS]);
                store_vec(grad_input + gi.start(row) + column, pack<T>(x[r]));
            } else {
                x[r][0] = to_float(grad[g.start(row) + column * g.stride]) * mask.of(index);
                grad_input[gi.start(row) + column * gi.stride] = from_float<T>(x[r][0]);
            }
#pragma unroll
            for (int e = 0; e < E; ++e) sum[e] += x[r][e];
        }
    }
    store_share(partials + share * length, sum, sums, length);
}

template <typename T>
__global__ void __launch_bounds__(SUM_THREADS)
    bias_dropout_add_layer_norm_backward_registers_sum_kernel(T* output, const float* partials, int64_t shares,
                                                              int64_t columns) {
    begin_early();
    sum_shares(output, partials, shares, columns);
}

// ---- host ----------------------------------------------------------------------------------------------------------

constexpr const char* NAME = "bias_dropout_add_layer_norm";
constexpr const char* BACKWARD_NAME = "bias_dropout_add_layer_norm_backward";

template <typename T, bool WHOLE, bool CLUSTER>
void launch_registers(const Chain<T>& p, const DropoutMask& mask, const RowLaunch& shape, const Launch& launch) {
    constexpr auto kernel = bias_dropout_add_layer_norm_registers_kernel<T, WHOLE, CLUSTER>;
    static DeviceSet asked;
    constexpr int SLOTS = CHAIN_SLOTS<WHOLE, CLUSTER>;
    allow_shared_up_to(kernel, slot_bytes(ROW_THREADS, SLOTS), launch.device, asked);
    const int bytes = slot_bytes(shape.threads * shape.rows, SLOTS);
    launch_rows(kernel, shape, shape.grid(p.norm.count), bytes, launch, p, mask);
}

template <typename SHAPE, bool CLUSTER, typename T>
void launch_chain_slots(const ShortChain<T>& args, const DropoutMask& mask, unsigned cluster, const Launch& launch) {
    static DeviceSet asked;
    launch_slots<SHAPE, 2>(bias_dropout_add_layer_norm_registers_slots_kernel<T, SHAPE, CLUSTER>, asked,
                           args.norm.count, cluster, launch, args, mask);
}

constexpr int ANY_GPU = 64 * 1024;  // of shared memory: less than the 99 KiB that a block may have of any

// Of rows that lie evenly. Returns whether it has been launched.
template <typename T>
bool launch_even(const Chain<T>& p, const DropoutMask& mask, bool clusters, const Launch& launch) {
    const ShortChain<T> args{short_norm(p.norm), p.bias};
    if constexpr (sizeof(T) == 2) {
        const int64_t vectors = p.norm.length / Vec<T>::size;
        const auto in_block = [&](auto shape) {
            using SHAPE = decltype(shape);
            constexpr int shared =
                slot_bytes(SHAPE::THREADS, SHAPE::slots(2)) + static_cast<int>(sizeof(SlotMail<true, SHAPE, false>));
            if (vectors > SHAPE::REACH || (shared > ANY_GPU && shared > shared_limit(launch.device))) return false;
            launch_chain_slots<SHAPE, false>(args, mask, 1, launch);
            return true;
        };
        const auto in_cluster = [&](auto shape, unsigned most) {
            using SHAPE = decltype(shape);
            constexpr int shared =
                slot_bytes(SHAPE::THREADS, SHAPE::slots(2)) + static_cast<int>(sizeof(SlotMail<true, SHAPE, true>));
            const unsigned cluster = cluster_blocks(vectors, SHAPE::REACH);
            if (!clusters || cluster > most || (shared > ANY_GPU && shared > shared_limit(launch.device))) return false;
            launch_chain_slots<SHAPE, true>(args, mask, cluster, launch);
            return true;
        };
        if (vectors > ShortChainSlots::REACH / 2) {
            if (in_block(ShortChainSlots{}) || in_block(ChainSlots{}) || in_block(WideChainSlots{})) return true;
            if (in_cluster(ChainSlots{}, PORTABLE_CLUSTER) || in_cluster(WideChainSlots{}, MAX_CLUSTER)) return true;
        }
    }
    return with_even_rows<T>(
        std::tuple<ChainTeam>{}, p.norm.count, p.norm.length,
        [&](auto, unsigned grid, dim3 block) {
            LaunchConfig(dim3(grid), block, slot_bytes(block.x, 2 * CHAIN_TEAM_SLOTS), launch)
                .early(has_hopper_code(bias_dropout_add_layer_norm_registers_team_kernel<T>, launch.device))
                .run(bias_dropout_add_layer_norm_registers_team_kernel<T>, args, mask);
        },
        [&](auto rows, unsigned grid, dim3 block) {
            launch_early(bias_dropout_add_layer_norm_registers_short_kernel<T, rows()>, grid, block, launch, args,
                         mask);
        });
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
    // Contiguous both, so that LayerNorm's backward pass numbers the rows as they are numbered here.
    const std::vector<int64_t> sizes(input.sizes().begin(), input.sizes().end());
    Tensor output = empty(input, input.scalar_type(), sizes);
    Tensor sum = empty(input, input.scalar_type(), keep ? sizes : std::vector<int64_t>{0});
    Tensor stats = empty(input, ScalarType::Float, {keep ? layout.count : 0, STATS<true>});
    if (input.numel() == 0) return {output, sum, stats};
    dispatch(input.scalar_type(), NAME, [&](auto zero) {
        using T = decltype(zero);
        Chain<T> p{};
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
            // A sum that is not kept waits where the output will be.
            T* const at = keep ? p.norm.sum : p.norm.output;
            NormForward<T> of_sum = p.norm;
            of_sum.input = at;
            of_sum.in = p.norm.out;
            bias_dropout_add_layer_norm_naive_kernel<T>
                <<<grid, NORM_NAIVE_THREADS, 0, launch.stream>>>(p, of_sum, at, mask);
        } else {
            const bool whole = p.norm.in.template vectors<T>(layout.length) &&
                               p.norm.res.template vectors<T>(layout.length) &&
                               p.norm.out.template vectors<T>(layout.length) && p.norm.parameter.whole;
            if (are_even(whole, p.norm.in, p.norm.res, p.norm.out) &&
                launch_even(p, mask, STEP == NormStep::cluster, launch)) {
                return;
            }
            const RowLaunch shape = row_launch(layout.chunks<T>(), STEP == NormStep::cluster);
            with_constant(whole, [&](auto w) {
                with_constant(shape.cluster > 1, [&](auto c) {
                    launch_registers<T, decltype(w)::value, decltype(c)::value>(p, mask, shape, launch);
                });
            });
        }
    });
    KL_LAUNCH_CHECK();
    return {output, sum, stats};
}

// Gradients of input and bias from the sum's.
template <NormStep STEP>
std::tuple<Tensor, Tensor> bias_dropout_add_layer_norm_backward(const Tensor& grad, int64_t threshold, double scale,
                                                                int64_t seed) {
    check_cuda(grad, BACKWARD_NAME, "grad");
    KL_CHECK(grad.dim() > 0, BACKWARD_NAME, ": argument `grad` must have at least one dimension");
    const DropoutMask mask(threshold, scale, seed, BACKWARD_NAME);
    const Launch launch(grad);
    const RowLayout layout(grad, -1, BACKWARD_NAME, /*row_major=*/true);
    Tensor grad_input = layout.dense.allocate(grad);
    Tensor grad_bias = empty(grad, grad.scalar_type(), {layout.length});
    if (layout.length == 0) return {grad_input, grad_bias};
    const Rows g = layout.rows(grad, BACKWARD_NAME), gi = layout.rows(grad_input, BACKWARD_NAME);
    const int64_t count = layout.count, length = layout.length;
    dispatch(grad.scalar_type(), BACKWARD_NAME, [&](auto zero) {
        using T = decltype(zero);
        auto *const to = pointer<T>(grad_input), *const bias = pointer<T>(grad_bias), *const from = pointer<T>(grad);
        if constexpr (STEP == NormStep::naive) {
            const auto grid = grid_size(ceil_div(length, NORM_NAIVE_THREADS));
            bias_dropout_add_layer_norm_backward_naive_kernel<T>
                <<<grid, NORM_NAIVE_THREADS, 0, launch.stream>>>(to, gi, bias, from, g, mask, count, length);
        } else {
            const auto sum_up = [&](const float* partials, int64_t shares) {
                launch_early(bias_dropout_add_layer_norm_backward_registers_sum_kernel<T>, blocks_of_columns(length),
                             sum_block(length), launch, bias, partials, shares, length);
            };
            if (count == 0) return sum_up(nullptr, 0);  // a sum of nothing: zero
            const bool whole = g.template vectors<T>(length) && gi.template vectors<T>(length);
            const int64_t chunks = whole ? layout.chunks<T>() : length;
            const dim3 block = column_block(chunks, DROP_THREADS);
            const int64_t column_blocks = ceil_div(chunks, block.x);
            const int64_t most =
                row_shares(count, column_blocks, DROP_BLOCKS_PER_SM, block.y * ROWS_IN_FLIGHT, launch.device);
            const int64_t rows_a_share = ceil_div(count, most), shares = ceil_div(count, rows_a_share);
            const Tensor partials = empty(grad, ScalarType::Float, {shares, length});
            const dim3 grid(grid_size(column_blocks), grid_size(shares));
            const auto kernel = whole ? bias_dropout_add_layer_norm_backward_registers_kernel<T, true>
                                      : bias_dropout_add_layer_norm_backward_registers_kernel<T, false>;
            launch_early(kernel, grid, block, launch, to, gi, pointer<float>(partials), from, g, mask, count, length,
                         rows_a_share);
            sum_up(pointer<float>(partials), shares);
        }
    });
    KL_LAUNCH_CHECK();
    return {grad_input, grad_bias};
}

#define KL_INSTANTIATE(step)                                                                                         \
    template std::tuple<Tensor, Tensor, Tensor> bias_dropout_add_layer_norm<NormStep::step>(                         \
        const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, const std::optional<Tensor>&,     \
        int64_t, double, int64_t, double, bool);                                                                     \
    template std::tuple<Tensor, Tensor> bias_dropout_add_layer_norm_backward<NormStep::step>(const Tensor&, int64_t, \
                                                                                             double, int64_t);

KL_INSTANTIATE(naive)
KL_INSTANTIATE(registers)
KL_INSTANTIATE(cluster)

void bias_dropout_add_layer_norm_kernel_facts(std::vector<KernelFacts>& facts, ScalarType dtype) {
    dispatch(dtype, NAME, [&](auto zero) {
        using T = decltype(zero);
        const std::string forward = std::string(NAME) + ".", backward = std::string(BACKWARD_NAME) + ".";
        const auto add = [&](const std::string& name, KernelFacts fact) {
            fact.name = name;
            facts.push_back(fact);
        };
        add(forward + "naive", kernel_facts<bias_dropout_add_layer_norm_naive_kernel<T>>("", NORM_NAIVE_THREADS));
        add(forward + "registers", kernel_facts<bias_dropout_add_layer_norm_registers_kernel<T, true, false>>(
                                       "", MIN_BLOCK, slot_bytes(MIN_BLOCK, CHAIN_SLOTS<true, false>)));
        add(forward + "registers (short rows)",
            kernel_facts<bias_dropout_add_layer_norm_registers_short_kernel<T, SHORT_ROWS>>("", MIN_BLOCK));
        if constexpr (sizeof(T) == 2) {
            add(forward + "registers (team)",
                kernel_facts<bias_dropout_add_layer_norm_registers_team_kernel<T>>(
                    "", ChainTeam::THREADS, slot_bytes(ChainTeam::THREADS, 2 * CHAIN_TEAM_SLOTS)));
            const auto slots = [&](const std::string& name, auto shape, auto cluster) {
                using SHAPE = decltype(shape);
                constexpr auto* KERNEL =
                    bias_dropout_add_layer_norm_registers_slots_kernel<T, SHAPE, decltype(cluster)::value>;
                add(forward + name,
                    kernel_facts<KERNEL>("", SHAPE::THREADS, slot_bytes(SHAPE::THREADS, SHAPE::slots(2))));
            };
            slots("registers (slots, up to 4096)", ShortChainSlots{}, std::false_type{});
            slots("registers (slots, up to 8192)", ChainSlots{}, std::false_type{});
            slots("registers (slots)", WideChainSlots{}, std::false_type{});
            slots("cluster (slots)", ChainSlots{}, std::true_type{});
            slots("cluster (slots, longest rows)", WideChainSlots{}, std::true_type{});
        }
        add(forward + "cluster",
            kernel_facts<bias_dropout_add_layer_norm_registers_kernel<T, true, true>>("", ROW_THREADS));
        add(backward + "naive",
            kernel_facts<bias_dropout_add_layer_norm_backward_naive_kernel<T>>("", NORM_NAIVE_THREADS));
        add(backward + "registers",
            kernel_facts<bias_dropout_add_layer_norm_backward_registers_kernel<T, true>>("", DROP_THREADS));
        add(backward + "registers (sum)",
            kernel_facts<bias_dropout_add_layer_norm_backward_registers_sum_kernel<T>>("", SUM_THREADS));
    });
}

}  // namespace kl
