// The backward pass of `flash`: the instances of flash_backward.cuh for General sequences, which test every score. A thread
// draws a call of Philox for two weights, and in the key kernel, whose tiles are transposed, for each.

#include "attention/flash_backward.cuh"

namespace kl {

void launch_flash_masked_backward(const FlashGradients<half>& operands, const Attention& a, const General& sequences,
                                  const Launch& launch) {
    launch_products(operands, a, sequences, launch);
}
void launch_flash_masked_backward(const FlashGradients<bfloat16>& operands, const Attention& a,
                                  const General& sequences, const Launch& launch) {
    launch_products(operands, a, sequences, launch);
}

void attention_flash_masked_backward_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    flash_backward_attributes<General>(attributes, dtype, "attention_backward.flash.masked.");
}

}  // namespace kl
