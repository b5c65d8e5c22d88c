// Host code of layer_norm, rms_norm and add_rms_norm: checks, allocation, and the launch of the rung that was asked
// for. `Op` holds an operation's constants: IS_LAYERNORM, HAS_RESIDUAL, and the shapes of its kernels.
#pragma once

#include <optional>
#include <tuple>

#include "core/ops.h"
#include "norm/block.cuh"
#include "norm/cluster.cuh"
#include "norm/naive.cuh"
#include "norm/persistent_cluster.cuh"
#include "norm/registers.cuh"
#include "norm/select_backward.cuh"
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

template <class Op, typename = void>
constexpr bool HAS_PERSISTENT = false;
template <class Op>
constexpr bool HAS_PERSISTENT<Op, std::void_t<typename Op::Persistent>> = true;

// Returns the output, the sum of input and residual (the output again without a residual), and the saved statistics of
// rows, empty unless `keep`.
template <class Op>
std::tuple<Tensor, Tensor, Tensor> norm_forward(const Tensor& input, const std::optional<Tensor>& residual,
                                                const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                                                double eps, bool keep, NormStep step) {
    constexpr bool IS_LAYERNORM = Op::IS_LAYERNORM;
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
    Tensor stats = empty(input, ScalarType::Float, {keep ? layout.count : 0, STATS<IS_LAYERNORM>});
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
        const bool vectorized = p.in.template vectors<T>(p.length) && p.res.template vectors<T>(p.length) &&
                                p.out.template vectors<T>(p.length) && p.parameter.whole;
        switch (step) {
            case NormStep::naive:
                return launch_naive<Op>(p, launch);
            case NormStep::block:
                return launch_block<Op>(p, launch);
            case NormStep::registers:
                return launch_registers<Op>(p, vectorized, launch);
            case NormStep::smem_pipeline:
                return launch_smem_pipeline<Op>(p, vectorized, launch);
            case NormStep::cluster:
                return launch_cluster<Op>(p, vectorized, launch);
            case NormStep::persistent_cluster:
                if constexpr (HAS_PERSISTENT<Op>) return launch_persistent_cluster<Op>(p, vectorized, launch);
        }
    });
    KL_LAUNCH_CHECK();
    return {output, sum, stats};
}

struct NormNeeds {
    bool input, weight, bias;
};

// Gradients of input, weight and bias; what is not wanted comes back empty.
template <class Op>
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
    KL_CHECK(stats.is_cuda() && stats.get_device_index() == input.get_device_index() &&
                 stats.scalar_type() == ScalarType::Float && stats.is_contiguous() &&
                 stats.numel() == layout.count * STATS<Op::IS_LAYERNORM>,
             NAME, ": argument `stats` must be what the forward pass gave");
    const ScalarType dtype = input.scalar_type();
    Tensor grad_input = needs.input ? layout.dense.allocate(input) : empty(input, dtype, {0});
    Tensor grad_weight = empty(input, dtype, {needs.weight ? layout.length : 0});
    Tensor grad_bias = empty(input, dtype, {needs.bias ? layout.length : 0});
    dispatch(dtype, NAME, [&](auto zero) {
        using T = decltype(zero);
        NormWeights<T> w{};
        if (needs.weight) w.grad_weight = pointer<T>(grad_weight);
        if (needs.bias) w.grad_bias = pointer<T>(grad_bias);
        if (input.numel() == 0) {  // no rows: sums of nothing
            if (w.wanted() && layout.length > 0) launch_column_sum<Op>(w, layout.length, launch);
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
        switch (step) {
            case NormStep::naive:
                return launch_backward_naive<Op>(w, p, launch);
            case NormStep::block:
                return launch_backward_block<Op>(w, p, input, launch);
            default:
                return launch_backward<Op>(w, p, input, launch);
        }
    });
    KL_LAUNCH_CHECK();
    return {grad_input, grad_weight, grad_bias};
}

