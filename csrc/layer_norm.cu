// LayerNorm: (x − mean x) / √(var x + eps) · weight + bias over the last dimension (Ba, Kiros and Hinton, arXiv:1607.06450).
//
//   variant    the one idea it adds                                         what limits it now
//   naive      one thread a row; backward, one thread a column as well      uncoalesced reads; few columns, few threads
//   block      one block a row, 16-byte loads; the weights' gradients by    rows read three times; backward five
//              blocks of columns, in two stages that keep an order
//   registers  rows in registers of as many threads as suit their length,   rows that fill an SM's registers
//              mean and deviations in two passes there; backward, a block
//              keeps the sums of its columns over all its rows, and the
//              next rows are under way while one is worked on
//   cluster    long rows spread over the SMs of a cluster, which stays      memory bandwidth
//              for the longest; there, and backward, the first pass over
//              the next row hides how long they take to agree on one
//
// Any strides of rows. The steps themselves are in norm.cuh, norm/registers.cuh, norm/short_rows.cuh, norm/smem_pipeline.cuh,
// norm/persistent_cluster.cuh, norm/backward.cuh, norm/backward_short.cuh and norm/backward_persistent.cuh, which the normalisations share.
// Backward, Hopper shares the longest 16-bit rows of `registers` between two blocks, which stay.

#include "norm/launch.cuh"

