// attention and attention_varlen, `flash`: the instances of flash.cuh for General sequences, which test every score.
//
// A thread draws a call of Philox for two weights. Weights are summed before they are dropped, so that the log-sum-exp is
// that of a call that keeps them.

#include "attention/flash.cuh"

namespace kl {
namespace {

// Reading a mask takes registers, so that a warp has one square of rows.
using MaskedShape64 = FlashShape<64, 64, 64, 4>;
using MaskedShape128 = FlashShape<128, 64, 64, 4>;

template <typename T>
void launch_masked(const FlashOperands<T>& operands, const Attention& a, const General& sequences,
                   const Launch& launch) {
    dispatch_shape<MaskedShape64, MaskedShape128, Shape256>(
        std::max(a.D, a.D_v), [&](auto shape) { launch_flash<T, decltype(shape)>(operands, a, sequences, launch); });
}

}  // namespace

void launch_flash_masked(const FlashOperands<half>& operands, const Attention& a, const General& sequences,
                         const Launch& launch) {
    launch_masked(operands, a, sequences, launch);
}
void launch_flash_masked(const FlashOperands<bfloat16>& operands, const Attention& a, const General& sequences,
                         const Launch& launch) {
    launch_masked(operands, a, sequences, launch);
}

void attention_flash_masked_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    flash_attributes<General, MaskedShape64, MaskedShape128>(attributes, dtype, "attention.flash.masked.");
}

}  // namespace kl
