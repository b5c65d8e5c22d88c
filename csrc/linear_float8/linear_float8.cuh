// A linear layer of float8 operands (e4m3), (input · weightᵀ) · input_scale · weight_scale + bias: what its rungs share.
//
//   rung        the one idea it adds                                        what limits it now
//   naive       a thread per output, products in float32                    loads of one byte, each from L1 or L2
//   persistent  matmul's `persistent` on the float8 tensor cores, whose     few tiles leave SMs idle
//               sums of 128 products are added in float32
//
// The tensor cores keep 13 bits of a sum after the leading one. torch_ref/linear_float8.py models them, and says where
// that was measured.
#pragma once

#include <optional>
#include <string>

#include "core/common.cuh"
#include "core/ops.h"

namespace kl {

// Factors of rows (m) and columns (n), and what is added to columns. A step of 0: one number for all.
struct Scaling {
    const float *input, *weight;
    int64_t input_step, weight_step;
    const void* bias;  // or null
    int64_t bias_step;
    ScalarType bias_dtype;

    __device__ float row(int64_t m) const { return input[m * input_step]; }
    __device__ float column(int64_t n) const { return weight[n * weight_step]; }
    __device__ float shift(int64_t n) const {
        const int64_t i = n * bias_step;
        if (bias == nullptr) return 0.0f;
        if (bias_dtype == ScalarType::Float) return static_cast<const float*>(bias)[i];
        if (bias_dtype == ScalarType::Half) return to_float(static_cast<const half*>(bias)[i]);
        return to_float(static_cast<const bfloat16*>(bias)[i]);
    }
};

// A checked call: rows of both operands, of any strides, and the output, allocated.
struct Float8Call {
    int64_t M, N, K;
    int64_t a_m, a_k, b_n, b_k;
    const void *a, *b;
    Scaling scaling;
    Tensor output;
};

// `input` (M, K), `weight` (N, K), scales () or (M, 1) and (N, 1), `bias` (N,); `out_dtype` names the output's.
Float8Call prepare_float8(const Tensor& input, const Tensor& weight, const Tensor& input_scale,
                          const Tensor& weight_scale, const std::optional<Tensor>& bias, const std::string& out_dtype);

}  // namespace kl
