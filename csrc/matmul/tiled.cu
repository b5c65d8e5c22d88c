// matmul, rung 3 of 16: tiled
// Idea      A block of 32x32 threads copies 32x32 tiles of A and B into shared memory; 32 threads use each element.
// Predicts  Global loads per multiply-add: 2 / 32 instead of 2. Arithmetic intensity in float32: 2 · 32 · 32 / (4 · 64)
//           = 8 flop per byte.
// Limit now Two shared loads per multiply-add.
// Next      `thread_tile`: each thread computes 8x8 outputs.

#include "matmul/matmul.cuh"

namespace kl {
namespace {

constexpr int TILE = 32;

// A block makes 32×32 outputs, one per thread, and walks K in tiles of 32: what a thread loads, 32 threads use.
template <typename T>
__global__ void __launch_bounds__(TILE* TILE) matmul_tiled_kernel(T* c, const T* a, const T* b, Product p) {
    __shared__ float a_tile[TILE][TILE + 1];  // [m][k]; the odd pitch spreads a column over all banks
    __shared__ float b_tile[TILE][TILE + 1];  // [k][n]
    const int64_t tiles_m = ceil_div(p.M, TILE), tiles_n = ceil_div(p.N, TILE);
    const int64_t tile = blockIdx.x, batch = tile / (tiles_m * tiles_n), within = tile % (tiles_m * tiles_n);
    const int64_t m0 = within / tiles_n * TILE, n0 = within % tiles_n * TILE;
    int64_t a_offset, b_offset;
    p.batch_offsets(batch, &a_offset, &b_offset);
    a += a_offset;
    b += b_offset;

    // The threads of a warp load along the axis in which the operand lies closer together.
    const int lane = threadIdx.x % TILE, warp = threadIdx.x / TILE;
    const bool a_along_k = p.a_k <= p.a_m, b_along_n = p.b_n <= p.b_k;
    const int am = a_along_k ? warp : lane, ak = a_along_k ? lane : warp;
    const int bk = b_along_n ? warp : lane, bn = b_along_n ? lane : warp;

    float sum = 0.0f;
    for (int64_t k0 = 0; k0 < p.K; k0 += TILE) {
        const bool a_inside = m0 + am < p.M && k0 + ak < p.K, b_inside = k0 + bk < p.K && n0 + bn < p.N;
        a_tile[am][ak] = a_inside ? to_float(a[(m0 + am) * p.a_m + (k0 + ak) * p.a_k]) : 0.0f;
        b_tile[bk][bn] = b_inside ? to_float(b[(k0 + bk) * p.b_k + (n0 + bn) * p.b_n]) : 0.0f;
        __syncthreads();
#pragma unroll
        for (int k = 0; k < TILE; ++k) sum += a_tile[warp][k] * b_tile[k][lane];
        __syncthreads();  // before the next tile overwrites this one
    }
    const int64_t m = m0 + warp, n = n0 + lane;
    if (m < p.M && n < p.N) c[(batch * p.M + m) * p.N + n] = from_float<T>(sum);
}

}  // namespace

Tensor matmul_tiled(const Tensor& input, const Tensor& other) {
    auto [p, output] = prepare(input, other);
    if (output.numel() == 0) return output;
    const Launch launch(input);
    dispatch(input.scalar_type(), "matmul", [&, &p = p, &output = output](auto zero) {
        using T = decltype(zero);
        const auto grid = grid_size(p.batches * ceil_div(p.M, TILE) * ceil_div(p.N, TILE));
        matmul_tiled_kernel<T><<<grid, TILE * TILE, 0, launch.stream>>>(static_cast<T*>(output.data_ptr()),
                                                                        static_cast<const T*>(input.data_ptr()),
                                                                        static_cast<const T*>(other.data_ptr()), p);
    });
    KL_LAUNCH_CHECK();
    return output;
}

void matmul_tiled_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    dispatch(dtype, "matmul", [&](auto zero) {
        attributes.push_back(kernel_attributes<matmul_tiled_kernel<decltype(zero)>>("matmul.tiled", TILE * TILE));
    });
}

}  // namespace kl
