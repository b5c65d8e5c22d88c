// How matmul.registers multiplies float32 on Hopper: registers_tma.cu.
#pragma once

#include <vector>

#include "matmul/matmul.cuh"

namespace kl {

// Whether it was launched: on Hopper, where TMA can read both operands and outputs are many; and if both operands lie along
// k, where a copy of one is worth its while. `like` says where memory for that is to be.
bool matmul_registers_by_tma(float* c, const float* a, const float* b, const Product& p, const Tensor& like,
                             const Launch& on);

void matmul_registers_tma_facts(std::vector<KernelFacts>& facts);

}  // namespace kl
