// Residual sum and RMSNorm of it: sum = input + residual, rounded; sum / √(mean sum² + eps) · weight. Both are
// returned. Rungs: naive, block, registers, smem_pipeline, cluster; csrc/norm has a file for each, which the
// normalisations share. Backward: naive and block have their own kernels; all other rungs share norm/backward.cuh.

#include "norm/launch.cuh"

namespace kl {

struct AddRmsNorm {
    static constexpr const char *NAME = "add_rms_norm", *BACKWARD_NAME = "add_rms_norm_backward";
    static constexpr bool IS_LAYERNORM = false, HAS_RESIDUAL = true;
    // Few vectors a thread where nearly all threads have theirs: idle threads cost more than that gains.
    using BlockRows =
        std::tuple<BlockRowsShape<1, 1, 896, 1024>, BlockRowsShape<1, 1, 1792, 2048>, BlockRowsShape<1, 1, 3584, 4096>,
                   BlockRowsShape<1, 2, 14336, 16384>, BlockRowsShape<1, 4, 1024, 16384>>;
};

template <NormStep STEP>
std::tuple<Tensor, Tensor, Tensor> add_rms_norm(const Tensor& input, const Tensor& residual,
                                                const std::optional<Tensor>& weight, double eps, bool keep) {
    return norm_forward<AddRmsNorm>(input, residual, weight, std::nullopt, eps, keep, STEP);
}

template <NormStep STEP>
std::tuple<Tensor, Tensor> add_rms_norm_backward(const Tensor& grad, const Tensor& grad_sum, const Tensor& sum,
                                                 const std::optional<Tensor>& weight, const Tensor& stats,
                                                 bool needs_input, bool needs_weight) {
    const NormNeeds needs{needs_input, needs_weight, false};
    auto [grad_input, grad_weight, no_bias] =
        norm_backward<AddRmsNorm>(grad, grad_sum, sum, weight, stats, needs, STEP);
    return {grad_input, grad_weight};
}

KL_NORM_RUNG(add_rms_norm, naive)
KL_NORM_RUNG(add_rms_norm, block)
KL_NORM_RUNG(add_rms_norm, registers)
KL_NORM_RUNG(add_rms_norm, smem_pipeline)
KL_NORM_RUNG(add_rms_norm, cluster)
KL_NORM_RUNG(add_rms_norm_backward, naive)
KL_NORM_RUNG(add_rms_norm_backward, block)
KL_NORM_RUNG(add_rms_norm_backward, registers)

void add_rms_norm_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    norm_kernel_attributes<AddRmsNorm>(attributes, dtype);
}

}  // namespace kl
