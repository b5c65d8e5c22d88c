// matmul, rung 13 of 16: persistent
// Idea      Blocks stay on their SM and loop over tiles. Loads of the next tile run under the epilogue of this one, and
//           TMA writes the outputs.
// Predicts  Per tile, max(K · t_k, t_epilogue) instead of K · t_k + t_epilogue + t_prologue. At K = 4096 in 16 bits a
//           tile's rounding is about 1/100 of its products.
// Limit now The last wave: few tiles leave SMs idle.
// Next      `stream_k`: share the last waves' k-tiles.
//
// Shared code: the body in persistent.cuh, of which `stream_k` launches the same kernel with another schedule. The
// kernel with plain loads serves every rung on Hopper. It takes operands that TMA cannot read and that are not worth a
// padded copy (pad_operands.cu). Plain loads are so slow that it always shares tiles.

#include "matmul/persistent.cuh"

namespace kl {
namespace {

using namespace persistent;

template <typename Loader>
__global__ void __launch_bounds__((Loader::WARPGROUPS + CONSUMERS) * WARPGROUP, 1)
    matmul_persistent_kernel(typename Loader::Element* c, const __grid_constant__ CUtensorMap to, bool by_tma,
                             const __grid_constant__ typename Loader::Source from, Tiled p, ClusterRaster order,
                             StreamKSchedule schedule, Workspace space) {
    multiply_tiles<Loader>({c, to, by_tma}, from, p, order, schedule, space, IdentityEpilogue{});
}

}  // namespace

void launch_plain(const HopperCall& call, ScalarType dtype, const Launch& on) {
    dispatch(dtype, "matmul", [&](auto zero) {
        using Loader = PlainLoader<decltype(zero)>;
        launch<matmul_persistent_kernel<Loader>, Loader>("matmul.persistent", call, plain_source<decltype(zero)>(call),
                                                         plain_order(call.tiled), on, true);
    });
}

void launch_persistent(const HopperCall& call, ScalarType dtype, const Launch& on, bool share) {
    dispatch_hopper(call, dtype, [&](auto zero, auto a_major, auto b_major) {
        using Loader = TmaLoader<decltype(zero), a_major(), b_major()>;
        launch<matmul_persistent_kernel<Loader>, Loader>("matmul.persistent", call, call.operands(),
                                                         pair_order(call.tiled, BM, BN), on, share);
    });
}

Tensor matmul_persistent(const Tensor& input, const Tensor& other, bool allow_tf32) {
    return run_hopper(input, other, allow_tf32, "persistent", [&](const HopperCall& call, const Launch& on) {
        launch_persistent(call, input.scalar_type(), on, false);
    });
}

void matmul_persistent_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    dispatch(dtype, "matmul", [&](auto zero) {
        using T = decltype(zero);
        using ByTma = TmaLoader<T, Major::K, sizeof(T) == 2 ? Major::MN : Major::K>;
        attributes.push_back(
            kernel_attributes<matmul_persistent_kernel<ByTma>>("matmul.persistent", 3 * WARPGROUP, SHARED));
        attributes.push_back(kernel_attributes<matmul_persistent_kernel<PlainLoader<T>>>("matmul.persistent plain",
                                                                                         4 * WARPGROUP, SHARED));
    });
    pad_operands_attributes(attributes, dtype);
}

}  // namespace kl
