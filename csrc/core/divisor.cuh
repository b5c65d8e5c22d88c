// Division by a constant of the launch, without a division instruction.
#pragma once

#include "core/common.cuh"

namespace kl {

/// Divides numbers below 2^31 by a number known before the launch, with a multiplication (Granlund and Montgomery,
/// "Division by Invariant Integers using Multiplication", PLDI 1994).
struct Divisor {
    uint32_t divisor, multiplier, shift;

    explicit Divisor(uint32_t d = 1) : divisor(d), shift(0) {
        while ((uint64_t{1} << shift) < d) ++shift;
        multiplier = static_cast<uint32_t>((uint64_t{1} << 32) * ((uint64_t{1} << shift) - d) / d + 1);
    }
    __device__ uint32_t quotient(uint32_t n) const { return (__umulhi(n, multiplier) + n) >> shift; }
    __device__ uint32_t remainder(uint32_t n) const { return n - quotient(n) * divisor; }
};

}  // namespace kl
