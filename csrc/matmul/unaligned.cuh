// Sixteen bytes from anywhere. They lie in two words of 16 bytes at multiples of 16; both are loaded and shifted
// together, so that no load is narrower for being unaligned.
#pragma once

#include "core/common.cuh"

namespace kl {

// The 16 bytes that begin `shift` bytes after `low` and end in `high`: at most 14, a number of whole elements.
template <typename T>
__device__ inline void join(uint32_t (&chunk)[4], const uint4& low, const uint4& high, uint32_t shift) {
    const uint32_t w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    uint32_t by8[6], by4[5];
#pragma unroll
    for (int i = 0; i < 6; ++i) by8[i] = shift & 8 ? w[i + 2] : w[i];
#pragma unroll
    for (int i = 0; i < 5; ++i) by4[i] = shift & 4 ? by8[i + 1] : by8[i];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        chunk[i] = sizeof(T) == 4 ? by4[i] : __funnelshift_r(by4[i], by4[i + 1], shift % 4 * 8);
    }
}

// A chunk on its way from global memory. Words that hold an element of it lie in its allocation wholly, since
// allocations begin and end at multiples of 16 bytes; others are not read.
template <typename T>
class UnalignedChunk {
    static constexpr int E = 16 / sizeof(T);
    uint4 low{}, high{};
    uint32_t shift = 0;  // bytes from the first of `low` to the chunk's first

    // Volatile, so that loads stay together, ahead of the first use of any.
    __device__ static void load16_if(uint4& v, const uint4* p, bool inside) {
        asm volatile(
            "{\n.reg .pred inside;\nsetp.ne.b32 inside, %5, 0;\n"
            "@inside ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
            : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
            : "l"(p), "r"(static_cast<int>(inside)));
    }

  public:
    // Begins to load the chunk at `p`, of which `count` elements (at most E; none if negative) are inside.
    __device__ void begin(const T* p, int count) {
        const auto address = reinterpret_cast<uintptr_t>(p);
        const auto* aligned = reinterpret_cast<const uint4*>(address & ~uintptr_t{15});
        shift = static_cast<uint32_t>(address % 16);
        load16_if(low, aligned, count > 0);
        load16_if(high, aligned + 1, count > 0 && shift + min(count, E) * sizeof(T) > 16);
    }

    // What is not inside is not defined.
    __device__ void get(uint32_t (&chunk)[4]) const { join<T>(chunk, low, high, shift); }
};

}  // namespace kl
