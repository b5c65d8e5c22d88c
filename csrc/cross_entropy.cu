// cross_entropy: the negative log-probability that softmax gives to each row's label.
//
//   loss = kept · (lse − x_label) + uniform · Σ (lse − x) + z_loss · lse²,  lse = max x + log Σ exp(x − max x)
//   dx   = g · (p · (1 + 2 · z_loss · lse) − kept · [x is the label's] − uniform),  p = exp(x − max x) / Σ exp(x − max x)
//
// `kept` is 1 − label smoothing, and `uniform` is label smoothing / classes. A row whose label is the one to ignore has
// loss and gradient zero; one whose label is no class has loss NaN and gradient zero. Neither is read. The forward pass
// keeps each row's maximum and sum; their log-sum-exp alone would lose digits where logits are large.

#include "softmax/softmax.cuh"

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
// Idea      One block per row; maximum and sum in one pass (Milakov and Gimelshein, arXiv:1805.02867), with 16-byte
//           loads, and one reduction of both over the block. The backward pass recomputes the probabilities.
// Predicts  N·sizeof(T) bytes per row; backward one read and one write.
// Limit now Memory bandwidth; the reduction at a row's end, where there are few classes.
// Next      –

constexpr int ENTROPY_THREADS = 512;
constexpr int ENTROPY_UNROLL = 2;

/// Merges the maximum and sum of two parts of a row.
struct MergeStates {
    __device__ Pair operator()(Pair a, Pair b) const {
        const float row_max = fmaxf(a.first, b.first), shift = finite_or_zero(row_max);
        return {row_max, a.second * fast_exp(a.first - shift) + b.second * fast_exp(b.first - shift)};
    }
};

/// The maximum and sum of a thread's elements of a row. With SMOOTHED also their number, `seen`, and `below`: Σ (max − x).
template <typename T, bool SMOOTHED>
__device__ Pair scan_row(const T* in, const Entropy& entropy, float& below, float& seen) {
    const int64_t step = int64_t{blockDim.x} * Vec<T>::size, length = entropy.length;
    Pair state{NEG_INF, 0.0f};
    const int64_t begin = static_cast<int64_t>(threadIdx.x) * Vec<T>::size - past_vector(in, in);
    for (int64_t base = begin; base < length; base += ENTROPY_UNROLL * step) {
        Vec<T> v[ENTROPY_UNROLL];
        float x[ENTROPY_UNROLL][Vec<T>::size];
#pragma unroll
        for (int u = 0; u < ENTROPY_UNROLL; ++u) {
            v[u] = load_vector(in, entropy.in_rows, base + u * step, length, NEG_INF);
        }
        float new_max = state.first;
#pragma unroll
        for (int u = 0; u < ENTROPY_UNROLL; ++u) {
            unpack(v[u], x[u]);
#pragma unroll
            for (int e = 0; e < Vec<T>::size; ++e) new_max = fmaxf(new_max, x[u][e]);
        }
        const float shift = finite_or_zero(new_max);
        state.second *= fast_exp(state.first - shift);
        if (SMOOTHED && state.first != NEG_INF) below += seen * (shift - state.first);
#pragma unroll
        for (int u = 0; u < ENTROPY_UNROLL; ++u) {
#pragma unroll
            for (int e = 0; e < Vec<T>::size; ++e) {
                state.second += fast_exp(x[u][e] - shift);
                const int64_t i = base + u * step + e;
                if (SMOOTHED && 0 <= i && i < length) below += shift - x[u][e], seen += 1.0f;
            }
        }
        state.first = new_max;
    }
    return state;
}