namespace kl {
namespace {

constexpr bool CENTRED = true, RESIDUAL = false;

// ---- naive ---------------------------------------------------------------------------------------------------------

template <typename T>
__global__ void layer_norm_naive_kernel(__grid_constant__ const NormForward<T> p) {
    norm_naive<T, CENTRED, RESIDUAL>(p);
}

template <typename T>
__global__ void layer_norm_backward_naive_kernel(__grid_constant__ const NormBackward<T> p) {
    norm_backward_naive<T, CENTRED, RESIDUAL>(p);
}

template <typename T>
__global__ void layer_norm_backward_naive_weights_kernel(const NormWeights<T> w,
                                                         __grid_constant__ const NormBackward<T> p) {
    norm_weights_naive<T, CENTRED>(w, p);
}

// ---- block ---------------------------------------------------------------------------------------------------------

template <typename T>
__global__ void __launch_bounds__(NORM_THREADS) layer_norm_block_kernel(__grid_constant__ const NormForward<T> p) {
    norm_block<T, CENTRED, RESIDUAL>(p);
}

template <typename T>
__global__ void __launch_bounds__(NORM_THREADS)
    layer_norm_backward_block_kernel(__grid_constant__ const NormBackward<T> p) {
    norm_backward_block<T, CENTRED, RESIDUAL>(p);
}

template <typename T>
__global__ void layer_norm_backward_block_weights_kernel(const NormWeights<T> w,
                                                         __grid_constant__ const NormBackward<T> p) {
    norm_weights_block<T, CENTRED>(w, p);
}

template <typename T>
__global__ void __launch_bounds__(SUM_THREADS)
    layer_norm_backward_block_sum_kernel(const NormWeights<T> w, int64_t length) {
    norm_weights_sum(w, length);
}

// ---- registers, cluster --------------------------------------------------------------------------------------------

template <typename T, int V, bool WHOLE, bool CLUSTER>
__global__ void __launch_bounds__(ROW_THREADS, BLOCKS_AN_SM<WHOLE>)
    layer_norm_registers_kernel(__grid_constant__ const NormForward<T> p) {
    norm_registers<T, CENTRED, RESIDUAL, V, WHOLE, CLUSTER>(p);
}

template <typename T, int ROWS>
__global__ void __launch_bounds__(MIN_BLOCK, SHORT_NORM_BLOCKS<T, CENTRED, RESIDUAL, ROWS>)
    layer_norm_registers_short_kernel(__grid_constant__ const ShortNorm<T> p) {
    norm_short<T, CENTRED, RESIDUAL, ROWS>(p);
}

template <typename T, typename TEAM>
__global__ void __launch_bounds__(TEAM::THREADS, THREADS_AN_SM / TEAM::THREADS)
    layer_norm_registers_team_kernel(__grid_constant__ const ShortNorm<T> p) {
    norm_team<T, CENTRED, RESIDUAL, TEAM>(p);
}

template <typename T, typename SHAPE, bool CLUSTER>
__global__ void __launch_bounds__(SHAPE::THREADS, SHAPE::BLOCKS)
    layer_norm_registers_slots_kernel(__grid_constant__ const ShortNorm<T> p) {
    norm_slots<T, CENTRED, RESIDUAL, SHAPE, CLUSTER>(p);
}

template <typename T, typename STAY>
__global__ void __launch_bounds__(STAY::THREADS, 1)
    layer_norm_registers_staying_kernel(__grid_constant__ const ShortNorm<T> p) {
    norm_staying<T, STAY>(p);
}

template <typename T, typename CREW>
__global__ void __launch_bounds__(CREW::THREADS, CREW::BLOCKS)
    layer_norm_backward_registers_short_kernel(const NormWeights<T> w, __grid_constant__ const NormBackward<T> p) {
    norm_backward_short<T, CENTRED, CREW>(w, p);
}

template <typename T, typename STAY>
__global__ void __launch_bounds__(STAY::THREADS, 1)
    layer_norm_backward_registers_staying_kernel(const NormWeights<T> w, __grid_constant__ const NormBackward<T> p) {
    norm_backward_staying<T, CENTRED, STAY>(w, p);
}

template <typename T, int V, bool WHOLE, bool CLUSTER>
__global__ void __launch_bounds__(ROW_THREADS, 1)
    layer_norm_backward_registers_kernel(const NormWeights<T> w, __grid_constant__ const NormBackward<T> p) {
    norm_backward_registers<T, CENTRED, RESIDUAL, V, WHOLE, CLUSTER>(w, p);
}

template <typename T>
__global__ void __launch_bounds__(SUM_THREADS)
    layer_norm_backward_registers_sum_kernel(const NormWeights<T> w, int64_t length) {
    norm_weights_sum(w, length);
}

// ---- host ----------------------------------------------------------------------------------------------------------

struct LayerNorm {
    static constexpr const char *NAME = "layer_norm", *BACKWARD_NAME = "layer_norm_backward";
    static constexpr bool CENTRED = kl::CENTRED, RESIDUAL = kl::RESIDUAL;
    using FullTeams = std::tuple<>;
    using Teams = std::tuple<Team<4, 1, 512, 1024>, Team<2, 2, 1024, 4096>>;
    using Slots = SlotShape<1, 4, 512, 3>;
    using StayingForward = std::tuple<StayingShape<8, 256, 8, 1, true>, StayingShape<4, 512, 8, 2, false>>;
    using Crews = std::tuple<CrewShape<1, 1, 512, 2>, CrewShape<2, 1, 256, 2>, CrewShape<2, 2, 256, 2>>;
    using Staying = Stay<2, 3, 1024>;
    template <typename T>
    static constexpr auto naive() {
        return layer_norm_naive_kernel<T>;
    }
    template <typename T>
    static constexpr auto block() {
        return layer_norm_block_kernel<T>;
    }
    template <typename T, int V, bool WHOLE, bool CLUSTER>
    static constexpr auto registers() {
        return layer_norm_registers_kernel<T, V, WHOLE, CLUSTER>;
    }
    template <typename T, int ROWS>
    static constexpr auto short_rows() {
        return layer_norm_registers_short_kernel<T, ROWS>;
    }
    template <typename T, typename TEAM>
    static constexpr auto team() {
        return layer_norm_registers_team_kernel<T, TEAM>;
    }
    template <typename T, bool CLUSTER>
    static constexpr auto slots() {
        return layer_norm_registers_slots_kernel<T, Slots, CLUSTER>;
    }
    template <typename T>
    static constexpr auto backward_naive() {
        return layer_norm_backward_naive_kernel<T>;
    }
    template <typename T>
    static constexpr auto backward_naive_weights() {
        return layer_norm_backward_naive_weights_kernel<T>;
    }
    template <typename T>
    static constexpr auto backward_block() {
        return layer_norm_backward_block_kernel<T>;
    }
    template <typename T>
    static constexpr auto backward_block_weights() {
        return layer_norm_backward_block_weights_kernel<T>;
    }
    template <typename T>
    static constexpr auto backward_block_sum() {
        return layer_norm_backward_block_sum_kernel<T>;
    }
    template <typename T, int V, bool WHOLE, bool CLUSTER>
    static constexpr auto backward_registers() {
        return layer_norm_backward_registers_kernel<T, V, WHOLE, CLUSTER>;
    }
    template <typename T, typename STAY>
    static constexpr auto staying() {
        return layer_norm_registers_staying_kernel<T, STAY>;
    }
    template <typename T, typename CREW>
    static constexpr auto backward_short() {
        return layer_norm_backward_registers_short_kernel<T, CREW>;
    }
    template <typename T>
    static constexpr auto backward_staying() {
        return layer_norm_backward_registers_staying_kernel<T, Staying>;
    }
    template <typename T>
    static constexpr auto backward_registers_sum() {
        return layer_norm_backward_registers_sum_kernel<T>;
    }
};

}  // namespace

template <NormStep STEP>
std::tuple<Tensor, Tensor> layer_norm(const Tensor& input, const std::optional<Tensor>& weight,
                                      const std::optional<Tensor>& bias, double eps, bool keep) {
    auto [output, sum, stats] = norm_forward<LayerNorm>(input, std::nullopt, weight, bias, eps, keep, STEP);
    return {output, stats};
}

template <NormStep STEP>
std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& grad, const Tensor& input,
                                                       const std::optional<Tensor>& weight, const Tensor& stats,
                                                       bool needs_input, bool needs_weight, bool needs_bias) {
    const NormNeeds needs{needs_input, needs_weight, needs_bias};
    return norm_backward<LayerNorm>(grad, std::nullopt, input, weight, stats, needs, STEP);
}

