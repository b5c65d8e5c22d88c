// linear_cross_entropy, rung 1 of 1: chunked
// Idea      One chunk of rows at a time: their logits, their loss, and its gradient, written over the logits. Both
//           products of the backward pass follow at once (Hsu et al., Liger Kernel, arXiv:2410.10989). So memory holds
//           the logits of one chunk alone, and no product is computed twice.
// Predicts  The time of three products, and 4·C·sizeof(T) bytes more for each row; memory of a chunk's logits.
// Limit now The products. The weight's gradient is read and written once a chunk.
// Next      –
//
// cuda_impl/linear_cross_entropy.py loops over the chunks. Shared openly: products are matmul's, by the rung that the
// selection names for each, and the losses of a chunk's logits are cross_entropy's `online`. Here are the products that
// add to the weight's gradient, the sum of the losses, and the scaling of gradients by that of the result.
//
// On Hopper the copy engine adds a tile to the gradient in the L2 (cp.reduce.async.bulk.tensor). Each element is added to
// once a launch, so every run gives the same bits. float16 has no room for sums over all rows: its sums are float32.

#include "matmul/linear.cuh"
#include "matmul/persistent.cuh"
#include "reduce/rows.cuh"

namespace kl {
namespace {

using namespace persistent;

// Adds a tile to `sums.sums`: by TMA where it can address them and their dtype is that of the operands.
template <typename Sum>
struct AddEpilogue {
    AddTo<Sum> sums;

    template <typename T>
    struct Tile {
        const AddEpilogue& epilogue;

        __device__ Tile(const AddEpilogue& epilogue, int, int) : epilogue(epilogue) {}

        __device__ void store(float (&sum)[BN / 2], const OutputTarget<T>& to, const Tiled& p, uint32_t panels,
                              int batch, int m0, int n0) const {
            if constexpr (std::is_same_v<T, Sum>) {
                if (to.by_tma) {
#pragma unroll
                    for (int part = 0; part < PARTS_N; ++part) {
                        store_columns<T, true>(columns_of(sum, part), to, p, panels + part % 2 * PANEL_BYTES, batch, m0,
                                               n0 + part * PANEL_X);
                    }
                    return;
                }
            }
            const int lane = threadIdx.x % WARP, m = m0 + threadIdx.x % WARPGROUP / WARP * 16 + lane / 4;
            const bool pairs = p.N % 2 == 0;  // then every pair of columns that begins at an even one is aligned
#pragma unroll
            for (int j = 0; j < BN / 8; ++j) {
                const int n = n0 + j * 8 + lane % 4 * 2;
                const auto columns = epilogue.sums.template columns<2>(n, p.N - n);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    if (m + i * 8 >= p.M) continue;
                    columns.store(static_cast<T*>(nullptr), int64_t{m + i * 8} * p.N + n,
                                  {sum[j * 4 + i * 2], sum[j * 4 + i * 2 + 1]}, pairs);
                }
            }
        }
    };
};

template <typename Loader, typename Sum>
__global__ void __launch_bounds__((Loader::WARPGROUPS + CONSUMERS) * WARPGROUP, 1)
    linear_cross_entropy_chunked_add_kernel(typename Loader::Element* c, const __grid_constant__ CUtensorMap to,
                                            bool by_tma, const __grid_constant__ typename Loader::Source from, Tiled p,
                                            ClusterRaster order, StreamKSchedule schedule, Workspace space,
                                            const __grid_constant__ AddEpilogue<Sum> epilogue) {
    multiply_tiles<Loader>({c, to, by_tma}, from, p, order, schedule, space, epilogue);
}

// As they are added up: a chunk's gradients of logits, transposed, and its inputs both run along rows of memory.
template <typename T>
using AddLoader = TmaLoader<T, Major::MN, Major::MN>;
template <typename T>
using SumOf = std::conditional_t<std::is_same_v<T, half>, float, T>;

constexpr int LOSS_SUM_THREADS = ROW_THREADS;
constexpr int LOSS_SUM_UNROLL = 8;  // loads in flight per thread

/// Adds up the rows' losses; for a mean divides by the number of rows that count, and writes it. One block, so that
/// every run gives the same bits.
template <typename T>
__global__ void __launch_bounds__(LOSS_SUM_THREADS)
    linear_cross_entropy_chunked_sum_kernel(T* output, float* count, const float* losses, const int64_t* target,
                                            __grid_constant__ const Strided labels, int64_t rows, int64_t ignore_index,
                                            bool mean) {
    __shared__ ReduceSmem<false, Pair> smem;
    pdl_begin();
    Pair total{0.0f, 0.0f};
    for (int64_t first = threadIdx.x; first < rows; first += LOSS_SUM_UNROLL * LOSS_SUM_THREADS) {
        Pair parts[LOSS_SUM_UNROLL];
#pragma unroll
        for (int u = 0; u < LOSS_SUM_UNROLL; ++u) {
            const int64_t row = first + u * LOSS_SUM_THREADS;
            parts[u] = {0.0f, 0.0f};
            if (row < rows) parts[u] = {losses[row], target[labels.offset(row)] == ignore_index ? 0.0f : 1.0f};
        }
#pragma unroll
        for (int u = 0; u < LOSS_SUM_UNROLL; ++u) total = PairSum{}(total, parts[u]);
    }
    total = reduce_over_row(total, PairSum{}, smem);
    if (threadIdx.x != 0) return;
    if (mean) *count = total.second;
    *output = from_float<T>(mean ? total.first / total.second : total.first);
}

/// output = grad · sums, and divided by the count for a mean, eight elements a thread. `output` may be `sums`. Where no
/// row counts, every gradient is zero.
template <typename T, typename Sum, typename Grad>
__global__ void __launch_bounds__(THREADS)
    linear_cross_entropy_chunked_scale_kernel(T* output, const Sum* sums, const Grad* grad, const float* count,
                                              int64_t numel, bool mean) {
    constexpr int EACH = 8;
    pdl_begin();
    const int64_t first = (int64_t{blockIdx.x} * THREADS + threadIdx.x) * EACH;
    if (first >= numel) return;
    float scale = to_float(*grad);
    if (mean) scale = *count > 0.0f ? scale / *count : 0.0f;
    float x[EACH];
    load_run(x, sums + first, numel - first, true);
#pragma unroll
    for (int e = 0; e < EACH; ++e) x[e] *= scale;
    store_run(output + first, x, numel - first, true);
}

// ---- host ----------------------------------------------------------------------------------------------------------

const char* const OP = "linear_cross_entropy";

void check_on_device(const Tensor& tensor, const Tensor& like, const char* name) {
    KL_CHECK(tensor.is_cuda() && tensor.get_device_index() == like.get_device_index(), OP, ": argument `", name,
             "` must be on the device of the first argument");
}

}  // namespace

