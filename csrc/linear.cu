// linear, rung 1 of 6: naive
// Idea      Bias and activation are applied to the sum in its register.
// Predicts  No second kernel: 2 · M · N elements less to read and write.
// Limit now The weight lies along K: a warp's load of it touches 32 rows, a sector each, as in matmul's `naive`.
// Next      `registers`: the same epilogue in matmul's `registers`.
//
// Also the host code that linear's rungs share. matmul/linear.cuh lists the other rungs.

#include "matmul/linear.cuh"

namespace kl {
namespace {

// One output a thread, neighbouring threads along N.
template <typename T>
__global__ void linear_naive_kernel(T* c, const T* a, const T* b, __grid_constant__ const Product p,
                                    __grid_constant__ const BiasActivation<T> epilogue) {
    const int64_t i = int64_t{blockIdx.x} * THREADS + threadIdx.x;
    if (i >= p.batches * p.M * p.N) return;
    const int64_t batch = i / (p.M * p.N), within = i % (p.M * p.N);
    const int64_t m = within / p.N, n = within % p.N;
    int64_t a_offset, b_offset;
    p.batch_offsets(batch, &a_offset, &b_offset);
    a += a_offset + m * p.a_m;
    b += b_offset + n * p.b_n;
    float sum[1] = {};
    for (int64_t k = 0; k < p.K; ++k) sum[0] += to_float(a[k * p.a_k]) * to_float(b[k * p.b_k]);
    epilogue.template columns<1>(n, 1).store(c, i, sum, true);
}

}  // namespace

LinearCall prepare_linear(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                          const std::string& activation, bool keep) {
    auto [product, output] = prepare(input, weight, true, "linear", "weight");
    if (bias) {
        check_like(*bias, input, "linear", "bias");
        KL_CHECK(bias->dim() == 1 && bias->size(0) == product.N,
                 "linear: argument `bias` must have one element for each row of `weight`");
    }
    KL_CHECK(activation == "none" || activation == "gelu" || activation == "gelu_tanh",
             "linear: argument `activation` must be 'none', 'gelu' or 'gelu_tanh', got '", activation, "'");
    Tensor kept =
        keep ? empty_strided(input, input.scalar_type(), output.sizes().data(), output.strides().data(), output.dim())
             : empty(input, input.scalar_type(), {0});
    const auto form = activation == "none"   ? Activation::none
                      : activation == "gelu" ? Activation::gelu
                                             : Activation::gelu_tanh;
    return {product, output, kept, bias, form, keep};
}

std::tuple<Tensor, Tensor> linear_naive(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                                        const std::string& activation, bool keep) {
    const LinearCall call = prepare_linear(input, weight, bias, activation, keep);
    if (call.output.numel() == 0) return call.outputs();
    const Launch launch(input);
    dispatch(input.scalar_type(), "linear", [&](auto zero) {
        using T = decltype(zero);
        const auto grid = grid_size(ceil_div(call.output.numel(), THREADS));
        linear_naive_kernel<T><<<grid, THREADS, 0, launch.stream>>>(
            static_cast<T*>(call.output.data_ptr()), static_cast<const T*>(input.data_ptr()),
            static_cast<const T*>(weight.data_ptr()), call.product, call.epilogue<T>());
    });
    KL_LAUNCH_CHECK();
    return call.outputs();
}

void linear_naive_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    dispatch(dtype, "linear", [&](auto zero) {
        attributes.push_back(kernel_attributes<linear_naive_kernel<decltype(zero)>>("linear.naive", THREADS));
    });
}

}  // namespace kl
