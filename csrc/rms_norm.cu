// RMSNorm: x / √(mean x² + eps) · weight over the last dimension (Zhang and Sennrich, arXiv:1910.07467). Rungs: naive,
// block, registers, smem_pipeline, cluster; csrc/norm has a file for each, which the normalisations share. Backward:
// naive and block have their own kernels; all other rungs share norm/backward*.cuh.

#include "norm/launch.cuh"

namespace kl {

struct RmsNorm {
    static constexpr const char *NAME = "rms_norm", *BACKWARD_NAME = "rms_norm_backward";
    static constexpr bool IS_LAYERNORM = false, HAS_RESIDUAL = false;
    using BlockRows = std::tuple<BlockRowsShape<2, 1, 512, 1024>, BlockRowsShape<1, 4, 4096, 16384>>;
    using WarpsPerRow = std::tuple<WarpsPerRowShape<1, 1, 512, 2>, WarpsPerRowShape<2, 1, 256, 2>>;
    using PersistentBackward = PersistentBackwardShape<1, 4, 1024>;
};

template <NormStep STEP>
std::tuple<Tensor, Tensor> rms_norm(const Tensor& input, const std::optional<Tensor>& weight, double eps, bool keep) {
    auto [output, sum, stats] = norm_forward<RmsNorm>(input, std::nullopt, weight, std::nullopt, eps, keep, STEP);
    return {output, stats};
}

template <NormStep STEP>
std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad, const Tensor& input,
                                             const std::optional<Tensor>& weight, const Tensor& stats, bool needs_input,
                                             bool needs_weight) {
    const NormNeeds needs{needs_input, needs_weight, false};
    auto [grad_input, grad_weight, no_bias] =
        norm_backward<RmsNorm>(grad, std::nullopt, input, weight, stats, needs, STEP);
    return {grad_input, grad_weight};
}

KL_NORM_RUNG(rms_norm, naive)
KL_NORM_RUNG(rms_norm, block)
KL_NORM_RUNG(rms_norm, registers)
KL_NORM_RUNG(rms_norm, smem_pipeline)
KL_NORM_RUNG(rms_norm, cluster)
KL_NORM_RUNG(rms_norm_backward, naive)
KL_NORM_RUNG(rms_norm_backward, block)
KL_NORM_RUNG(rms_norm_backward, registers)

void rms_norm_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    norm_kernel_attributes<RmsNorm>(attributes, dtype);
}

}  // namespace kl
