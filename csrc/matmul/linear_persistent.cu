// linear, rung 4 of 6: persistent
// Idea      matmul's `persistent` with an epilogue: bias and activation on the float32 sums, before they are rounded.
// Predicts  No second kernel that reads and writes M · N outputs. On a tile the epilogue takes as long as the products
//           of four or five k-tiles. One warpgroup runs two k-tiles ahead of the other, so each multiplies under the
//           other's epilogue.
// Limit now What the other warpgroup's products do not hide of the epilogue.
// Next      `split_k`: smaller tiles, whose K blocks share, where tiles are few.
//
// Shared code: the body of persistent.cuh, stream-K where it pays (`sharing_pays`), and padded copies of operands that
// TMA cannot read (pad_operands.cu). With K = 0 there is no k-tile: linear's `naive` kernel writes the bias.

#include "matmul/linear.cuh"
#include "matmul/persistent.cuh"

namespace kl {
namespace {

using namespace persistent;

// linear's epilogue: bias and activation on the float32 sums.
template <typename Element>
struct BiasActEpilogue {
    BiasActivation<Element> formula;
    CUtensorMap kept;

    // A tile's bias, kept in registers while the tile is multiplied. Of each 64 columns lane l holds columns 2l and 2l
    // + 1: lane 4j + t has what lanes t, t + 4, … need of columns 8j … 8j + 7.
    template <typename T>
    struct Tile {
        const BiasActEpilogue& layer;
        T bias[PARTS_N][2];

