// LayerNorm: (x − mean x) / √(var x + eps) · weight + bias over the last dimension (Ba, Kiros and Hinton,
// arXiv:1607.06450). Rungs: naive, block, registers, smem_pipeline, cluster, persistent_cluster; csrc/norm has a file
// for each. Backward: naive and block have their own kernels; all other rungs share norm/backward*.cuh.

#include "norm/launch.cuh"

namespace kl {

struct LayerNorm {
    static constexpr const char *NAME = "layer_norm", *BACKWARD_NAME = "layer_norm_backward";
    static constexpr bool IS_LAYERNORM = true, HAS_RESIDUAL = false;
    using BlockRows = std::tuple<BlockRowsShape<4, 1, 512, 1024>, BlockRowsShape<2, 2, 1024, 4096>>;
    using Persistent = std::tuple<PersistentShape<8, 256, 8, 1, true>, PersistentShape<4, 512, 8, 2, false>>;
    using WarpsPerRow =
        std::tuple<WarpsPerRowShape<1, 1, 512, 2>, WarpsPerRowShape<2, 1, 256, 2>, WarpsPerRowShape<2, 2, 256, 2>>;
    using PersistentBackward = PersistentBackwardShape<2, 3, 1024>;
};

template <NormStep STEP>
std::tuple<Tensor, Tensor> layer_norm(const Tensor& input, const std::optional<Tensor>& weight,
                                      const std::optional<Tensor>& bias, double eps, bool keep) {
    auto [output, sum, stats] = norm_forward<LayerNorm>(input, std::nullopt, weight, bias, eps, keep, STEP);
    return {output, stats};
}

template <NormStep STEP>
std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& grad, const Tensor& input,
                                                       const std::optional<Tensor>& weight, const Tensor& stats,
                                                       bool needs_input, bool needs_weight, bool needs_bias) {
    const NormNeeds needs{needs_input, needs_weight, needs_bias};
    return norm_backward<LayerNorm>(grad, std::nullopt, input, weight, stats, needs, STEP);
}

KL_NORM_RUNG(layer_norm, naive)
KL_NORM_RUNG(layer_norm, block)
KL_NORM_RUNG(layer_norm, registers)
KL_NORM_RUNG(layer_norm, smem_pipeline)
KL_NORM_RUNG(layer_norm, cluster)
KL_NORM_RUNG(layer_norm, persistent_cluster)
KL_NORM_RUNG(layer_norm_backward, naive)
KL_NORM_RUNG(layer_norm_backward, block)
KL_NORM_RUNG(layer_norm_backward, registers)

void layer_norm_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    norm_kernel_attributes<LayerNorm>(attributes, dtype);
}

}  // namespace kl
