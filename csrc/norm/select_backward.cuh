// layer_norm, rms_norm, add_rms_norm: selects the kernel of the backward pass of every rung from `registers` on. The
// launchers of the three kernels choose nothing.
//
//   kernel                    takes                                                       selected for rows that
//   backward_short.cuh        16-bit rows of whole vectors, evenly apart, no residual     nearly fill a warp or two
//   backward_persistent.cuh   the same, on GPUs with clusters                             nearly fill a block
//   backward.cuh              any rows                                                    all others
//
// kernel_ladder/selection does not choose here. The choice needs the strides and addresses of up to five operands, which
// this code holds for the launch; Python would read them once more in every call.
#pragma once

#include <tuple>

#include "norm/backward.cuh"
#include "norm/backward_persistent.cuh"
#include "norm/backward_short.cuh"

namespace kl {

// Whether a row keeps more than three quarters of the threads busy that hold `reach` vectors. Shorter rows are faster with
// fewer threads, or fewer vectors per thread.
constexpr bool fills(int64_t vectors, int64_t reach) { return reach / 4 * 3 < vectors && vectors <= reach; }

template <class Op, typename T>
void launch_backward(const NormWeights<T>& w, const NormBackward<T>& p, const Tensor& like, const Launch& launch) {
    if (p.grad_input == nullptr && !w.wanted()) return;
    const bool vectorized = p.in.template vectors<T>(p.length) && p.g.template vectors<T>(p.length) &&
                            p.gs.template vectors<T>(p.length) && p.gi.template vectors<T>(p.length) &&
                            are_even(p.parameter.whole, p.in, p.g, p.gs, p.gi);
    if constexpr (sizeof(T) == 2 && !Op::HAS_RESIDUAL) {
        const int64_t vectors = p.length / Vec<T>::size;
        const auto by_warps = [&](auto shape) {
            using SHAPE = decltype(shape);
            if (!vectorized || !fills(vectors, SHAPE::REACH)) return false;
            launch_backward_warps<Op, SHAPE>(w, p, like, launch);
            return true;
        };
        if (std::apply([&](auto... shape) { return (by_warps(shape) || ...); }, typename Op::WarpsPerRow{})) return;
        if (vectorized && fills(vectors, MAX_BLOCK_CHUNKS) && has_room_for_backward_persistent<Op, T>(launch)) {
            return launch_backward_persistent<Op>(w, p, like, launch);
        }
    }
    launch_backward_rows<Op>(w, p, vectorized, like, launch);
}

}  // namespace kl
