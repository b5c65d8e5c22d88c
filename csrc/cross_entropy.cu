// cross_entropy: the negative log-probability that softmax gives to each row's label.
//
//   loss = kept · (lse − x_label) + uniform · Σ (lse − x) + z_loss · lse²,  lse = max x + log Σ exp(x − max x)
//   dx   = g · (p · (1 + 2 · z_loss · lse) − kept · [x is the label's] − uniform),  p = exp(x − max x) / Σ exp(x − max x)
//
// `kept` is 1 − label smoothing, and `uniform` is label smoothing / classes. A row whose label is the one to ignore has
// loss and gradient zero. One whose label is no class has loss NaN and gradient zero. What they hold changes nothing. The
// forward pass keeps each row's online softmax state; a log-sum-exp alone would lose digits where logits are large.

#include "softmax/row_in_pieces.cuh"

namespace kl {
namespace {

/// What the kernels know of a call. Rows are counted in row-major order, as labels are.
struct Entropy {
    Strided labels, grads;  // `grads` of each row's loss, and `out_rows` of the logits' gradient: backward alone
    Rows in_rows, out_rows;
    int64_t rows, length, ignore_index;
    float kept, uniform, z_loss;
    bool mean;

    __device__ bool is_class(int64_t label) const { return 0 <= label && label < length; }
    __device__ bool counts(int64_t label) const { return is_class(label) && label != ignore_index; }
};

// cross_entropy, rung 1 of 1: online
// Idea      One block per row, or per few short rows. Maximum and sum come from one pass (Milakov and Gimelshein,
//           arXiv:1805.02867), with four 16-byte loads in flight a thread, and one reduction of both. The backward pass
//           recomputes the probabilities.
// Predicts  N·sizeof(T) bytes per row; backward one read and one write.
// Limit now Memory bandwidth. Short rows: issue slots. At 1,000 classes and 16 bits a warp has three fourths of them for
//           reductions and logarithms.
// Next      –

constexpr int ENTROPY_THREADS = 256;  // largest block; an SM holds four, whose rows begin and end at different times
constexpr float LN2 = 0.693147180559945f;

/// The row's log-sum-exp less x. Where the exponential of x has a share of the sum, it is divided out: its rounding is in
/// both. So a row of one class has loss zero.
__device__ float below_lse(OnlineSoftmaxState row, float x) {
    const bool far = is_far(row.half_shift);
    const float own = far ? shifted_exp<true>(x, row.half_shift) : shifted_exp<false>(x, row.half_shift);
    if (1e-6f * row.sum < own && own <= row.sum) return logf(row.sum / own);
    return logf(row.sum) - (far ? x - row.half_shift : LN2 * fmaf(x, LOG2E, -2.0f * row.half_shift));
}
__device__ float lse_of(OnlineSoftmaxState row) {
    return logf(row.sum) + (is_far(row.half_shift) ? row.half_shift : 2.0f * LN2 * row.half_shift);
}

/// Stores this block's part of a sum or mean: the sum of its rows' losses, and the number of its rows.
__device__ void store_result(Pair* results, Pair of_row, bool has_row) {
    __shared__ Pair of_rows[ENTROPY_THREADS / 4];
    if (blockDim.y > 1) {
        if (threadIdx.x == 0) of_rows[threadIdx.y] = has_row ? of_row : Pair{0.0f, 0.0f};
        __syncthreads();
        const int thread = threadIdx.y * blockDim.x + threadIdx.x;
        if (thread >= WARP) return;
        of_row = {0.0f, 0.0f};
        for (int r = thread; r < blockDim.y; r += WARP) of_row = PairSum{}(of_row, of_rows[r]);
        of_row = over_lanes(of_row, PairSum{}, WARP);
    }
    if (threadIdx.x == 0 && threadIdx.y == 0) results[blockIdx.x] = of_row;
}

/// Stores each row's loss.
template <typename T>
__device__ void store_result(T* results, Pair of_row, bool has_row) {
    const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
    if (threadIdx.x == 0 && has_row) results[row] = from_float<T>(of_row.first);
}

template <typename T, typename Result, bool SMOOTHED, bool DENSE>
__global__ void __launch_bounds__(ENTROPY_THREADS, DENSE ? 4 : 2)
    cross_entropy_online_kernel(Result* results, float* stats, const T* input, const int64_t* target,
                                __grid_constant__ const Entropy entropy) {
    __shared__ ReduceSmem<false, OnlineSoftmaxState> state_smem;
    __shared__ ReduceSmem<false, float> below_smem;
    pdl_begin();
    RowPartition<false> part(0);
    const bool has_row = part.has_row(entropy.rows);
    const int64_t row = has_row ? part.row : 0, label = target[entropy.labels.offset(row)];
    const T* in = input + entropy.in_rows.start(row);
    int64_t length = has_row ? entropy.length : 0;
    Vec<T> tile[ROW_VECTORS];
    if (is_one_piece<T, DENSE>(length)) {
        const RowSpan<T, DENSE> span(in, length);
        load_row<DENSE>(tile, in + span.head, entropy.in_rows, part, true, span.end() - span.head, NEG_INF);
    }
    const bool counts = entropy.counts(label);  // the same for all threads of a row
    if (!counts) length = 0;
    const float of_label = length > 0 ? to_float(in[label * entropy.in_rows.stride]) : 0.0f;
    const float reference = SMOOTHED && isfinite(of_label) ? of_label : 0.0f;
    float below = 0.0f;
    const RowSpan<T, DENSE> span(in, length);
    OnlineSoftmaxState state =
        scan_row<SMOOTHED>(tile, in, entropy.in_rows, part, span, length, reference, entropy.uniform, below);
    state = reduce_over_row(state, MergeSoftmax{}, state_smem);
    float loss = entropy.kept * below_lse(state, of_label);
    if (SMOOTHED) {
        below = reduce_over_row(below, Sum{}, below_smem);
        loss += entropy.uniform * static_cast<float>(entropy.length) * below_lse(state, reference) + below;
    }
    if (entropy.z_loss != 0.0f) {
        const float lse = lse_of(state);
        loss += entropy.z_loss * lse * lse;
    }
    const bool ignored = label == entropy.ignore_index;
    if (!counts) loss = ignored ? 0.0f : std::numeric_limits<float>::quiet_NaN();
    if (threadIdx.x == 0 && has_row) {
        stats[row] = state.half_shift;
        stats[entropy.rows + row] = state.sum;
    }
    store_result(results, {loss, ignored ? 0.0f : 1.0f}, has_row);
}

/// Turns a row's logits into their gradient, but for the label's, from which `of_label` is subtracted.
struct RowGradient {
    float half_shift, scale, share, of_label;

