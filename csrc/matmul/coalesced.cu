// matmul, rung 2 of 16: coalesced
// Idea      Neighbouring threads take neighbouring columns. A warp reads one element of A and, of a dense B, 32
//           neighbours.
// Predicts  Cache lines per warp and k in float32: 1 + 1 instead of 32 + 1 in `naive`, which reads 32 rows of A.
// Limit now Every operand element comes from the L1 or the L2: two loads per multiply-add.
// Next      `tiled`: a block shares tiles of A and B in shared memory.

#include "matmul/matmul.cuh"

namespace kl {
namespace {

// Neighbouring threads take neighbouring columns. A warp reads one element of A and, of a dense B, one run of memory;
// it writes one run of C. This mapping is the only difference from `naive`. Four blocks per SM leave registers for the
// loads of several iterations at once.
template <typename T>
__global__ void __launch_bounds__(THREADS, 4) matmul_coalesced_kernel(T* c, const T* a, const T* b, Product p) {
    const int64_t i = int64_t{blockIdx.x} * THREADS + threadIdx.x;
    if (i >= p.batches * p.M * p.N) return;
    const int64_t batch = i / (p.M * p.N), within = i % (p.M * p.N);
    const int64_t m = within / p.N, n = within % p.N;
    int64_t a_offset, b_offset;
    p.batch_offsets(batch, &a_offset, &b_offset);
    a += a_offset + m * p.a_m;
    b += b_offset + n * p.b_n;
    float sum = 0.0f;
    for (int64_t k = 0; k < p.K; ++k) sum += to_float(a[k * p.a_k]) * to_float(b[k * p.b_k]);
    c[(batch * p.M + m) * p.N + n] = from_float<T>(sum);
}

}  // namespace

Tensor matmul_coalesced(const Tensor& input, const Tensor& other) {
    auto [p, output] = prepare(input, other);
    if (output.numel() == 0) return output;
    const Launch launch(input);
    dispatch(input.scalar_type(), "matmul", [&, &p = p, &output = output](auto zero) {
        using T = decltype(zero);
        const auto grid = grid_size(ceil_div(output.numel(), THREADS));
        matmul_coalesced_kernel<T><<<grid, THREADS, 0, launch.stream>>>(static_cast<T*>(output.data_ptr()),
                                                                        static_cast<const T*>(input.data_ptr()),
                                                                        static_cast<const T*>(other.data_ptr()), p);
    });
    KL_LAUNCH_CHECK();
    return output;
}

void matmul_coalesced_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    dispatch(dtype, "matmul", [&](auto zero) {
        attributes.push_back(kernel_attributes<matmul_coalesced_kernel<decltype(zero)>>("matmul.coalesced", THREADS));
    });
}

}  // namespace kl
