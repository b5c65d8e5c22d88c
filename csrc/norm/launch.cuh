// How the normalisations are launched: checks, allocation, and the choice of a kernel for a row's length and layout.
// `Op` names an operation's kernels, step by step.
#pragma once

#include <optional>
#include <tuple>

#include "core/ops.h"
#include "norm/backward.cuh"
#include "norm/backward_persistent.cuh"
#include "norm/backward_short.cuh"
#include "norm/persistent_cluster.cuh"
#include "norm/registers.cuh"
#include "norm/short_rows.cuh"
#include "norm/smem_pipeline.cuh"

namespace kl {

template <typename T>
const T* optional_pointer(const std::optional<Tensor>& tensor) {
    return tensor.has_value() ? pointer<T>(*tensor) : nullptr;
}

inline void check_parameter(const std::optional<Tensor>& parameter, const Tensor& input, const char* op,
                            const char* name) {
    if (!parameter.has_value()) return;
    check_like(*parameter, input, op, name);
    KL_CHECK(parameter->dim() == 1 && parameter->size(0) == input.size(-1) && parameter->is_contiguous(), op,
             ": argument `", name, "` must be dense and as long as a row");
}

// The row of the parameters that are there.
inline Rows parameter_rows(const std::optional<Tensor>& weight, const std::optional<Tensor>& bias) {
    const bool whole = (!weight.has_value() || is_aligned16(weight->data_ptr())) &&
                       (!bias.has_value() || is_aligned16(bias->data_ptr()));
    return Rows{Strided{}, 1, whole};
}

constexpr int NORM_NAIVE_THREADS = 128;

// Vectors of a thread that shares a long row. With a residual it holds two rows' vectors, if only for a while.
template <typename Op>
constexpr int WIDE = Op::RESIDUAL ? ROW_VECTORS : WIDE_VECTORS;

// Vectors of a row up to which the threads are twice as many instead: what a thread does once a row weighs less where rows
// are not centred.
template <typename Op>
constexpr int64_t NARROW = Op::CENTRED ? 512 : 256;

// Of rows too long for teams, which wait in shared memory: those of one block, and with a residual those of `clusters`.
// Without one, clusters are faster with rows in registers, which leaves the L1 to their parameters. Returns whether it has
// been launched.
template <typename Op, typename T>
bool norm_forward_slots(const NormForward<T>& p, bool clusters, const Launch& launch) {
    using SHAPE = typename Op::Slots;
    const int64_t vectors = p.length / Vec<T>::size;
    const unsigned cluster = cluster_blocks(vectors, SHAPE::REACH), most = Op::RESIDUAL && clusters ? MAX_CLUSTER : 1;
    if (sizeof(T) != 2 || vectors <= SHAPE::REACH / 2 || cluster > most) return false;
    if constexpr (sizeof(T) == 2) {
        const auto launch_as = [&](auto in_cluster) {
            static DeviceSet asked;
            launch_slots<SHAPE, Op::RESIDUAL ? 2 : 1>(Op::template slots<T, in_cluster()>(), asked, p.count, cluster,
                                                      launch, short_norm(p));
        };
        if (cluster == 1) launch_as(std::false_type{});
        if constexpr (Op::RESIDUAL) {
            if (cluster > 1) launch_as(std::true_type{});
        }
    }
    return true;
}

// Of centred rows that are the longest for a cluster. Returns whether it has been launched.
template <typename Op, typename T>
bool norm_forward_staying(const NormForward<T>& p, const Launch& launch) {
    if constexpr (sizeof(T) == 2 && Op::CENTRED && !Op::RESIDUAL) {
        const auto run = [&](auto shape) {
            using STAY = decltype(shape);
            constexpr auto kernel = Op::template staying<T, STAY>();
            constexpr int shared = STAY::BYTES + static_cast<int>(sizeof(StayingMail<STAY>));
            if (!STAY::takes(p.length / Vec<T>::size) || !has_hopper_code(kernel, launch.device) ||
                shared > shared_limit(launch.device)) {
                return false;
            }
            static DeviceSet asked;
            static Resident resident;
            allow_shared(kernel, STAY::BYTES, launch.device, asked);
            const int64_t most = resident.clusters(kernel, dim3(STAY::THREADS), STAY::BLOCKS, STAY::BYTES, launch);
            LaunchConfig(dim3(std::min(p.count, most) * STAY::BLOCKS), dim3(STAY::THREADS), STAY::BYTES, launch)
                .clusters_of(STAY::BLOCKS)
                .run(kernel, short_norm(p));
            return true;
        };
        return std::apply([&](auto... shape) { return (run(shape) || ...); }, typename Op::StayingForward{});
    }
    return false;
}

// Of rows that lie evenly. Returns whether it has been launched.
template <typename Op, typename T>
bool norm_forward_even(const NormForward<T>& p, bool clusters, const Launch& launch) {
    const ShortNorm<T> args = short_norm(p);
    const auto by_team = [&](auto team, unsigned grid, dim3 block) {
        launch_early(Op::template team<T, decltype(team)>(), grid, block, launch, args);
    };
    if (with_team<T>(typename Op::FullTeams{}, p.count, p.length, by_team)) return true;
    if (clusters && norm_forward_staying<Op>(p, launch)) return true;
    if (norm_forward_slots<Op>(p, clusters, launch)) return true;
    return with_even_rows<T>(typename Op::Teams{}, p.count, p.length, by_team,
                             [&](auto rows, unsigned grid, dim3 block) {
                                 launch_early(Op::template short_rows<T, rows()>(), grid, block, launch, args);
                             });
}

// Output, sum of input and residual (the output again where there is none), and what the backward pass needs of rows, if
// that is to be kept.
template <typename Op>
std::tuple<Tensor, Tensor, Tensor> norm_forward(const Tensor& input, const std::optional<Tensor>& residual,
                                                const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                                                double eps, bool keep, NormStep step) {
    constexpr bool CENTRED = Op::CENTRED;
    check_cuda(input, Op::NAME, "input");
    KL_CHECK(input.dim() > 0, Op::NAME, ": argument `input` must have at least one dimension");
    if (residual.has_value()) check_like(*residual, input, Op::NAME, "residual");
    if (residual.has_value()) check_same_shape(*residual, input, Op::NAME, "residual");
    check_parameter(weight, input, Op::NAME, "weight");
    check_parameter(bias, input, Op::NAME, "bias");
    const Launch launch(input);
    const RowLayout layout(input, -1, Op::NAME);
    Tensor output = layout.dense.allocate(input);
    Tensor sum = residual.has_value() ? layout.dense.allocate(input) : output;
    Tensor stats = empty(input, ScalarType::Float, {keep ? layout.count : 0, STATS<CENTRED>});
    if (input.numel() == 0) return {output, sum, stats};
    dispatch(input.scalar_type(), Op::NAME, [&](auto zero) {
        using T = decltype(zero);
        NormForward<T> p{};
        p.output = pointer<T>(output);
        p.sum = pointer<T>(sum);
        p.out = layout.rows(output, Op::NAME);
        p.stats = keep ? pointer<float>(stats) : nullptr;
        p.input = pointer<T>(input);
        p.in = layout.rows(input, Op::NAME);
        p.residual = optional_pointer<T>(residual);
        p.res = residual.has_value() ? layout.rows(*residual, Op::NAME) : p.in;
        p.weight = optional_pointer<T>(weight);
        p.bias = optional_pointer<T>(bias);
        p.parameter = parameter_rows(weight, bias);
        p.count = layout.count;
        p.length = layout.length;
        p.eps = static_cast<float>(eps);
        p.per_element = 1.0f / static_cast<float>(p.length);
        if (step == NormStep::naive) {
            const auto grid = grid_size(ceil_div(p.count, NORM_NAIVE_THREADS));
            Op::template naive<T>()<<<grid, NORM_NAIVE_THREADS, 0, launch.stream>>>(p);
        } else if (step == NormStep::block) {
            Op::template block<T>()<<<grid_size(p.count), NORM_THREADS, 0, launch.stream>>>(p);
        } else {
            const bool whole = p.in.template vectors<T>(p.length) && p.res.template vectors<T>(p.length) &&
                               p.out.template vectors<T>(p.length) && p.parameter.whole;
            if (are_even(whole, p.in, p.res, p.out) && norm_forward_even<Op>(p, step == NormStep::cluster, launch)) {
                return;
            }
            const RowLaunch shape =
                row_launch(layout.chunks<T>(), step == NormStep::cluster, whole ? WIDE<Op> : ROW_VECTORS, NARROW<Op>);
            with_row_shape<ROW_VECTORS, WIDE<Op>>(shape, whole, [&](auto v, auto w, auto c) {
                launch_rows(Op::template registers<T, v(), w(), c()>(), shape, shape.grid(p.count), 0, launch, p);
            });
        }
    });
    KL_LAUNCH_CHECK();
    return {output, sum, stats};
}

struct NormNeeds {
    bool input, weight, bias;
};

// Stage two, of what stage one left of `groups` groups of rows.
template <auto* KERNEL, typename T>
void sum_partials(const NormWeights<T>& w, int64_t length, const Launch& launch) {
    const dim3 grid(blocks_of_columns(length), w.grad_bias == nullptr ? 1 : 2);
    launch_early(KERNEL, grid, sum_block(length), launch, w, length);
}

template <typename Op, typename T>
void norm_backward_block(NormWeights<T> w, const NormBackward<T>& p, bool weights, int64_t chunks, const Tensor& like,
                         const Launch& launch) {
    if (p.grad_input != nullptr) {
        Op::template backward_block<T>()<<<grid_size(p.count), NORM_THREADS, 0, launch.stream>>>(p);
    }
    if (!weights) return;
    const int64_t columns = ceil_div(chunks, WARP), wanted = 4 * multiprocessors(launch.device) / columns;
    w.groups = static_cast<int>(std::clamp<int64_t>(wanted, 1, ceil_div(p.count, COLUMN_LANES)));
    const Tensor partials = empty(like, ScalarType::Float, {Op::CENTRED ? 2 : 1, w.groups, p.length});
    w.partials = pointer<float>(partials);
    const dim3 grid(grid_size(columns), static_cast<unsigned>(w.groups));
    Op::template backward_block_weights<T>()<<<grid, dim3(WARP, COLUMN_LANES), 0, launch.stream>>>(w, p);
    sum_partials<Op::template backward_block_sum<T>()>(w, p.length, launch);
}

// Threads of a block of several rows. A block that fills an SM leaves the fewest partials. Of 16 bits two such blocks are
// faster: while one ends a turn, the other has loads under way.
template <typename T>
constexpr int BACKWARD_BLOCK = sizeof(T) == 2 ? ROW_THREADS / 2 : ROW_THREADS;

// A thread that adds another operand to the result holds nothing of a row, nor does one that shares a long one.
template <typename Op, typename T>
RowLaunch backward_shape(int64_t chunks, bool whole, bool clusters) {
    RowLaunch shape = row_launch(chunks, clusters);
    if (whole && !Op::RESIDUAL && chunks <= ROW_THREADS * HELD_VECTORS) {
        shape = RowLaunch{row_threads(chunks, HELD_VECTORS, ROW_THREADS), 1, 1, HELD_VECTORS};
    }
    // A vector less a thread, if that is enough: it would be worked on where there is none.
    if (whole && shape.vectors == ROW_VECTORS && shape.threads == ROW_THREADS &&
        chunks <= ROW_THREADS * (ROW_VECTORS - 1)) {
        --shape.vectors;
    }
    shape.rows = std::max<unsigned>(1, BACKWARD_BLOCK<T> / shape.threads);
    return shape;
}

// Shares the rows out to blocks or clusters, `rows` to each at a time, of which the GPU holds `most` at once. Returns the
// memory of their partial sums, if those are wanted.
template <bool CENTRED, typename T>
std::optional<Tensor> share_out(NormWeights<T>& w, NormBackward<T>& p, int64_t rows, int64_t most, bool weights,
                                const Tensor& like) {
    w.groups = static_cast<int>(std::min(ceil_div(p.count, rows), most));
    p.apart = w.groups * rows;
    const auto even = [&](const Rows& operand) { return EvenRows{operand.step(), operand.step() * p.apart}; };
    p.even_gi = even(p.gi);
    p.even_g = even(p.g);
    p.even_gs = even(p.gs);
    p.even_in = even(p.in);
    p.turns = static_cast<int>(p.count / p.apart);
    p.rest = p.count % p.apart;
    if (!weights) return std::nullopt;
    Tensor partials = empty(like, ScalarType::Float, {CENTRED ? 2 : 1, w.groups, p.length});
    w.partials = pointer<float>(partials);
    return partials;
}

// Of rows that lie evenly, of a length that keeps more than three quarters of a crew's threads busy. Returns whether it has been
// launched.
template <typename Op, typename T>
bool norm_backward_short(NormWeights<T> w, NormBackward<T> p, bool weights, bool whole, const Tensor& like,
                         const Launch& launch) {
    if constexpr (sizeof(T) == 2 && !Op::RESIDUAL) {
        const int64_t vectors = p.length / Vec<T>::size;
        const auto run = [&](auto crew) {
            using CREW = decltype(crew);
            if (!whole || vectors > CREW::REACH || vectors <= CREW::REACH / 4 * 3) return false;
            constexpr auto kernel = Op::template backward_short<T, CREW>();
            static Resident resident;
            const int64_t most = resident.clusters(kernel, dim3(CREW::THREADS), 1, 0, launch);
            const auto partials = share_out<Op::CENTRED>(w, p, CREW::CREWS, most, weights, like);
            launch_early(kernel, dim3(w.groups), dim3(CREW::THREADS), launch, w, p);
            if (weights) sum_partials<Op::template backward_registers_sum<T>()>(w, p.length, launch);
            return true;
        };
        return std::apply([&](auto... crew) { return (run(crew) || ...); }, typename Op::Crews{});
    }
    return false;
}

// Of rows that keep nearly all threads of such clusters busy; shorter ones are faster by a block, fewer vectors a thread.
// Returns whether it has been launched.
template <typename Op, typename T>
bool norm_backward_staying(NormWeights<T> w, NormBackward<T> p, bool weights, bool whole, const Tensor& like,
                           const Launch& launch) {
    if constexpr (sizeof(T) == 2 && !Op::RESIDUAL) {
        using STAY = typename Op::Staying;
        const int64_t vectors = p.length / Vec<T>::size;
        constexpr auto kernel = Op::template backward_staying<T>();
        constexpr int bytes = slot_bytes(STAY::THREADS, STAY::SLOTS);
        constexpr int shared = bytes + static_cast<int>(sizeof(StayMail<Pair, STAY>));
        if (!whole || vectors > MAX_BLOCK_CHUNKS || vectors <= MAX_BLOCK_CHUNKS / 4 * 3 ||
            !has_hopper_code(kernel, launch.device) || shared > shared_limit(launch.device)) {
            return false;
        }
        static DeviceSet asked;
        static Resident resident;
        allow_shared(kernel, bytes, launch.device, asked);
        const unsigned cluster = cluster_blocks(vectors, STAY::THREADS);
        const int64_t fit = resident.clusters(kernel, dim3(STAY::THREADS), cluster, bytes, launch);
        const auto partials = share_out<Op::CENTRED>(w, p, STAY::ROWS, fit, weights, like);
        LaunchConfig(dim3(w.groups * cluster), dim3(STAY::THREADS), bytes, launch)
            .clusters_of(cluster)
            .run(kernel, w, p);
        if (weights) sum_partials<Op::template backward_registers_sum<T>()>(w, p.length, launch);
        return true;
    }
    return false;
}

// Shared memory that holds this many slots of each thread. A block has fewer rows where the GPU has less.
inline int rows_that_fit(RowLaunch& shape, int slots, int32_t device) {
    constexpr int FOR_REDUCTIONS = 1024;
    const auto bytes = [&] { return slot_bytes(shape.threads * shape.rows, slots); };
    if (bytes() <= slot_bytes(ROW_THREADS / 2, backward_slots(HELD_VECTORS, false))) return bytes();  // fits any GPU
    const int limit = shared_limit(device) - FOR_REDUCTIONS;
    while (bytes() > limit && shape.rows > 1) shape.rows /= 2;
    KL_CHECK(bytes() <= limit, "the backward pass of a row this long needs ", bytes(),
             " bytes of shared memory a block; this GPU has ", limit);
    return bytes();
}

template <typename Op, typename T>
void norm_backward_registers(NormWeights<T> w, NormBackward<T> p, bool weights, bool whole, RowLaunch shape,
                             const Tensor& like, const Launch& launch) {
    if (norm_backward_short<Op>(w, p, weights, whole, like, launch)) return;
    if (norm_backward_staying<Op>(w, p, weights, whole, like, launch)) return;
    constexpr int FEW = Op::RESIDUAL ? ROW_VECTORS - 1 : HELD_VECTORS;
    with_row_shape<FEW, ROW_VECTORS - 1, ROW_VECTORS>(shape, whole, [&](auto v, auto a, auto b) {
        constexpr auto kernel = Op::template backward_registers<T, v(), a(), b()>();
        static DeviceSet asked;
        static Resident resident;
        const int slots = backward_slots(v(), is_roomy(code_version(kernel, launch.device)));
        allow_shared_up_to(kernel, slot_bytes(ROW_THREADS, slots), launch.device, asked);
        const int bytes = rows_that_fit(shape, slots, launch.device);
        const int64_t most = resident.clusters(kernel, shape.block(), shape.cluster, bytes, launch);
        const auto partials = share_out<Op::CENTRED>(w, p, shape.rows, most, weights, like);
        launch_rows(kernel, shape, w.groups * shape.cluster, bytes, launch, w, p);
        if (weights) sum_partials<Op::template backward_registers_sum<T>()>(w, p.length, launch);
    });
}

// Gradients of input, weight and bias; what is not wanted comes back empty.
template <typename Op>
std::tuple<Tensor, Tensor, Tensor> norm_backward(const Tensor& grad, const std::optional<Tensor>& grad_sum,
                                                 const Tensor& input, const std::optional<Tensor>& weight,
                                                 const Tensor& stats, NormNeeds needs, NormStep step) {
    constexpr const char* NAME = Op::BACKWARD_NAME;
    check_cuda(grad, NAME, "grad");
    check_like(input, grad, NAME, "input");
    check_same_shape(input, grad, NAME, "input");
    if (grad_sum.has_value()) check_like(*grad_sum, grad, NAME, "grad_sum");
    if (grad_sum.has_value()) check_same_shape(*grad_sum, grad, NAME, "grad_sum");
    check_parameter(weight, input, NAME, "weight");
    const Launch launch(input);
    const RowLayout layout(input, -1, NAME);
    KL_CHECK(stats.scalar_type() == ScalarType::Float && stats.is_contiguous() &&
                 stats.numel() == layout.count * STATS<Op::CENTRED>,
             NAME, ": argument `stats` must be what the forward pass gave");
    const ScalarType dtype = input.scalar_type();
    Tensor grad_input = needs.input ? layout.dense.allocate(input) : empty(input, dtype, {0});
    Tensor grad_weight = empty(input, dtype, {needs.weight ? layout.length : 0});
    Tensor grad_bias = empty(input, dtype, {needs.bias ? layout.length : 0});
    const bool weights = needs.weight || needs.bias;
    dispatch(dtype, NAME, [&](auto zero) {
        using T = decltype(zero);
        NormWeights<T> w{};
        if (needs.weight) w.grad_weight = pointer<T>(grad_weight);
        if (needs.bias) w.grad_bias = pointer<T>(grad_bias);
        if (input.numel() == 0) {  // no rows: sums of nothing
            if (weights && layout.length > 0) {
                sum_partials<Op::template backward_block_sum<T>()>(w, layout.length, launch);
            }
            return;
        }
        NormBackward<T> p{};
        if (needs.input) p.grad_input = pointer<T>(grad_input);
        p.in = layout.rows(input, NAME);
        p.gi = needs.input ? layout.rows(grad_input, NAME) : p.in;
        p.grad = pointer<T>(grad);
        p.g = layout.rows(grad, NAME);
        p.grad_sum = optional_pointer<T>(grad_sum);
        p.gs = grad_sum.has_value() ? layout.rows(*grad_sum, NAME) : p.g;
        p.input = pointer<T>(input);
        p.stats = pointer<float>(stats);
        p.weight = optional_pointer<T>(weight);
        p.parameter = parameter_rows(weight, std::nullopt);
        p.count = layout.count;
        p.length = layout.length;
        p.per_element = 1.0f / static_cast<float>(p.length);
        if (step == NormStep::naive) {
            const auto rows = grid_size(ceil_div(p.count, NORM_NAIVE_THREADS));
            const auto columns = grid_size(ceil_div(p.length, NORM_NAIVE_THREADS));
            if (needs.input) Op::template backward_naive<T>()<<<rows, NORM_NAIVE_THREADS, 0, launch.stream>>>(p);
            if (weights) {
                Op::template backward_naive_weights<T>()<<<columns, NORM_NAIVE_THREADS, 0, launch.stream>>>(w, p);
            }
        } else if (step == NormStep::block) {
            norm_backward_block<Op>(w, p, weights, layout.chunks<T>(), input, launch);
        } else if (needs.input || weights) {
            const bool whole = p.in.template vectors<T>(p.length) && p.g.template vectors<T>(p.length) &&
                               p.gs.template vectors<T>(p.length) && p.gi.template vectors<T>(p.length) &&
                               p.parameter.whole && p.in.even() && p.g.even() && p.gs.even() && p.gi.even();
            const RowLaunch shape = backward_shape<Op, T>(layout.chunks<T>(), whole, step == NormStep::cluster);
            norm_backward_registers<Op>(w, p, weights, whole, shape, input, launch);
        }
    });
    KL_LAUNCH_CHECK();
    return {grad_input, grad_weight, grad_bias};
}

// What the compiler made of an operation's kernels, with a residual or without, for operands of one dtype.
template <typename Op>
void norm_kernel_facts(std::vector<KernelFacts>& facts, ScalarType dtype) {
    const std::string forward = std::string(Op::NAME) + ".", backward = std::string(Op::BACKWARD_NAME) + ".";
    const auto add = [&](const std::string& name, KernelFacts fact) {
        fact.name = name;
        facts.push_back(fact);
    };
    dispatch(dtype, "kernels", [&](auto zero) {
        using T = decltype(zero);
        constexpr int COLUMNS = WARP * COLUMN_LANES;
        add(forward + "naive", kernel_facts<Op::template naive<T>()>("", NORM_NAIVE_THREADS));
        add(forward + "block", kernel_facts<Op::template block<T>()>("", NORM_THREADS));
        add(forward + "registers", kernel_facts<Op::template registers<T, ROW_VECTORS, true, false>()>("", MIN_BLOCK));
        add(forward + "registers (short rows)", kernel_facts<Op::template short_rows<T, SHORT_ROWS>()>("", MIN_BLOCK));
        if constexpr (sizeof(T) == 2) {
            using TEAM = std::tuple_element_t<0, typename Op::Teams>;
            add(forward + "registers (team)", kernel_facts<Op::template team<T, TEAM>()>("", TEAM::THREADS));
            using SHAPE = typename Op::Slots;
            constexpr int bytes = slot_bytes(SHAPE::THREADS, SHAPE::slots(Op::RESIDUAL ? 2 : 1));
            const auto up_to = [](int vectors) { return std::to_string(vectors * Vec<T>::size); };
            if constexpr (Op::CENTRED && !Op::RESIDUAL) {
                const auto staying = [&](auto shape) {
                    using STAY = decltype(shape);
                    const std::string rows = STAY::FULL ? "rows of " : "rows below ";
                    add(forward + "cluster (staying, " + rows + up_to(STAY::BLOCKS * STAY::SLOTS) + ")",
                        kernel_facts<Op::template staying<T, STAY>()>("", STAY::THREADS, STAY::BYTES));
                };
                std::apply([&](auto... shape) { (staying(shape), ...); }, typename Op::StayingForward{});
            }
            if constexpr (!Op::RESIDUAL) {
                const auto short_rows = [&](auto crew) {
                    using CREW = decltype(crew);
                    add(backward + "registers (rows of up to " + up_to(CREW::REACH) + ")",
                        kernel_facts<Op::template backward_short<T, CREW>()>("", CREW::THREADS));
                };
                std::apply([&](auto... crew) { (short_rows(crew), ...); }, typename Op::Crews{});
                using STAY = typename Op::Staying;
                add(backward + "registers (staying)", kernel_facts<Op::template backward_staying<T>()>(
                                                          "", STAY::THREADS, slot_bytes(STAY::THREADS, STAY::SLOTS)));
            }
            add(forward + "registers (slots)", kernel_facts<Op::template slots<T, false>()>("", SHAPE::THREADS, bytes));
            if constexpr (Op::RESIDUAL) {
                add(forward + "cluster (slots)",
                    kernel_facts<Op::template slots<T, true>()>("", SHAPE::THREADS, bytes));
            }
        }
        add(forward + "cluster", kernel_facts<Op::template registers<T, WIDE<Op>, true, true>()>("", ROW_THREADS));
        add(backward + "naive", kernel_facts<Op::template backward_naive<T>()>("", NORM_NAIVE_THREADS));
        add(backward + "naive (weights)",
            kernel_facts<Op::template backward_naive_weights<T>()>("", NORM_NAIVE_THREADS));
        add(backward + "block", kernel_facts<Op::template backward_block<T>()>("", NORM_THREADS));
        add(backward + "block (weights)", kernel_facts<Op::template backward_block_weights<T>()>("", COLUMNS));
        add(backward + "block (sum)", kernel_facts<Op::template backward_block_sum<T>()>("", SUM_THREADS));
        constexpr int FEW = Op::RESIDUAL ? ROW_VECTORS : HELD_VECTORS;
        add(backward + "registers", kernel_facts<Op::template backward_registers<T, FEW, true, false>()>(
                                        "", ROW_THREADS, slot_bytes(ROW_THREADS, backward_slots(FEW, true))));
        add(backward + "registers (sum)", kernel_facts<Op::template backward_registers_sum<T>()>("", SUM_THREADS));
        add(backward + "cluster", kernel_facts<Op::template backward_registers<T, ROW_VECTORS, true, true>()>(
                                      "", ROW_THREADS, slot_bytes(ROW_THREADS, backward_slots(ROW_VECTORS, true))));
    });
}

}  // namespace kl
