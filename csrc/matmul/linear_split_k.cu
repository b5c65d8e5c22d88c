// linear, rung 5 of 6: split_k
// Idea      matmul's `split_k` with an epilogue: small tiles, whose K a cluster of blocks may share.
// Predicts  With T tiles on S SMs, min(T · splits, S) of them work instead of min(T, S). 777 rows by 3,072 columns are 84
//           tiles of `persistent`'s 128×256 for 132 SMs: up to 1.6x.
// Limit now As matmul's; the epilogue, which runs under no product.
// Next      `skinny`: at most 16 rows.
//
// Both operands lie along K and are such that TMA reads them: 16-bit rows that begin at multiples of 16 bytes. The block
// that adds up a unit of 32 columns applies bias and activation to it. The caller passes the tile and the number of
// splits, as for matmul.

#include "matmul/linear.cuh"
#include "matmul/split_k.cuh"

namespace kl {
namespace {

using namespace split_k;

// Bias and activation on the float32 sums. Of each eight columns a thread has two neighbours in two rows.
template <typename Element>
struct BiasActSums {
    BiasActivation<Element> formula;

    template <typename T, int COLUMNS>
    __device__ void store(float (&sum)[COLUMNS / 2], T* c, int64_t offset, const Tiled& p, int m0, int n0) const {
        if (formula.kept != nullptr) store_outputs<T, COLUMNS>(sum, formula.kept + offset, p, m0, n0);
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; ++j) {
            const int n = n0 + j * 8 + static_cast<int>(threadIdx.x) % 4 * 2;
            const auto columns = formula.template columns<2>(n, p.N - n);
            float (&x)[4] = *reinterpret_cast<float (*)[4]>(sum + j * 4);
#pragma unroll
            for (int e = 0; e < 4; ++e) x[e] += columns.bias[e % 2];
            kl::activate(formula.activation, x);
        }
        store_outputs<T, COLUMNS>(sum, c + offset, p, m0, n0);
    }
};

template <typename T, typename Tile>
__global__ void __launch_bounds__(Tile::THREADS, 1)
    linear_split_k_kernel(T* c, const __grid_constant__ TmaOperands from, Tiled p,
                          const __grid_constant__ SplitKScheduler scheduler,
                          const __grid_constant__ BiasActSums<T> epilogue) {
    multiply_part<T, Major::K, Major::K, Tile>(c, from, p, scheduler, epilogue);
}

}  // namespace

std::tuple<Tensor, Tensor> linear_split_k(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                                          const std::string& activation, bool keep, int64_t tile_m, int64_t tile_n,
                                          int64_t splits) {
    const LinearCall layer = prepare_linear(input, weight, bias, activation, keep);
    const ScalarType dtype = input.scalar_type();
    KL_CHECK(dtype != ScalarType::Float, "linear: split_k takes float16 and bfloat16");
    if (layer.product.K == 0) return linear_naive(input, weight, bias, activation, keep);  // no k-tile to wait for
    const HopperCall call = prepare_hopper({layer.product, layer.output}, input, weight, false, "linear", "split_k");
    if (call.done()) return layer.outputs();
    KL_CHECK(call.by_tma() && call.a_major == Major::K && call.b_major == Major::K,
             "linear: split_k takes dense rows that begin at multiples of 16 bytes");
    const Launch on(input);
    dispatch_16bit(dtype, "linear", [&](auto zero) {
        using T = decltype(zero);
        check_splits("linear", splits, ceil_div(call.tiled.K, BLOCK_K<T>));
        bool launched = false;
        each_tile([&](auto tile) {
            using Tile = decltype(tile);
            if (tile_m != Tile::BM || tile_n != Tile::BN) return;
            launch_tiles<linear_split_k_kernel<T, Tile>, Tile, T, Major::K, Major::K>(
                "linear.split_k", call, log2_of(splits), false, on, BiasActSums<T>{layer.epilogue<T>()});
            launched = true;
        });
        KL_CHECK(launched, "linear: split_k has no tile of ", tile_m, "x", tile_n);
    });
    return layer.outputs();
}

void linear_split_k_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    if (dtype == ScalarType::Float) return;
    dispatch_16bit(dtype, "linear", [&](auto zero) {
        using T = decltype(zero);
        const auto add = [&](const char* name, auto tile) {
            using Tile = decltype(tile);
            attributes.push_back(kernel_attributes<linear_split_k_kernel<T, Tile>>(name, Tile::THREADS, Tile::SHARED));
        };
        add("linear.split_k 128x192", Wide{});
        add("linear.split_k 128x128", Square{});
        add("linear.split_k 128x64", Narrow{});
        add("linear.split_k 64x64", Small{});
    });
}

}  // namespace kl
