// linear_float8, rung 1 of 2: naive
// Idea      A thread per output converts each operand to float32, multiplies and adds there, and scales once at the end.
// Predicts  As matmul's `coalesced`, with half the bytes and a conversion for each: no faster.
// Limit now Every operand element comes from the L1 or the L2, one byte a load.
// Next      `persistent`: the tensor cores multiply float8 as it is.
//
// Also the host code that both rungs share.

#include <cuda_fp8.h>

#include "linear_float8/linear_float8.cuh"

namespace kl {
namespace {

__device__ inline float from_e4m3(uint8_t bits) {
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(bits, __NV_E4M3)));
}

// Neighbouring threads along N.
template <typename T>
__global__ void linear_float8_naive_kernel(T* c, const uint8_t* a, const uint8_t* b, int64_t M, int64_t N, int64_t K,
                                           int64_t a_m, int64_t a_k, int64_t b_n, int64_t b_k,
                                           __grid_constant__ const Scaling scaling) {
    const int64_t i = int64_t{blockIdx.x} * THREADS + threadIdx.x;
    if (i >= M * N) return;
    const int64_t m = i / N, n = i % N;
    a += m * a_m;
    b += n * b_n;
    float sum = 0.0f;
    for (int64_t k = 0; k < K; ++k) sum += from_e4m3(a[k * a_k]) * from_e4m3(b[k * b_k]);
    c[i] = from_float<T>(sum * scaling.row(m) * scaling.column(n) + scaling.shift(n));
}

// A scale's step from row to row.
int64_t step_of(const Tensor& scale, const Tensor& like, int64_t rows, const char* name) {
    check_cuda(scale, "linear_float8", name);
    KL_CHECK(scale.scalar_type() == ScalarType::Float && scale.get_device_index() == like.get_device_index(),
             "linear_float8: argument `", name, "` must be float32 on the device of `input`");
    if (scale.dim() == 0) return 0;
    KL_CHECK(scale.dim() == 2 && scale.size(0) == rows && scale.size(1) == 1, "linear_float8: argument `", name,
             "` must have the shape () or (", rows, ", 1)");
    return scale.stride(0);
}

ScalarType output_dtype(const std::string& name) {
    if (name == "float32") return ScalarType::Float;
    if (name == "float16") return ScalarType::Half;
    KL_CHECK(name == "bfloat16", "linear_float8: argument `out_dtype` must be bfloat16, float16 or float32, got ",
             name);
    return ScalarType::BFloat16;
}

}  // namespace

Float8Call prepare_float8(const Tensor& input, const Tensor& weight, const Tensor& input_scale,
                          const Tensor& weight_scale, const std::optional<Tensor>& bias, const std::string& out_dtype) {
    check_cuda(input, "linear_float8", "input");
    check_like(weight, input, "linear_float8", "weight");
    KL_CHECK(input.scalar_type() == ScalarType::Float8, "linear_float8: operands must be float8_e4m3fn");
    KL_CHECK(input.dim() == 2 && weight.dim() == 2 && input.size(1) == weight.size(1),
             "linear_float8: operands must be matrices with the same number of columns");
    const int64_t M = input.size(0), N = weight.size(0);
    Scaling scaling{static_cast<const float*>(input_scale.data_ptr()),
                    static_cast<const float*>(weight_scale.data_ptr()),
                    step_of(input_scale, input, M, "input_scale"),
                    step_of(weight_scale, input, N, "weight_scale"),
                    nullptr,
                    0,
                    ScalarType::Float};
    if (bias) {
        const ScalarType dtype = bias->scalar_type();
        check_cuda(*bias, "linear_float8", "bias");
        KL_CHECK(dtype == ScalarType::Float || dtype == ScalarType::Half || dtype == ScalarType::BFloat16,
                 "linear_float8: argument `bias` must be float16, bfloat16 or float32");
        KL_CHECK(bias->dim() == 1 && bias->size(0) == N && bias->get_device_index() == input.get_device_index(),
                 "linear_float8: argument `bias` must have one element for each row of `weight`, on its device");
        scaling.bias = bias->data_ptr();
        scaling.bias_step = bias->stride(0);
        scaling.bias_dtype = dtype;
    }
    return {M,
            N,
            input.size(1),
            input.stride(0),
            input.stride(1),
            weight.stride(0),
            weight.stride(1),
            input.data_ptr(),
            weight.data_ptr(),
            scaling,
            empty(input, output_dtype(out_dtype), {M, N})};
}

Tensor linear_float8_naive(const Tensor& input, const Tensor& weight, const Tensor& input_scale,
                           const Tensor& weight_scale, const std::optional<Tensor>& bias,
                           const std::string& out_dtype) {
    const Float8Call call = prepare_float8(input, weight, input_scale, weight_scale, bias, out_dtype);
    if (call.output.numel() == 0) return call.output;
    const Launch launch(input);
    dispatch(call.output.scalar_type(), "linear_float8", [&](auto zero) {
        using T = decltype(zero);
        const auto grid = grid_size(ceil_div(call.output.numel(), THREADS));
        linear_float8_naive_kernel<T><<<grid, THREADS, 0, launch.stream>>>(
            static_cast<T*>(call.output.data_ptr()), static_cast<const uint8_t*>(call.a),
            static_cast<const uint8_t*>(call.b), call.M, call.N, call.K, call.a_m, call.a_k, call.b_n, call.b_k,
            call.scaling);
    });
    KL_LAUNCH_CHECK();
    return call.output;
}

void linear_float8_naive_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    dispatch(dtype, "linear_float8", [&](auto zero) {
        attributes.push_back(
            kernel_attributes<linear_float8_naive_kernel<decltype(zero)>>("linear_float8.naive", THREADS));
    });
}

}  // namespace kl