template <typename T, typename Loss, bool SMOOTHED>
__global__ void __launch_bounds__(ENTROPY_THREADS, 3)
    cross_entropy_online_kernel(Loss* losses, float* stats, const T* input, const int64_t* target,
                                __grid_constant__ const Entropy entropy) {
    __shared__ ReduceSmem<false, Pair> state_smem;
    __shared__ ReduceSmem<false, float> below_smem;
    pdl_begin();
    const int64_t row = blockIdx.x, label = target[entropy.labels.offset(row)];
    float loss = 0.0f;
    Pair state{NEG_INF, 0.0f};
    if (entropy.counts(label)) {  // the same for all threads
        const T* in = input + entropy.in_rows.start(row);
        float below = 0.0f, seen = 0.0f;
        const Pair of_thread = scan_row<T, SMOOTHED>(in, entropy, below, seen);
        state = reduce_over_row(of_thread, MergeStates{}, state_smem);
        const float log_sum = logf(state.second);
        if (SMOOTHED) {
            if (of_thread.first != NEG_INF) below += seen * (state.first - of_thread.first);
            below = reduce_over_row(below, Sum{}, below_smem);
            loss = entropy.uniform * (static_cast<float>(entropy.length) * log_sum + below);
        }
        loss += entropy.kept * (log_sum + (state.first - to_float(in[label * entropy.in_rows.stride])));
        const float lse = state.first + log_sum;
        if (entropy.z_loss != 0.0f) loss += entropy.z_loss * lse * lse;
    } else if (label != entropy.ignore_index) {
        loss = std::numeric_limits<float>::quiet_NaN();
    }
    if (threadIdx.x != 0) return;
    losses[row] = from_float<Loss>(loss);
    stats[row] = state.first;
    stats[entropy.rows + row] = state.second;
}

template <typename T, bool SMOOTHED>
__global__ void __launch_bounds__(ENTROPY_THREADS, 3)
    cross_entropy_backward_online_kernel(T* grad_input, const T* grad, const T* input, const int64_t* target,
                                         const float* stats, const float* count, unsigned blocks_a_row,
                                         __grid_constant__ const Entropy entropy) {
    pdl_begin();
    const int64_t row = blockIdx.x / blocks_a_row, label = target[entropy.labels.offset(row)];
    const bool counts = entropy.counts(label);
    const float row_max = stats[row], row_sum = stats[entropy.rows + row];
    float g = to_float(grad[entropy.grads.offset(row)]);
    if (entropy.mean) g /= *count;
    float scale = 1.0f / row_sum;
    if (entropy.z_loss != 0.0f) scale *= 1.0f + 2.0f * entropy.z_loss * (row_max + logf(row_sum));
    const T* in = input + entropy.in_rows.start(row);
    T* out = grad_input + entropy.out_rows.start(row);
    const int64_t step = int64_t{blockDim.x} * Vec<T>::size;
    const int64_t base = blockIdx.x % blocks_a_row * ENTROPY_UNROLL * step +
                         static_cast<int64_t>(threadIdx.x) * Vec<T>::size - past_vector(in, out);
    Vec<T> v[ENTROPY_UNROLL];
#pragma unroll
    for (int u = 0; u < ENTROPY_UNROLL; ++u) {
        v[u] = load_vector(in, entropy.in_rows, base + u * step, counts ? entropy.length : 0, 0.0f);
    }
#pragma unroll
    for (int u = 0; u < ENTROPY_UNROLL; ++u) {
        const int64_t first = base + u * step;
        float x[Vec<T>::size];
        unpack(v[u], x);
#pragma unroll
        for (int e = 0; e < Vec<T>::size; ++e) {
            float value = fast_exp(x[e] - row_max) * scale;
            if (first + e == label) value -= entropy.kept;
            if (SMOOTHED) value -= entropy.uniform;
            x[e] = counts ? g * value : 0.0f;
        }
        store_vector(out, entropy.out_rows, pack<T>(x), first, entropy.length);
    }
}

constexpr int ENTROPY_SUM_THREADS = 1024;

