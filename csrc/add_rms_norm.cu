// Residual sum and RMSNorm of it: sum = input + residual, rounded; sum / √(mean sum² + eps) · weight. Both are returned.
//
//   variant    the one idea it adds                                         what limits it now
//   naive      one thread a row; backward, one thread a column as well      uncoalesced reads; few columns, few threads
//   block      one block a row, 16-byte loads; the weight's gradient by     the sum read again; backward four reads
//              blocks of columns, in two stages that keep an order
//   registers  the sum stays in registers of as many threads as suit its    rows that fill an SM's registers
//              length; backward, a block keeps the sums of its columns
//              over all its rows, and the next row is under way
//   cluster    long rows spread over the SMs of a cluster                   memory bandwidth
//
// Any strides of rows. The steps themselves are in norm.cuh, norm/registers.cuh, norm/short_rows.cuh, norm/smem_pipeline.cuh and
// norm/backward.cuh, which the normalisations share.

#include "norm/launch.cuh"

namespace kl {
namespace {

constexpr bool CENTRED = false, RESIDUAL = true;

// ---- naive ---------------------------------------------------------------------------------------------------------

template <typename T>
__global__ void add_rms_norm_naive_kernel(__grid_constant__ const NormForward<T> p) {
    norm_naive<T, CENTRED, RESIDUAL>(p);
}

template <typename T>
__global__ void add_rms_norm_backward_naive_kernel(__grid_constant__ const NormBackward<T> p) {
    norm_backward_naive<T, CENTRED, RESIDUAL>(p);
}

template <typename T>
__global__ void add_rms_norm_backward_naive_weights_kernel(const NormWeights<T> w,
                                                           __grid_constant__ const NormBackward<T> p) {
    norm_weights_naive<T, CENTRED>(w, p);
}

// ---- block ---------------------------------------------------------------------------------------------------------

template <typename T>
__global__ void __launch_bounds__(NORM_THREADS) add_rms_norm_block_kernel(__grid_constant__ const NormForward<T> p) {
    norm_block<T, CENTRED, RESIDUAL>(p);
}

template <typename T>
__global__ void __launch_bounds__(NORM_THREADS)
    add_rms_norm_backward_block_kernel(__grid_constant__ const NormBackward<T> p) {
    norm_backward_block<T, CENTRED, RESIDUAL>(p);
}

template <typename T>
__global__ void add_rms_norm_backward_block_weights_kernel(const NormWeights<T> w,
                                                           __grid_constant__ const NormBackward<T> p) {
    norm_weights_block<T, CENTRED>(w, p);
}

template <typename T>
__global__ void __launch_bounds__(SUM_THREADS)
    add_rms_norm_backward_block_sum_kernel(const NormWeights<T> w, int64_t length) {
    norm_weights_sum(w, length);
}

// ---- registers, cluster --------------------------------------------------------------------------------------------

template <typename T, int V, bool WHOLE, bool CLUSTER>
__global__ void __launch_bounds__(ROW_THREADS, BLOCKS_AN_SM<WHOLE>)
    add_rms_norm_registers_kernel(__grid_constant__ const NormForward<T> p) {
    norm_registers<T, CENTRED, RESIDUAL, V, WHOLE, CLUSTER>(p);
}

template <typename T, int ROWS>
__global__ void __launch_bounds__(MIN_BLOCK, SHORT_NORM_BLOCKS<T, CENTRED, RESIDUAL, ROWS>)
    add_rms_norm_registers_short_kernel(__grid_constant__ const ShortNorm<T> p) {
    norm_short<T, CENTRED, RESIDUAL, ROWS>(p);
}

template <typename T, typename TEAM>
__global__ void __launch_bounds__(TEAM::THREADS, THREADS_AN_SM / TEAM::THREADS)
    add_rms_norm_registers_team_kernel(__grid_constant__ const ShortNorm<T> p) {
    norm_team<T, CENTRED, RESIDUAL, TEAM>(p);
}

template <typename T, typename SHAPE, bool CLUSTER>
__global__ void __launch_bounds__(SHAPE::THREADS, SHAPE::BLOCKS)
    add_rms_norm_registers_slots_kernel(__grid_constant__ const ShortNorm<T> p) {
    norm_slots<T, CENTRED, RESIDUAL, SHAPE, CLUSTER>(p);
}

template <typename T, int V, bool WHOLE, bool CLUSTER>
__global__ void __launch_bounds__(ROW_THREADS, 1)
    add_rms_norm_backward_registers_kernel(const NormWeights<T> w, __grid_constant__ const NormBackward<T> p) {
    norm_backward_registers<T, CENTRED, RESIDUAL, V, WHOLE, CLUSTER>(w, p);
}

template <typename T>
__global__ void __launch_bounds__(SUM_THREADS)
    add_rms_norm_backward_registers_sum_kernel(const NormWeights<T> w, int64_t length) {
    norm_weights_sum(w, length);
}

// ---- host ----------------------------------------------------------------------------------------------------------

struct AddRmsNorm {
    static constexpr const char *NAME = "add_rms_norm", *BACKWARD_NAME = "add_rms_norm_backward";
    static constexpr bool CENTRED = kl::CENTRED, RESIDUAL = kl::RESIDUAL;
    // Few vectors a thread, where nearly all threads have theirs: idle ones cost more than that gains.
    using FullTeams =
        std::tuple<Team<1, 1, 896, 1024>, Team<1, 1, 1792, 2048>, Team<1, 1, 3584, 4096>, Team<1, 2, 14336, 16384>>;
    using Teams = std::tuple<Team<1, 4, 1024, 16384>>;
    using Slots = SlotShape<1, 4, 512, 3>;
    template <typename T>
    static constexpr auto naive() {
        return add_rms_norm_naive_kernel<T>;
    }
    template <typename T>
    static constexpr auto block() {
        return add_rms_norm_block_kernel<T>;
    }
    template <typename T, int V, bool WHOLE, bool CLUSTER>
    static constexpr auto registers() {
        return add_rms_norm_registers_kernel<T, V, WHOLE, CLUSTER>;
    }
    template <typename T, int ROWS>
    static constexpr auto short_rows() {
        return add_rms_norm_registers_short_kernel<T, ROWS>;
    }
    template <typename T, typename TEAM>
    static constexpr auto team() {
        return add_rms_norm_registers_team_kernel<T, TEAM>;
    }
    template <typename T, bool CLUSTER>
    static constexpr auto slots() {
        return add_rms_norm_registers_slots_kernel<T, Slots, CLUSTER>;
    }
    template <typename T>
    static constexpr auto backward_naive() {
        return add_rms_norm_backward_naive_kernel<T>;
    }
    template <typename T>
    static constexpr auto backward_naive_weights() {
        return add_rms_norm_backward_naive_weights_kernel<T>;
    }
    template <typename T>
    static constexpr auto backward_block() {
        return add_rms_norm_backward_block_kernel<T>;
    }
    template <typename T>
    static constexpr auto backward_block_weights() {
        return add_rms_norm_backward_block_weights_kernel<T>;
    }
    template <typename T>
    static constexpr auto backward_block_sum() {
        return add_rms_norm_backward_block_sum_kernel<T>;
    }
    template <typename T, int V, bool WHOLE, bool CLUSTER>
    static constexpr auto backward_registers() {
        return add_rms_norm_backward_registers_kernel<T, V, WHOLE, CLUSTER>;
    }
    template <typename T>
    static constexpr auto backward_registers_sum() {
        return add_rms_norm_backward_registers_sum_kernel<T>;
    }
};

}  // namespace

template <NormStep STEP>
std::tuple<Tensor, Tensor, Tensor> add_rms_norm(const Tensor& input, const Tensor& residual,
                                                const std::optional<Tensor>& weight, double eps, bool keep) {
    return norm_forward<AddRmsNorm>(input, residual, weight, std::nullopt, eps, keep, STEP);
}

template <NormStep STEP>
std::tuple<Tensor, Tensor> add_rms_norm_backward(const Tensor& grad, const Tensor& grad_sum, const Tensor& sum,
                                                 const std::optional<Tensor>& weight, const Tensor& stats,
                                                 bool needs_input, bool needs_weight) {
    const NormNeeds needs{needs_input, needs_weight, false};
    auto [grad_input, grad_weight, no_bias] =
        norm_backward<AddRmsNorm>(grad, grad_sum, sum, weight, stats, needs, STEP);
    return {grad_input, grad_weight};
}

template std::tuple<Tensor, Tensor, Tensor> add_rms_norm<NormStep::naive>(const Tensor&, const Tensor&,
                                                                          const std::optional<Tensor>&, double, bool);
template std::tuple<Tensor, Tensor, Tensor> add_rms_norm<NormStep::block>(const Tensor&, const Tensor&,
                                                                          const std::optional<Tensor>&, double, bool);
template std::tuple<Tensor, Tensor, Tensor> add_rms_norm<NormStep::registers>(const Tensor&, const Tensor&,
                                                                              const std::optional<Tensor>&, double,
                                                                              bool);
template std::tuple<Tensor, Tensor, Tensor> add_rms_norm<NormStep::cluster>(const Tensor&, const Tensor&,
                                                                            const std::optional<Tensor>&, double, bool);
template std::tuple<Tensor, Tensor> add_rms_norm_backward<NormStep::naive>(const Tensor&, const Tensor&, const Tensor&,
                                                                           const std::optional<Tensor>&, const Tensor&,
                                                                           bool, bool);
template std::tuple<Tensor, Tensor> add_rms_norm_backward<NormStep::block>(const Tensor&, const Tensor&, const Tensor&,
                                                                           const std::optional<Tensor>&, const Tensor&,
                                                                           bool, bool);
template std::tuple<Tensor, Tensor> add_rms_norm_backward<NormStep::registers>(const Tensor&, const Tensor&,
                                                                               const Tensor&,
                                                                               const std::optional<Tensor>&,
                                                                               const Tensor&, bool, bool);
template std::tuple<Tensor, Tensor> add_rms_norm_backward<NormStep::cluster>(const Tensor&, const Tensor&,
                                                                             const Tensor&,
                                                                             const std::optional<Tensor>&,
                                                                             const Tensor&, bool, bool);

void add_rms_norm_kernel_facts(std::vector<KernelFacts>& facts, ScalarType dtype) {
    norm_kernel_facts<AddRmsNorm>(facts, dtype);
}

}  // namespace kl