void linear_cross_entropy_product_chunked(const Tensor& input, const Tensor& other, const Tensor& output,
                                          const std::string& rung, bool allow_tf32, int64_t tile_m, int64_t tile_n,
                                          int64_t splits, bool pair) {
    const ScalarType dtype = input.scalar_type();
    const int64_t run = 16 / input.element_size();  // elements that TMA writes at once
    const Call prepared = prepare_into(output, input, other, OP, run - 1);
    const Product& p = prepared.product;
    const Tensor& c = prepared.output;
    KL_CHECK(c.scalar_type() == dtype, OP, ": argument `output` must have the dtype of `input`");
    KL_CHECK(p.K > 0, OP, ": a product needs an inner dimension");
    KL_CHECK(is_aligned16(c.data_ptr()), OP, ": argument `output` must begin at a multiple of 16 bytes");
    if (rung == "mma" || rung == "registers") {
        KL_CHECK(p.M <= 1 || c.stride(0) == p.N, OP, ": argument `output` must be dense for ", rung);
        return rung == "mma" ? multiply_mma(prepared, input, other, allow_tf32, OP)
                             : multiply_registers(prepared, input, other);
    }
    KL_CHECK(rung == "split_k" || rung == "stream_k" || rung == "persistent", OP, ": no products by ", rung);
    HopperCall call = prepare_hopper(prepared, input, other, allow_tf32, OP, rung.c_str());
    if (p.M > 1) call.tiled.c_row = c.stride(0);
    call.padded = c.size(1) > p.N && c.size(1) % run == 0;
    run_hopper(call, input, [&](const HopperCall& part, const Launch& on) {
        if (rung == "split_k") return launch_split_k(part, dtype, on, {tile_m, tile_n, splits, pair});
        rung == "stream_k" ? launch_stream_k(part, dtype, on) : launch_persistent(part, dtype, on, false);
    });
}

void linear_cross_entropy_add_product_chunked(const Tensor& input, const Tensor& other, const Tensor& output,
                                              bool allow_tf32, bool by_tma) {
    const Call prepared = prepare_into(output, input, other, OP);
    const Product& p = prepared.product;
    const Tensor& c = prepared.output;
    const ScalarType dtype = input.scalar_type();
    KL_CHECK(c.is_contiguous() && is_aligned16(c.data_ptr()), OP,
             ": argument `output` must be dense and begin at a multiple of 16 bytes");
    KL_CHECK(c.scalar_type() == (dtype == ScalarType::Half ? ScalarType::Float : dtype), OP,
             ": argument `output` must be float32, or bfloat16 as the operands");
    if (p.M * p.N * p.K == 0) return;
    if (dtype == ScalarType::Float && !allow_tf32) return add_registers(prepared, input, other);
    if (dtype == ScalarType::Float || !by_tma) return add_mma(prepared, input, other, allow_tf32, OP);
    const HopperCall call = prepare_hopper(prepared, input, other, false, OP, "chunked");
    if (!call.by_tma() || call.a_major != Major::MN || call.b_major != Major::MN) {
        return add_mma(prepared, input, other, false, OP);
    }
    const Launch on(input);
    dispatch(dtype, OP, [&](auto zero) {
        using T = decltype(zero);
        if constexpr (sizeof(T) == 2) {
            using Sum = SumOf<T>;
            launch<linear_cross_entropy_chunked_add_kernel<AddLoader<T>, Sum>, AddLoader<T>>(
                OP, call, call.operands(), pair_order(call.tiled, BM, BN), on, false,
                AddEpilogue<Sum>{{pointer<Sum>(c)}});
        }
    });
    KL_LAUNCH_CHECK();
}