/// Adds up the rows' losses; for a mean divides by the number of rows that are not ignored, and writes it. One block, so
/// that every run gives the same bits.
template <typename T>
__global__ void __launch_bounds__(ENTROPY_SUM_THREADS)
    cross_entropy_online_sum_kernel(T* output, float* count, const float* losses, const int64_t* target,
                                    __grid_constant__ const Entropy entropy) {
    __shared__ float scratch[WARP];
    pdl_begin();
    float total = 0.0f, counted = 0.0f;
    for (int64_t row = threadIdx.x; row < entropy.rows; row += ENTROPY_SUM_THREADS) {
        total += losses[row];
        if (entropy.mean && target[entropy.labels.offset(row)] != entropy.ignore_index) counted += 1.0f;
    }
    total = block_reduce(total, Sum{}, scratch);
    counted = block_reduce(counted, Sum{}, scratch);
    if (threadIdx.x != 0) return;
    if (entropy.mean) *count = counted;
    *output = from_float<T>(entropy.mean ? total / counted : total);
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

int64_t class_dim(const Tensor& input) { return input.dim() > 1 ? 1 : 0; }

/// Threads of a block whose threads have ENTROPY_UNROLL vectors of a row each, or more.
unsigned entropy_threads(int64_t chunks) {
    return std::max(row_threads(chunks, ENTROPY_UNROLL, ENTROPY_THREADS), static_cast<unsigned>(WARP));
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> cross_entropy_online(const Tensor& input, const Tensor& target,
                                                        const std::string& reduction, int64_t ignore_index,
                                                        double label_smoothing, double z_loss) {
    const char* const op = "cross_entropy";
    check_cuda(input, op, "input");
    const Launch launch(input);
    const RowLayout layout(input, class_dim(input), op, true);
    const Entropy entropy = describe(input, target, layout, reduction, ignore_index, label_smoothing, z_loss, op);
    const bool reduced = reduction != "none";
    std::vector<int64_t> shape;
    if (!reduced) shape = layout.sizes;
    Tensor output = empty(input, input.scalar_type(), shape);
    Tensor stats = empty(input, ScalarType::Float, {2 * entropy.rows});
    Tensor count = empty(input, ScalarType::Float, {entropy.mean ? int64_t{1} : int64_t{0}});
    Tensor losses = reduced ? empty(input, ScalarType::Float, {entropy.rows}) : output;
    dispatch(input.scalar_type(), op, [&](auto zero) {
        using T = decltype(zero);
        const auto* labels = pointer<const int64_t>(target);
        const auto run = [&](auto loss, auto smoothed) {
            using Loss = decltype(loss);
            launch_pdl(cross_entropy_online_kernel<T, Loss, decltype(smoothed)::value>, grid_size(entropy.rows),
                       entropy_threads(layout.chunks<T>()), launch, pointer<Loss>(losses), pointer<float>(stats),
                       pointer<const T>(input), labels, entropy);
        };
        if (entropy.rows > 0) {
            with_constant(label_smoothing != 0.0,
                          [&](auto smoothed) { reduced ? run(0.0f, smoothed) : run(T{}, smoothed); });
        }
        if (reduced) {
            launch_pdl(cross_entropy_online_sum_kernel<T>, 1, ENTROPY_SUM_THREADS, launch, pointer<T>(output),
                       pointer<float>(count), pointer<const float>(losses), labels, entropy);
        }
    });
    KL_LAUNCH_CHECK();
    return {output, stats, count};
}

Tensor cross_entropy_backward_online(const Tensor& grad, const Tensor& input, const Tensor& target, const Tensor& stats,
                                     const Tensor& count, const std::string& reduction, int64_t ignore_index,
                                     double label_smoothing, double z_loss) {
    const char* const op = "cross_entropy_backward";
    check_cuda(input, op, "input");
    check_like(grad, input, op, "grad");
    check_same_shape(grad, target, op, "grad");
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
    dispatch(input.scalar_type(), op, [&](auto zero) {
        using T = decltype(zero);
        const unsigned threads = entropy_threads(layout.chunks<T>());
        // Vectors of a row that begins off 16 bytes are one more than those of its length.
        const int64_t chunks = layout.chunks<T>() + (entropy.in_rows.whole ? 0 : 1);
        const int64_t blocks_a_row = ceil_div(chunks, int64_t{threads} * ENTROPY_UNROLL);
        with_constant(label_smoothing != 0.0, [&](auto smoothed) {
            launch_pdl(cross_entropy_backward_online_kernel<T, decltype(smoothed)::value>,
                       grid_size(entropy.rows * blocks_a_row), threads, launch, pointer<T>(grad_input),
                       pointer<const T>(grad), pointer<const T>(input), pointer<const int64_t>(target),
                       pointer<const float>(stats), pointer<const float>(count), grid_size(blocks_a_row), entropy);
        });
    });
    KL_LAUNCH_CHECK();
    return grad_input;
}

void cross_entropy_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    dispatch(dtype, "cross_entropy", [&](auto zero) {
        using T = decltype(zero);
        attributes.push_back(
            kernel_attributes<cross_entropy_online_kernel<T, float, false>>("cross_entropy.online", ENTROPY_THREADS));
        attributes.push_back(kernel_attributes<cross_entropy_backward_online_kernel<T, false>>(
            "cross_entropy_backward.online", ENTROPY_THREADS));
        attributes.push_back(
            kernel_attributes<cross_entropy_online_sum_kernel<T>>("cross_entropy.online (sum)", ENTROPY_SUM_THREADS));
    });
}

}  // namespace kl
