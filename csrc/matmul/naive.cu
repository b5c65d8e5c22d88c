// matmul, rung 1 of 16: naive
// Idea      One thread per output. Neighbouring threads take neighbouring rows.
// Predicts  2 loads per multiply-add, each from global memory: 2 / (2 · 4) = 0.25 flop per byte in float32, before
//           caches.
// Limit now For dense operands each load of a warp touches 32 cache lines, and uses one element of each.
// Next      `coalesced`: neighbouring threads take neighbouring columns.

#include "matmul/matmul.cuh"

namespace kl {
namespace {

// Neighbouring threads take neighbouring rows. For dense operands, each of a warp's loads of A and stores of C touches
// 32 cache lines and uses one element of each. Four blocks per SM leave registers for the loads of several iterations
// at once.
template <typename T>
__global__ void __launch_bounds__(THREADS, 4) matmul_naive_kernel(T* c, const T* a, const T* b, Product p) {
    const int64_t i = int64_t{blockIdx.x} * THREADS + threadIdx.x;
    if (i >= p.batches * p.M * p.N) return;
    const int64_t batch = i / (p.M * p.N), within = i % (p.M * p.N);
    const int64_t m = within % p.M, n = within / p.M;
    int64_t a_offset, b_offset;
    p.batch_offsets(batch, &a_offset, &b_offset);
    a += a_offset + m * p.a_m;
    b += b_offset + n * p.b_n;
    float sum = 0.0f;
    for (int64_t k = 0; k < p.K; ++k) sum += to_float(a[k * p.a_k]) * to_float(b[k * p.b_k]);
    c[(batch * p.M + m) * p.N + n] = from_float<T>(sum);
}

}  // namespace

Tensor matmul_naive(const Tensor& input, const Tensor& other) {
    auto [p, output] = prepare(input, other);
    if (output.numel() == 0) return output;
    const Launch launch(input);
    dispatch(input.scalar_type(), "matmul", [&, &p = p, &output = output](auto zero) {
        using T = decltype(zero);
        const auto grid = grid_size(ceil_div(output.numel(), THREADS));
        matmul_naive_kernel<T><<<grid, THREADS, 0, launch.stream>>>(static_cast<T*>(output.data_ptr()),
                                                                    static_cast<const T*>(input.data_ptr()),
                                                                    static_cast<const T*>(other.data_ptr()), p);
    });
    KL_LAUNCH_CHECK();
    return output;
}

void matmul_naive_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    dispatch(dtype, "matmul", [&](auto zero) {
        attributes.push_back(kernel_attributes<matmul_naive_kernel<decltype(zero)>>("matmul.naive", THREADS));
    });
}

}  // namespace kl