void linear_cross_entropy_sum_chunked(const Tensor& losses, const Tensor& target, const Tensor& output,
                                      const Tensor& count, int64_t ignore_index, bool mean) {
    check_cuda(losses, OP, "losses");
    check_on_device(target, losses, "target");
    check_on_device(output, losses, "output");
    check_on_device(count, losses, "count");
    check_same_shape(target, losses, OP, "target");
    KL_CHECK(losses.scalar_type() == ScalarType::Float && losses.is_contiguous(), OP,
             ": argument `losses` must be dense float32");
    KL_CHECK(target.scalar_type() == ScalarType::Long, OP, ": argument `target` must have dtype int64");
    KL_CHECK(output.numel() == 1, OP, ": argument `output` must have one element");
    KL_CHECK(count.scalar_type() == ScalarType::Float && count.numel() == 1, OP,
             ": argument `count` must be one float32 number");
    const Strided labels = collapse(target.sizes().data(), target.strides().data(), target.dim(), OP);
    const Launch launch(losses);
    dispatch(output.scalar_type(), OP, [&](auto zero) {
        using T = decltype(zero);
        launch_pdl(linear_cross_entropy_chunked_sum_kernel<T>, 1, LOSS_SUM_THREADS, launch, pointer<T>(output),
                   pointer<float>(count), pointer<const float>(losses), pointer<const int64_t>(target), labels,
                   losses.numel(), ignore_index, mean);
    });
    KL_LAUNCH_CHECK();
}

void linear_cross_entropy_scale_chunked(const Tensor& sums, const Tensor& grad, const Tensor& count,
                                        const Tensor& output, bool mean) {
    check_cuda(sums, OP, "sums");
    check_on_device(grad, sums, "grad");
    check_on_device(count, sums, "count");
    check_on_device(output, sums, "output");
    check_same_shape(output, sums, OP, "output");
    for (const Tensor* tensor : {&sums, &output}) {
        KL_CHECK(tensor->is_contiguous() && reinterpret_cast<uintptr_t>(tensor->data_ptr()) % 32 == 0, OP,
                 ": arguments `sums` and `output` must be dense and begin at multiples of 32 bytes");
    }
    const ScalarType dtype = output.scalar_type();
    KL_CHECK(sums.scalar_type() == dtype || (dtype == ScalarType::Half && sums.scalar_type() == ScalarType::Float), OP,
             ": argument `sums` must have the dtype of `output`, or be float32 for float16");
    KL_CHECK(grad.numel() == 1 && (grad.scalar_type() == ScalarType::Float || grad.scalar_type() == dtype), OP,
             ": argument `grad` must be one number in float32 or in the dtype of `output`");
    KL_CHECK(count.scalar_type() == ScalarType::Float && count.numel() == 1, OP,
             ": argument `count` must be one float32 number");
    if (sums.numel() == 0) return;
    const Launch launch(sums);
    const unsigned int grid = grid_size(ceil_div(sums.numel(), THREADS * 8));
    dispatch(dtype, OP, [&](auto zero) {
        using T = decltype(zero);
        const auto run = [&](auto sum, auto of_grad) {
            using Sum = decltype(sum);
            using Grad = decltype(of_grad);
            launch_pdl(linear_cross_entropy_chunked_scale_kernel<T, Sum, Grad>, grid, THREADS, launch,
                       pointer<T>(output), pointer<const Sum>(sums), pointer<const Grad>(grad),
                       pointer<const float>(count), sums.numel(), mean);
        };
        const auto with_sum = [&](auto sum) {
            grad.scalar_type() == ScalarType::Float ? run(sum, float{}) : run(sum, zero);
        };
        if constexpr (std::is_same_v<T, half>) {
            if (sums.scalar_type() == ScalarType::Float) return with_sum(float{});
        }
        with_sum(zero);
    });
    KL_LAUNCH_CHECK();
}

void linear_cross_entropy_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    dispatch(dtype, OP, [&](auto zero) {
        using T = decltype(zero);
        using Sum = SumOf<T>;
        if constexpr (sizeof(T) == 2) {
            attributes.push_back(kernel_attributes<linear_cross_entropy_chunked_add_kernel<AddLoader<T>, Sum>>(
                "linear_cross_entropy.chunked (add)", 3 * WARPGROUP, persistent::SHARED));
        }
        attributes.push_back(kernel_attributes<linear_cross_entropy_chunked_sum_kernel<T>>(
            "linear_cross_entropy.chunked (sum)", LOSS_SUM_THREADS));
        attributes.push_back(kernel_attributes<linear_cross_entropy_chunked_scale_kernel<T, Sum, T>>(
            "linear_cross_entropy.chunked (scale)", THREADS));
    });
}

}  // namespace kl