/// What the compiler made of one instance of each of an operation's kernels, for operands of one dtype.
template <class Op>
void norm_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    const std::string forward = std::string(Op::NAME) + ".", backward = std::string(Op::BACKWARD_NAME) + ".";
    const auto add = [&](const std::string& name, KernelAttributes fact) {
        fact.name = name;
        attributes.push_back(fact);
    };
    // Calls f with each type of a tuple.
    const auto each = [](auto shapes, auto&& f) { std::apply([&](auto... shape) { (f(shape), ...); }, shapes); };
    dispatch(dtype, "kernels", [&](auto zero) {
        using T = decltype(zero);
        const auto up_to = [](int vectors) {
            return " (rows of up to " + std::to_string(vectors * Vec<T>::size) + ")";
        };
        add(forward + "naive", kernel_attributes<norm_naive_kernel<Op, T>>("", NORM_NAIVE_THREADS));
        add(forward + "block", kernel_attributes<norm_block_kernel<Op, T>>("", NORM_THREADS));
        add(forward + "registers", kernel_attributes<norm_registers_kernel<Op, T, ROW_VECTORS, true>>("", MIN_BLOCK));
        add(forward + "registers (short rows)",
            kernel_attributes<norm_registers_short_kernel<Op, T, SHORT_ROWS>>("", MIN_BLOCK));
        add(forward + "cluster",
            kernel_attributes<norm_cluster_kernel<Op, T, LONG_ROW_VECTORS<Op>, true>>("", ROW_THREADS));
        if constexpr (sizeof(T) == 2) {
            each(typename Op::BlockRows{}, [&](auto shape) {
                using ROWS = decltype(shape);
                add(forward + "registers (blocks of " + std::to_string(ROWS::THREADS) + " threads, " +
                        std::to_string(ROWS::ROWS) + " rows of " + std::to_string(ROWS::VECTORS) + " vectors)",
                    kernel_attributes<norm_registers_block_rows_kernel<Op, T, ROWS>>("", ROWS::THREADS));
            });
            using SHAPE = NormPipeline;
            constexpr int bytes = stage_bytes(SHAPE::THREADS, SHAPE::stage_vectors(Op::HAS_RESIDUAL ? 2 : 1));
            add(forward + "smem_pipeline",
                kernel_attributes<norm_smem_pipeline_kernel<Op, T, SHAPE, false>>("", SHAPE::THREADS, bytes));
            if constexpr (Op::HAS_RESIDUAL) {
                add(forward + "smem_pipeline (cluster)",
                    kernel_attributes<norm_smem_pipeline_kernel<Op, T, SHAPE, true>>("", SHAPE::THREADS, bytes));
            }
            if constexpr (HAS_PERSISTENT<Op>) {
                each(typename Op::Persistent{}, [&](auto shape) {
                    using SHAPE = decltype(shape);
                    add(forward + "persistent_cluster" + (SHAPE::FULL ? " (longest rows)" : ""),
                        kernel_attributes<norm_persistent_cluster_kernel<Op, T, SHAPE>>("", SHAPE::THREADS,
                                                                                        SHAPE::BYTES));
                });
            }
            if constexpr (!Op::HAS_RESIDUAL) {
                each(typename Op::WarpsPerRow{}, [&](auto shape) {
                    using SHAPE = decltype(shape);
                    add(backward + "registers" + up_to(SHAPE::REACH),
                        kernel_attributes<norm_backward_registers_warps_kernel<Op, T, SHAPE>>("", SHAPE::THREADS));
                });
                using SHAPE = typename Op::PersistentBackward;
                add(backward + "registers (persistent)",
                    kernel_attributes<norm_backward_registers_persistent_kernel<Op, T, SHAPE>>(
                        "", SHAPE::THREADS, stage_bytes(SHAPE::THREADS, SHAPE::STAGE_VECTORS)));
            }
        }
        add(backward + "naive", kernel_attributes<norm_backward_naive_kernel<Op, T>>("", NORM_NAIVE_THREADS));
        add(backward + "naive (weights)",
            kernel_attributes<norm_backward_naive_weights_kernel<Op, T>>("", NORM_NAIVE_THREADS));
        add(backward + "block", kernel_attributes<norm_backward_block_kernel<Op, T>>("", NORM_THREADS));
        add(backward + "block (weights)",
            kernel_attributes<norm_backward_block_weights_kernel<Op, T>>("", WARP * COLUMN_LANES));
        add(backward + "column sum", kernel_attributes<norm_backward_column_sum_kernel<Op, T>>("", SUM_THREADS));
        constexpr int FEW = Op::HAS_RESIDUAL ? ROW_VECTORS : REGISTER_VECTORS;
        add(backward + "registers", kernel_attributes<norm_backward_registers_kernel<Op, T, FEW, true, false>>(
                                        "", ROW_THREADS, stage_bytes(ROW_THREADS, backward_stage_vectors(FEW, true))));
        add(backward + "registers (cluster)",
            kernel_attributes<norm_backward_registers_kernel<Op, T, ROW_VECTORS, true, true>>(
                "", ROW_THREADS, stage_bytes(ROW_THREADS, backward_stage_vectors(ROW_VECTORS, true))));
    });
}

}  // namespace kl