    /// All members are zero for a row that does not count, whose x is given as zero.
    template <bool IS_FAR>
    __device__ float operator()(float x) const {
        return fmaf(shifted_exp<IS_FAR>(x, half_shift), scale, share);
    }
};

/// Each element of `input` is read by the thread that writes it in `grad_input`, before it does: the two may be one.
template <typename T, bool DENSE, typename Grad = T>
__global__ void __launch_bounds__(ENTROPY_THREADS, DENSE ? 4 : 2)
    cross_entropy_backward_online_kernel(T* grad_input, const Grad* grad, const T* input, const int64_t* target,
                                         const float* stats, const float* count, unsigned blocks_a_row,
                                         __grid_constant__ const Entropy entropy) {
    constexpr int SIZE = Vec<T>::size;
    pdl_begin();
    RowPartition<false> part(0);
    const unsigned of_row = blockIdx.x % blocks_a_row;
    part.row = int64_t{blockIdx.x / blocks_a_row} * blockDim.y + threadIdx.y;
    part.first = of_row * ROW_VECTORS * part.step() + threadIdx.x;
    if (!part.has_row(entropy.rows)) return;
    const int64_t row = part.row, length = entropy.length, label = target[entropy.labels.offset(row)];
    const OnlineSoftmaxState state{stats[row], stats[entropy.rows + row]};
    float g = to_float(grad[entropy.grads.offset(row)]);
    const T* in = input + entropy.in_rows.start(row);
    T* out = grad_input + entropy.out_rows.start(row);
    const RowSpan<T, DENSE> span(in, length);
    const int64_t spanned = DENSE ? span.end() - span.head : length;
    Vec<T> tile[ROW_VECTORS];
    const bool one_piece = is_one_piece<T, DENSE>(length);
    if (one_piece) load_row<DENSE>(tile, in + span.head, entropy.in_rows, part, true, spanned, 0.0f);
    const bool counts = entropy.counts(label);
    RowGradient gradient{0.0f, 0.0f, 0.0f, 0.0f};
    if (entropy.mean) g /= *count;
    if (counts) {
        float scale = 1.0f / state.sum;
        if (entropy.z_loss != 0.0f) scale *= 1.0f + 2.0f * entropy.z_loss * lse_of(state);
        const float share = entropy.uniform != 0.0f ? -g * entropy.uniform : 0.0f;
        gradient = {state.half_shift, g * scale, share, g * entropy.kept};
    }
    const int64_t in_span = label - span.head;
    const auto label_vector = static_cast<int>(in_span / SIZE), label_element = static_cast<int>(in_span % SIZE);
    const auto run = [&](auto far) {
        constexpr bool IS_FAR = decltype(far)::value;
        if (of_row == 0 && span.has_edges(length)) {
            for (int i = threadIdx.x; i < 2 * SIZE; i += part.step()) {
                const int64_t at = i < SIZE ? (i < span.head ? i : length) : span.end() + i - SIZE;
                if (at >= length) continue;
                float value = gradient.template operator()<IS_FAR>(counts ? to_float(in[at]) : 0.0f);
                if (at == label) value -= gradient.of_label;
                out[at] = from_float<T>(value);
            }
        }
        if (!one_piece) load_row<DENSE>(tile, in + span.head, entropy.in_rows, part, counts, spanned, 0.0f);
#pragma unroll
        for (int v = 0; v < ROW_VECTORS; ++v) {
            float x[SIZE];
            unpack(tile[v], x);
            if (one_piece && !counts) {
#pragma unroll
                for (int e = 0; e < SIZE; ++e) x[e] = 0.0f;
            }
#pragma unroll
            for (int e = 0; e < SIZE; ++e) x[e] = gradient.template operator()<IS_FAR>(x[e]);
            if (part.at(v) == label_vector && in_span >= 0) {
#pragma unroll
                for (int e = 0; e < SIZE; ++e) x[e] -= e == label_element ? gradient.of_label : 0.0f;
            }
            store_part<DENSE>(out + span.head, entropy.out_rows, pack<T>(x), v, part, true, spanned);
        }
    };
    is_far(gradient.half_shift) ? run(std::true_type{}) : run(std::false_type{});
}

constexpr int ENTROPY_SUM_THREADS = ROW_THREADS;
constexpr int ENTROPY_SUM_UNROLL = 8;  // loads in flight per thread

/// Adds up what blocks have written; for a mean divides by the number of rows that count, and writes it. One block, so
/// that every run gives the same bits.
template <typename T>
__global__ void __launch_bounds__(ENTROPY_SUM_THREADS)
    cross_entropy_online_sum_kernel(T* output, float* count, const Pair* results, int blocks, bool mean) {
    __shared__ ReduceSmem<false, Pair> smem;
    pdl_begin();
    Pair total{0.0f, 0.0f};
    for (int first = threadIdx.x; first < blocks; first += ENTROPY_SUM_UNROLL * ENTROPY_SUM_THREADS) {
        Pair parts[ENTROPY_SUM_UNROLL];
#pragma unroll
        for (int u = 0; u < ENTROPY_SUM_UNROLL; ++u) {
            const int i = first + u * ENTROPY_SUM_THREADS;
            parts[u] = i < blocks ? results[i] : Pair{0.0f, 0.0f};
        }
#pragma unroll
        for (int u = 0; u < ENTROPY_SUM_UNROLL; ++u) total = PairSum{}(total, parts[u]);
    }
    total = reduce_over_row(total, PairSum{}, smem);
    if (threadIdx.x != 0) return;
    if (mean) *count = total.second;
    *output = from_float<T>(mean ? total.first / total.second : total.first);
}

// ---- host ----------------------------------------------------------------------------------------------------------

/// Checks operands that both passes have, and describes the call.
Entropy describe(const Tensor& input, const Tensor& target, const RowLayout& layout, const std::string& reduction,
                 int64_t ignore_index, double label_smoothing, double z_loss, const char* op) {
    KL_CHECK(target.is_cuda() && target.get_device_index() == input.get_device_index(), op,
             ": argument `target` must be on the device of `input`");
    KL_CHECK(target.scalar_type() == ScalarType::Long, op, ": argument `target` must have dtype int64");
    KL_CHECK(reduction == "none" || reduction == "mean" || reduction == "sum", op,
             ": argument `reduction` must be none, mean or sum, got ", reduction);
    KL_CHECK(input.dim() >= 1 && layout.length >= 1, op, ": argument `input` must have classes");
    bool same = target.dim() == input.dim() - 1;
    for (int64_t d = 0; same && d < target.dim(); ++d) same = target.size(d) == layout.sizes[static_cast<size_t>(d)];
    KL_CHECK(same, op, ": argument `target` must have the shape of `input` without its classes");
    KL_CHECK(layout.length <= 1 << 30, op, ": a row of ", layout.length, " classes is longer than ", 1 << 30);
    Entropy entropy{};
    entropy.labels = collapse(target.sizes().data(), target.strides().data(), target.dim(), op);
    entropy.in_rows = layout.rows(input, op);
    entropy.rows = layout.count;
    entropy.length = layout.length;
    entropy.ignore_index = ignore_index;
    entropy.kept = static_cast<float>(1.0 - label_smoothing);
    entropy.uniform = static_cast<float>(label_smoothing / static_cast<double>(layout.length));
    entropy.z_loss = static_cast<float>(z_loss);
    entropy.mean = reduction == "mean";
    return entropy;
}

/// Whether rows of both operands are dense and begin equally far off 16 bytes, so that vectors are aligned in both.
template <typename T>
bool aligned_alike(const Rows& a, const void* of_a, const Rows& b, const void* of_b) {
    if (a.whole && b.whole) return a.stride == 1 && b.stride == 1;
    bool same = a.stride == 1 && b.stride == 1 && a.walk.dims == b.walk.dims &&
                (reinterpret_cast<uintptr_t>(of_a) - reinterpret_cast<uintptr_t>(of_b)) % 16 == 0;
    for (int d = 0; same && d < a.walk.dims; ++d) {
        same = a.walk.sizes[d] == b.walk.sizes[d] && (a.walk.strides[d] - b.walk.strides[d]) % Vec<T>::size == 0;
    }
    return same;
}

/// Checks the losses of rows, or their gradients.
void check_losses(const Tensor& losses, const Tensor& logits, const Tensor& target, const char* op, const char* name) {
    KL_CHECK(losses.is_cuda() && losses.get_device_index() == logits.get_device_index(), op, ": argument `", name,
             "` must be on the device of the logits");
    KL_CHECK(losses.scalar_type() == ScalarType::Float || losses.scalar_type() == logits.scalar_type(), op,
             ": argument `", name, "` must have dtype float32 or that of the logits");
    check_same_shape(losses, target, op, name);
}

/// Calls f(T{}, Loss{}) with the types of logits and of their losses.
template <typename F>
void dispatch_losses(const Tensor& logits, const Tensor& losses, const char* op, F&& f) {
    dispatch(logits.scalar_type(), op,
             [&](auto zero) { losses.scalar_type() == ScalarType::Float ? f(zero, float{}) : f(zero, zero); });
}

int64_t class_dim(const Tensor& input) { return input.dim() > 1 ? 1 : 0; }

/// ROW_VECTORS of a row at once per thread, in pieces of one size; several rows per block where they are short.
RowLaunch entropy_launch(int64_t chunks) {
    const int64_t pieces = std::max(int64_t{1}, ceil_div(chunks, int64_t{ROW_VECTORS} * ENTROPY_THREADS));
    const unsigned threads = row_warps(ceil_div(chunks, pieces), ROW_VECTORS, ENTROPY_THREADS);
    return {threads, threads < MIN_BLOCK ? MIN_BLOCK / threads : 1, 1};
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> cross_entropy_online(const Tensor& input, const Tensor& target,
                                                        const std::string& reduction, int64_t ignore_index,
                                                        double label_smoothing, double z_loss, bool wide_loss) {
    const char* const op = "cross_entropy";
    check_cuda(input, op, "input");
    const Launch launch(input);
    const RowLayout layout(input, class_dim(input), op, true);
    const Entropy entropy = describe(input, target, layout, reduction, ignore_index, label_smoothing, z_loss, op);
    const bool reduced = reduction != "none", dense = entropy.in_rows.stride == 1;
    std::vector<int64_t> shape;
    if (!reduced) shape = layout.sizes;
    Tensor output = empty(input, wide_loss ? ScalarType::Float : input.scalar_type(), shape);
    Tensor stats = empty(input, ScalarType::Float, {2 * entropy.rows});
    Tensor count = empty(input, ScalarType::Float, {entropy.mean ? int64_t{1} : int64_t{0}});
    dispatch_losses(input, output, op, [&](auto zero, auto loss) {
        using T = decltype(zero);
        using Loss = decltype(loss);
        const RowLaunch shape = entropy_launch(layout.chunks<T>());
        const unsigned grid = shape.grid(entropy.rows);
        const auto run = [&](auto* results) {
            if (grid == 0) return;
            const auto launch_kernel = [&](auto smoothed, auto is_dense) {
                launch_rows(cross_entropy_online_kernel<T, std::decay_t<decltype(*results)>, smoothed(), is_dense()>,
                            shape, grid, 0, launch, results, pointer<float>(stats), pointer<const T>(input),
                            pointer<const int64_t>(target), entropy);
            };
            with_constant(label_smoothing != 0.0, [&](auto smoothed) {
                with_constant(dense, [&](auto is_dense) { launch_kernel(smoothed, is_dense); });
            });
        };
        if (!reduced) return run(pointer<Loss>(output));
        const Tensor results = empty(input, ScalarType::Float, {2 * int64_t{grid}});
        run(pointer<Pair>(results));
        launch_pdl(cross_entropy_online_sum_kernel<Loss>, 1, ENTROPY_SUM_THREADS, launch, pointer<Loss>(output),
                   pointer<float>(count), pointer<const Pair>(results), static_cast<int>(grid), entropy.mean);
    });
    KL_LAUNCH_CHECK();
    return {output, stats, count};
}

Tensor cross_entropy_backward_online(const Tensor& grad, const Tensor& input, const Tensor& target, const Tensor& stats,
                                     const Tensor& count, const std::string& reduction, int64_t ignore_index,
                                     double label_smoothing, double z_loss) {
    const char* const op = "cross_entropy_backward";
    check_cuda(input, op, "input");
    check_losses(grad, input, target, op, "grad");
    const Launch launch(input);
    const RowLayout layout(input, class_dim(input), op, true);
    Entropy entropy = describe(input, target, layout, reduction, ignore_index, label_smoothing, z_loss, op);
    for (const Tensor* kept : {&stats, &count}) {
        KL_CHECK(kept->is_cuda() && kept->get_device_index() == input.get_device_index() && kept->is_contiguous() &&
                     kept->scalar_type() == ScalarType::Float &&
                     kept->numel() == (kept == &stats ? 2 * entropy.rows : int64_t{entropy.mean}),
                 op, ": arguments `stats` and `count` must be those that cross_entropy returned");
    }
    Tensor grad_input = DenseLike(input).allocate(input);
    if (input.numel() == 0) return grad_input;
    entropy.out_rows = layout.rows(grad_input, op);
    entropy.grads = collapse(grad.sizes().data(), grad.strides().data(), grad.dim(), op);
    dispatch_losses(input, grad, op, [&](auto zero, auto of_grad) {
        using T = decltype(zero);
        using Grad = decltype(of_grad);
        const bool dense =
            aligned_alike<T>(entropy.in_rows, pointer<const T>(input), entropy.out_rows, pointer<T>(grad_input));
        const RowLaunch shape = entropy_launch(layout.chunks<T>());
        const int64_t of_block = int64_t{shape.threads} * ROW_VECTORS;
        const int64_t blocks_a_row = ceil_div(layout.chunks<T>(), of_block);
        with_constant(dense, [&](auto is_dense) {
            launch_rows(cross_entropy_backward_online_kernel<T, is_dense(), Grad>, shape,
                        grid_size(ceil_div(entropy.rows, shape.rows) * blocks_a_row), 0, launch, pointer<T>(grad_input),
                        pointer<const Grad>(grad), pointer<const T>(input), pointer<const int64_t>(target),
                        pointer<const float>(stats), pointer<const float>(count), grid_size(blocks_a_row), entropy);
        });
    });
    KL_LAUNCH_CHECK();
    return grad_input;
}

namespace {

/// Checks a chunk's logits, whose rows may be padded, and what else both of its passes take.
Entropy describe_chunk(const Tensor& logits, const Tensor& target, const Tensor& stats, const RowLayout& layout,
                       int64_t ignore_index, double label_smoothing, double z_loss, const char* op) {
    const Entropy entropy = describe(logits, target, layout, "none", ignore_index, label_smoothing, z_loss, op);
    KL_CHECK(logits.dim() == 2 && entropy.in_rows.stride == 1, op,
             ": argument `logits` must be a matrix with classes side by side");
    KL_CHECK(stats.is_cuda() && stats.get_device_index() == logits.get_device_index() && stats.is_contiguous() &&
                 stats.scalar_type() == ScalarType::Float && stats.numel() == 2 * entropy.rows,
             op, ": argument `stats` must be two float32 numbers for each row");
    return entropy;
}

}  // namespace

void linear_cross_entropy_chunked(const Tensor& logits, const Tensor& target, const Tensor& losses, const Tensor& stats,
                                  int64_t ignore_index, double label_smoothing, double z_loss) {
    const char* const op = "linear_cross_entropy";
    check_cuda(logits, op, "logits");
    check_losses(losses, logits, target, op, "losses");
    const Launch launch(logits);
    const RowLayout layout(logits, 1, op, true);
    const Entropy entropy = describe_chunk(logits, target, stats, layout, ignore_index, label_smoothing, z_loss, op);
    KL_CHECK(losses.is_contiguous(), op, ": argument `losses` must be dense");
    if (entropy.rows == 0) return;
    dispatch_losses(logits, losses, op, [&](auto zero, auto loss) {
        using T = decltype(zero);
        using Loss = decltype(loss);
        const RowLaunch shape = entropy_launch(layout.chunks<T>());
        with_constant(label_smoothing != 0.0, [&](auto smoothed) {
            launch_rows(cross_entropy_online_kernel<T, Loss, smoothed(), true>, shape, shape.grid(entropy.rows), 0,
                        launch, pointer<Loss>(losses), pointer<float>(stats), pointer<const T>(logits),
                        pointer<const int64_t>(target), entropy);
        });
    });
    KL_LAUNCH_CHECK();
}

void linear_cross_entropy_backward_chunked(const Tensor& grad, const Tensor& target, const Tensor& stats,
                                           const Tensor& logits, int64_t ignore_index, double label_smoothing,
                                           double z_loss) {
    const char* const op = "linear_cross_entropy_backward";
    check_cuda(logits, op, "logits");
    check_losses(grad, logits, target, op, "grad");
    const Launch launch(logits);
    const RowLayout layout(logits, 1, op, true);
    Entropy entropy = describe_chunk(logits, target, stats, layout, ignore_index, label_smoothing, z_loss, op);
    if (entropy.rows == 0) return;
    entropy.out_rows = entropy.in_rows;
    entropy.grads = collapse(grad.sizes().data(), grad.strides().data(), grad.dim(), op);
    dispatch_losses(logits, grad, op, [&](auto zero, auto of_grad) {
        using T = decltype(zero);
        using Grad = decltype(of_grad);
        const RowLaunch shape = entropy_launch(layout.chunks<T>());
        const int64_t of_block = int64_t{shape.threads} * ROW_VECTORS;
        const int64_t blocks_a_row = ceil_div(layout.chunks<T>(), of_block);
        launch_rows(cross_entropy_backward_online_kernel<T, true, Grad>, shape,
                    grid_size(ceil_div(entropy.rows, shape.rows) * blocks_a_row), 0, launch, pointer<T>(logits),
                    pointer<const Grad>(grad), pointer<const T>(logits), pointer<const int64_t>(target),
                    pointer<const float>(stats), static_cast<const float*>(nullptr), grid_size(blocks_a_row), entropy);
    });
    KL_LAUNCH_CHECK();
}

void cross_entropy_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    dispatch(dtype, "cross_entropy", [&](auto zero) {
        using T = decltype(zero);
        attributes.push_back(kernel_attributes<cross_entropy_online_kernel<T, Pair, false, true>>(
            "cross_entropy.online", ENTROPY_THREADS));
        attributes.push_back(kernel_attributes<cross_entropy_backward_online_kernel<T, true>>(
            "cross_entropy_backward.online", ENTROPY_THREADS));
        attributes.push_back(
            kernel_attributes<cross_entropy_online_sum_kernel<T>>("cross_entropy.online (sum)", ENTROPY_SUM_THREADS));
    });
}

}  // namespace kl