template std::tuple<Tensor, Tensor> layer_norm<NormStep::naive>(const Tensor&, const std::optional<Tensor>&,
                                                                const std::optional<Tensor>&, double, bool);
template std::tuple<Tensor, Tensor> layer_norm<NormStep::block>(const Tensor&, const std::optional<Tensor>&,
                                                                const std::optional<Tensor>&, double, bool);
template std::tuple<Tensor, Tensor> layer_norm<NormStep::registers>(const Tensor&, const std::optional<Tensor>&,
                                                                    const std::optional<Tensor>&, double, bool);
template std::tuple<Tensor, Tensor> layer_norm<NormStep::cluster>(const Tensor&, const std::optional<Tensor>&,
                                                                  const std::optional<Tensor>&, double, bool);
template std::tuple<Tensor, Tensor, Tensor> layer_norm_backward<NormStep::naive>(const Tensor&, const Tensor&,
                                                                                 const std::optional<Tensor>&,
                                                                                 const Tensor&, bool, bool, bool);
template std::tuple<Tensor, Tensor, Tensor> layer_norm_backward<NormStep::block>(const Tensor&, const Tensor&,
                                                                                 const std::optional<Tensor>&,
                                                                                 const Tensor&, bool, bool, bool);
template std::tuple<Tensor, Tensor, Tensor> layer_norm_backward<NormStep::registers>(const Tensor&, const Tensor&,
                                                                                     const std::optional<Tensor>&,
                                                                                     const Tensor&, bool, bool, bool);
template std::tuple<Tensor, Tensor, Tensor> layer_norm_backward<NormStep::cluster>(const Tensor&, const Tensor&,
                                                                                   const std::optional<Tensor>&,
                                                                                   const Tensor&, bool, bool, bool);

void layer_norm_kernel_facts(std::vector<KernelFacts>& facts, ScalarType dtype) {
    norm_kernel_facts<LayerNorm>(facts, dtype);
}

}  // namespace kl
