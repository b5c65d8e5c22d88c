// What the teaching rungs thread_tile, vectorized and double_buffered share: the check of a call, its launch, loads of 16 bytes.
#pragma once

#include "matmul/matmul.cuh"

namespace kl {

// Checks a call of rung `name` and allocates its output. Raises unless both operands are float32, row-major without
// gaps and aligned to 16 bytes, and M, N and K are multiples of the tile.
inline Call prepare_plain(const Tensor& input, const Tensor& other, int tile_m, int tile_n, int tile_k,
                          const char* name) {
    Call call = prepare(input, other);
    const Product& p = call.product;
    KL_CHECK(input.scalar_type() == ScalarType::Float, "matmul: ", name, " takes float32");
    KL_CHECK(p.batches == 1 && p.a_k == 1 && p.a_m == p.K && p.b_n == 1 && p.b_k == p.N, "matmul: ", name,
             " takes two row-major matrices without gaps");
    KL_CHECK(is_aligned16(input.data_ptr()) && is_aligned16(other.data_ptr()), "matmul: ", name,
             " takes operands that begin at multiples of 16 bytes");
    KL_CHECK(p.M % tile_m == 0 && p.N % tile_n == 0 && p.K % tile_k == 0, "matmul: ", name,
             " takes multiples of its tile");
    KL_CHECK(std::max({p.M, p.N, p.K}) <= std::numeric_limits<int32_t>::max(), "matmul: ", name,
             " takes sizes below 2^31");
    return call;
}

// Runs a teaching rung: KERNEL, one block of THREADS threads per tile of BM × BN outputs.
template <auto KERNEL, int BM, int BN, int BK, int THREADS>
Tensor run_plain(const Tensor& input, const Tensor& other, const char* name) {
    const auto [p, output] = prepare_plain(input, other, BM, BN, BK, name);
    if (output.numel() == 0) return output;
    const Launch launch(input);
    KERNEL<<<grid_size(p.M / BM * (p.N / BN)), THREADS, 0, launch.stream>>>(
        static_cast<float*>(output.data_ptr()), static_cast<const float*>(input.data_ptr()),
        static_cast<const float*>(other.data_ptr()), static_cast<int>(p.N), static_cast<int>(p.K));
    KL_LAUNCH_CHECK();
    return output;
}

// 16 bytes at a time.
__device__ inline float4 load4(const float* p) { return *reinterpret_cast<const float4*>(p); }
__device__ inline void store4(float* p, const float4& v) { *reinterpret_cast<float4*>(p) = v; }

}  // namespace kl