        __device__ Tile(const BiasActEpilogue& layer, int n0, int N) : layer(layer) {
            const auto& from = layer.formula;
#pragma unroll
            for (int i = 0; i < 2 * PARTS_N; ++i) {
                const int n = n0 + i / 2 * PANEL_X + static_cast<int>(threadIdx.x) % WARP * 2 + i % 2;
                const bool inside = from.bias != nullptr && n < N;
                bias[i / 2][i % 2] = inside ? from.bias[n * from.bias_step] : from_float<T>(0.0f);
            }
        }
        __device__ void activate(float (&d)[PANEL_X / 2], int part) const {
            const float first = to_float(bias[part][0]), second = to_float(bias[part][1]);
#pragma unroll
            for (int j = 0; j < PANEL_X / 8; ++j) {
                const int lane = j * 4 + static_cast<int>(threadIdx.x) % 4;
                const float b[2] = {__shfl_sync(FULL_MASK, first, lane), __shfl_sync(FULL_MASK, second, lane)};
#pragma unroll
                for (int e = 0; e < 4; ++e) d[j * 4 + e] += b[e % 2];
            }
            kl::activate(layer.formula.activation, d);
        }
        __device__ void store(float (&sum)[BN / 2], const OutputTarget<T>& to, const Tiled& p, uint32_t panels,
                              int batch, int m0, int n0) const {
            const OutputTarget<T> kept{layer.formula.kept, layer.kept, to.by_tma};
            if constexpr (sizeof(T) == 4) {
                const int64_t offset = batch * p.c_batch;
                if (kept.c != nullptr) store_outputs<T, BN>(sum, kept.c + offset, p, m0, n0);
#pragma unroll
                for (int part = 0; part < PARTS_N; ++part) activate(columns_of(sum, part), part);
                store_outputs<T, BN>(sum, to.c + offset, p, m0, n0);
            } else {
#pragma unroll
                for (int part = 0; part < PARTS_N; ++part) {
                    auto& d = columns_of(sum, part);
                    int panel = part % 2;
                    if (kept.c != nullptr) {
                        store_columns(d, kept, p, panels, batch, m0, n0 + part * PANEL_X);
                        panel = 1;
                    }
                    activate(d, part);
                    store_columns(d, to, p, panels + panel * PANEL_BYTES, batch, m0, n0 + part * PANEL_X);
                }
            }
        }
    };
};

template <typename Loader>
__global__ void __launch_bounds__((Loader::WARPGROUPS + CONSUMERS) * WARPGROUP, 1)
    linear_persistent_kernel(typename Loader::Element* c, const __grid_constant__ CUtensorMap to, bool by_tma,
                             const __grid_constant__ typename Loader::Source from, Tiled p, ClusterRaster order,
                             StreamKSchedule schedule, Workspace space,
                             const __grid_constant__ BiasActEpilogue<typename Loader::Element> layer) {
    multiply_tiles<Loader>({c, to, by_tma}, from, p, order, schedule, space, layer);
}

}  // namespace

// TMA reads inputs along k, and weights along k or along their rows. Plain loads read any other input.
std::tuple<Tensor, Tensor> linear_persistent(const Tensor& input, const Tensor& weight,
                                             const std::optional<Tensor>& bias, const std::string& activation,
                                             bool keep, bool allow_tf32) {
    const LinearCall layer = prepare_linear(input, weight, bias, activation, keep);
    const Product& p = layer.product;
    if (p.K == 0) return linear_naive(input, weight, bias, activation, keep);  // no k-tile to wait for
    HopperCall call = prepare_hopper({p, layer.output}, input, weight, allow_tf32, "linear", "persistent");
    if (call.done()) return layer.outputs();
    const ScalarType dtype = input.scalar_type();
    const Launch on(input);
    call.copied = p.a_k == 1 || p.K == 1;
    const int64_t item = input.element_size();
    const auto run = [&](HopperCall& part) {
        const Tensor copies = pad_operands(&part, dtype, on);
        // Where the part's outputs begin, in the whole.
        const int64_t offset = (static_cast<char*>(part.c) - static_cast<char*>(call.c)) / item;
        TmaTensor kept = output_tensor(part);
        kept.data = keep ? static_cast<char*>(layer.kept.data_ptr()) + offset * item : nullptr;
        const bool kept_by_tma = keep && dtype != ScalarType::Float && tma_can_write(kept);
        dispatch(dtype, "linear", [&](auto zero) {
            using T = decltype(zero);
            BiasActEpilogue<T> epilogue{layer.epilogue<T>(), kept_by_tma ? tensor_map(kept) : CUtensorMap{}};
            if (keep) epilogue.formula.kept += offset;
            if (bias) epilogue.formula.bias += offset % call.tiled.c_row * epilogue.formula.bias_step;
            const auto by_tma = [&](auto b_major) {
                using Loader = TmaLoader<T, Major::K, b_major()>;
                const bool share =
                    sharing_pays(part.tiled, ceil_div(p.K, BLOCK_K<T>), multiprocessors(on.device) / Loader::BLOCKS);
                launch<linear_persistent_kernel<Loader>, Loader>("linear.persistent", part, part.operands(),
                                                                 pair_order(part.tiled, BM, BN), on, share, epilogue);
            };
            if (part.by_tma() && part.a_major == Major::K) {
                if (part.b_major == Major::K) return by_tma(MajorOf<Major::K>{});
                if constexpr (sizeof(T) == 2) return by_tma(MajorOf<Major::MN>{});
            }
            using Loader = PlainLoader<T>;
            launch<linear_persistent_kernel<Loader>, Loader>("linear.persistent", part, plain_source<T>(part),
                                                             plain_order(part.tiled), on, true, epilogue);
        });
    };
    call.by_tma() ? run(call) : chunked_copy(call, dtype, on, run);
    return layer.outputs();
}

void linear_persistent_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    dispatch(dtype, "linear", [&](auto zero) {
        using T = decltype(zero);
        using ByTma = TmaLoader<T, Major::K, Major::K>;
        attributes.push_back(
            kernel_attributes<linear_persistent_kernel<ByTma>>("linear.persistent", 3 * WARPGROUP, SHARED));
        attributes.push_back(kernel_attributes<linear_persistent_kernel<PlainLoader<T>>>("linear.persistent plain",
                                                                                         4 * WARPGROUP, SHARED));
    });
}

}  // namespace kl
