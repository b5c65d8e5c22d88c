// attention, backward pass of rung 2 of 7: flash. The kernels, for batches (flash_backward.cu) and packed sequences
// (varlen_backward.cu); flash_masked_backward.cu has the instances that test every score.
//
// Three kernels. With P the weights and dP = dO · Vᵀ:
//
//   delta    delta_i = Σ_d dO_id · O_id, which is Σ_j P_ij · dP_ij, minus the gradient of the log-sum-exp if there is one
//   query    dQ = scale · dS · K with dS = P ∘ (dP − delta): a block has queries and walks over keys
//   key      dV = Pᵀ · dO, dK = scale · dSᵀ · Q: a block has keys and walks over queries, of all heads that share them
//
// One kernel for both would compute P and dP once, but would sum dQ by atomics in an order that changes from run to run.
// Two kernels that sum in registers give the same bits each time. The key kernel computes transposed squares, Sᵀ = K · Qᵀ.
// So in both kernels the weights stay in registers as the A operand of the next product.
//
// The gradient of an additive mask is dS: flash_mask_gradient.cu sums it.
//
//   kernel   resident tiles   streamed tiles, two stages   per step
//   query    Q, dO            K, V                         S = Q · Kᵀ,   dP = dO · Vᵀ,   dQ += dS · K
//   key      K, V             Q, dO, statistics            Sᵀ = K · Qᵀ,  dPᵀ = V · dOᵀ,  dV += Pᵀ · dO,  dK += dSᵀ · Q
//
// The instances with General sequences take a mask in memory, a window, and dropped weights. They draw the factors F of
// dropout again: dV = (P ∘ F)ᵀ · dO and dS = P ∘ (F ∘ dP − delta). delta is still rowsum(dO ∘ O).
#pragma once

#include <string>

#include "attention/recompute.cuh"
#include "attention/sequences.cuh"

namespace kl {

/// Launches the instances for General sequences, in flash_masked_backward.cu.
void launch_flash_masked_backward(const FlashGradients<half>& operands, const Attention& a, const General& sequences,
                                  const Launch& launch);
void launch_flash_masked_backward(const FlashGradients<bfloat16>& operands, const Attention& a,
                                  const General& sequences, const Launch& launch);
/// Computes `delta`, less the gradient of the log-sum-exp where that is not null. In flash_backward.cu.
void launch_flash_delta(const Tensor& delta, const float* grad_lse, const Tensor& grad, const Tensor& output,
                        const Attention& a, const Launch& launch);

namespace {

//                               head dim, queries, keys, warps
using QueryShape64 = FlashShape<64, 128, 64, 8>;
using QueryShape128 = FlashShape<128, 128, 64, 8>;
using QueryShape256 = FlashShape<256, 64, 32, 4>;
using SmallQueryShape128 = FlashShape<128, 128, 32, 8>;  // in 99 KiB of shared memory, as these two are
using SmallQueryShape256 = FlashShape<256, 64, 16, 4>;

//                             head dim, keys, queries, warps; two blocks share the columns of 256
using KeyShape64 = FlashShape<64, 128, 64, 8>;
using KeyShape128 = FlashShape<128, 128, 64, 8>;
using KeyShape256 = FlashShape<256, 64, 32, 4, 128>;
using SmallKeyShape128 = FlashShape<128, 128, 32, 8>;
using SmallKeyShape256 = FlashShape<256, 64, 16, 4, 128>;

constexpr int DELTA_THREADS = 256;

// Two resident tiles and two stages of two streamed tiles; the key kernel also streams log-sum-exp, maximum and delta.
template <typename S>
constexpr int SHARED = 2 * S::BLOCK_BYTES + 4 * S::STREAM_BYTES;
template <typename S>
constexpr int KEY_SHARED = SHARED<S> + 6 * S::STREAM * static_cast<int>(sizeof(float));

// The least that a GPU gives a block: compute capabilities 8.6, 8.9 and 12.x.
constexpr int LEAST_SHARED = 99 * 1024;
static_assert(KEY_SHARED<KeyShape64> <= LEAST_SHARED && KEY_SHARED<SmallKeyShape128> <= LEAST_SHARED &&
              KEY_SHARED<SmallKeyShape256> <= LEAST_SHARED);

// Code for 9.0a runs on GPUs that hold the larger tiles, so that the small ones are left out of it. With General sequences
// the small ones serve every GPU: there are fewer instances, and at head dimension 128 none that spills registers.
template <typename S>
constexpr bool SMALL = std::is_same_v<S, SmallQueryShape128> || std::is_same_v<S, SmallQueryShape256> ||
                       std::is_same_v<S, SmallKeyShape128> || std::is_same_v<S, SmallKeyShape256>;
template <typename S, typename Sequences>
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr bool LEFT_OUT = SMALL<S> && !Sequences::GENERAL;
#else
constexpr bool LEFT_OUT = false;
#endif

/// Rows are those of all sequences.
template <typename T>
__global__ void attention_flash_delta_kernel(float* delta, const float* grad_lse, const __grid_constant__ View<T> grad,
                                             const __grid_constant__ View<T> output,
                                             const __grid_constant__ Attention a) {
    int64_t index = int64_t{blockIdx.x} * (DELTA_THREADS / WARP) + threadIdx.x / WARP;
    if (index >= a.batches * a.heads * a.S_q) return;
    const int64_t row = index % a.S_q, outer = index / a.S_q, batch = outer / a.heads;
    const int head = static_cast<int>(outer % a.heads);
    const T* g = grad.at(batch, head) + row * grad.row;
    const T* o = output.at(batch, head) + row * output.row;
    float sum = 0.0f;
    for (int d = threadIdx.x % WARP; d < a.D_v; d += WARP) {
        sum = fmaf(to_float(g[d * grad.column]), to_float(o[d * output.column]), sum);
    }
    sum = warp_reduce(sum, Sum{});
    if (threadIdx.x % WARP == 0) delta[index] = sum - (grad_lse != nullptr ? grad_lse[index] : 0.0f);
}

template <typename T, typename S, typename Sequences>
__global__ void __launch_bounds__(S::THREADS)
    attention_flash_query_kernel(const __grid_constant__ FlashGradients<T> p, const __grid_constant__ Attention all,
                                 const __grid_constant__ Sequences sequences) {
#if __CUDA_ARCH__ >= 800
    if constexpr (LEFT_OUT<S, Sequences>) return;
    constexpr bool MASKED = Sequences::GENERAL;
    constexpr int N = S::STREAM / 8, D = S::HEAD_DIM;
    static_assert(S::ROWS == 16);
    extern __shared__ __align__(128) unsigned char shared_bytes[];
    const uint32_t q_tile = shared_address(shared_bytes), grad_tile = q_tile + S::BLOCK_BYTES;
    const auto k_tile = [&](int n) { return grad_tile + S::BLOCK_BYTES + n % 2 * 2 * S::STREAM_BYTES; };
    const auto v_tile = [&](int n) { return k_tile(n) + S::STREAM_BYTES; };

    const int tiles = (sequences.longest_q(all) + S::BLOCK - 1) / S::BLOCK;
    const int outer = static_cast<int>(blockIdx.x) / tiles, head = outer % all.heads;
    const auto sequence = sequences.at(all, outer / all.heads);
    const Attention& a = sequence.a;
    // Under a causal mask the longest tiles start first.
    const int q0 = (tiles - 1 - static_cast<int>(blockIdx.x) % tiles) * S::BLOCK;
    if (q0 >= a.S_q) return;
    const T* key = sequence.keys(p.key, head);
    const T* value = sequence.keys(p.value, head);
    const int keys = max(min(a.S_k, q0 + S::BLOCK + a.last), 0);
    const int steps = (keys + S::STREAM - 1) / S::STREAM;
    const int begin = MASKED ? min(max(q0 + a.first, 0) / S::STREAM, max(steps - 1, 0)) : 0;
    const int64_t mask_offset = MASKED ? sequence.mask(p.mask, head) : 0;

    const auto load = [&](int n) {
        const int k0 = n * S::STREAM;
        load_tile<S::STREAM, D, S::THREADS>(k_tile(n), key + k0 * p.key.row, p.key, a.S_k - k0, a.D);
        load_tile<S::STREAM, D, S::THREADS>(v_tile(n), value + k0 * p.value.row, p.value, a.S_k - k0, a.D_v);
        cp_async_commit();
    };
    load_tile<S::BLOCK, D, S::THREADS>(q_tile, sequence.queries(p.query, head) + q0 * p.query.row, p.query, a.S_q - q0,
                                       a.D);
    load_tile<S::BLOCK, D, S::THREADS>(grad_tile, sequence.queries(p.grad, head) + q0 * p.grad.row, p.grad, a.S_q - q0,
                                       a.D_v);
    load(begin);

    const int warp_row = threadIdx.x / WARP * S::ROWS;
    const float scale = a.scale * LOG2E;
    const MaskedUnits units(p.mask, a);
    const bool additive = p.mask.additive();
    RowShift of_row[2];
    float delta[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int row = q0 + warp_row + lane_row(0, h);
        const int64_t index = sequence.first_row(head) + row;
        of_row[h] = row_shift(p, index, row < a.S_q);
        delta[h] = row < a.S_q ? p.delta[index] : 0.0f;
    }
    Squares<1, D / 8> grad_query;
    grad_query.clear();

    for (int n = begin; n < steps; ++n) {
        cp_async_wait<0>();
        __syncthreads();  // tile n has landed for all threads, and all have read tile n − 1, whose stage n + 1 takes
        if (n + 1 < steps) load(n + 1);
        const int k0 = n * S::STREAM;
        [[maybe_unused]] uint32_t kept = 0;
        if constexpr (Sequences::GENERAL) {
            const int64_t row = sequence.first_row(head) + q0 + warp_row;
            if (sequences.drops) kept = kept_weights<N>(sequences.dropout, row, k0, a);
        }

        Squares<1, N> scores, grad_weights;
        multiply_rows<T, D>(scores, q_tile, warp_row, k_tile(n));
        multiply_rows<T, D>(grad_weights, grad_tile, warp_row, v_tile(n));
        if constexpr (Sequences::GENERAL) {
            apply_mask<T>(scores, p.mask, mask_offset, q0 + warp_row, k0, a);
            if (sequences.drops) drop(grad_weights, kept, sequences.dropout.scale);
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = q0 + warp_row + lane_row(0, h);
            const int left = min(a.S_k, row + 1 + a.last) - k0;
#pragma unroll
            for (int j = 0; j < N; ++j) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& s = scores.x[0][j][2 * h + e];
                    const float weight =
                        MASKED ? masked_weight(s, of_row[h].max, of_row[h].log2_sum, units.factor, additive)
                               : exp2_approx(fmaf(s, scale, -of_row[h].log2_sum));
                    s = lane_column(j) + e < left ? weight * (grad_weights.x[0][j][2 * h + e] - delta[h]) : 0.0f;
                }
            }
        }
        multiply_accumulate<T, D>(grad_query, round_squares<T>(scores), k_tile(n), 0);
    }
    cp_async_wait<0>();  // tiles are still in flight where these queries see no key
    store_squares(grad_query, sequence.queries(p.grad_query, head) + (q0 + warp_row) * p.grad_query.row,
                  p.grad_query.row, a.S_q - q0 - warp_row, a.D, [&](int, int) { return a.scale; });
#endif
}

template <typename T, typename S, typename Sequences>
__global__ void __launch_bounds__(S::THREADS)
    attention_flash_key_kernel(const __grid_constant__ FlashGradients<T> p, const __grid_constant__ Attention all,
                               const __grid_constant__ Sequences sequences) {
#if __CUDA_ARCH__ >= 800
    if constexpr (LEFT_OUT<S, Sequences>) return;
    constexpr bool MASKED = Sequences::GENERAL;
    constexpr int N = S::STREAM / 8, D = S::HEAD_DIM, PARTS = D / S::COLUMNS;
    static_assert(S::ROWS == 16 && 3 * S::STREAM <= S::THREADS);
    constexpr int STATS = MASKED ? 3 : 2;
    extern __shared__ __align__(128) unsigned char shared_bytes[];
    const uint32_t k_tile = shared_address(shared_bytes), v_tile = k_tile + S::BLOCK_BYTES;
    const auto q_tile = [&](int stage) { return v_tile + S::BLOCK_BYTES + stage * 2 * S::STREAM_BYTES; };
    const auto grad_tile = [&](int stage) { return q_tile(stage) + S::STREAM_BYTES; };
    // Per streamed query: log2 of the sum, delta, maximum.
    float* row_stats = reinterpret_cast<float*>(shared_bytes + SHARED<S>);

    const int tiles = (sequences.longest_k(all) + S::BLOCK - 1) / S::BLOCK;
    const int column0 = blockIdx.x % PARTS * S::COLUMNS;
    const int block = static_cast<int>(blockIdx.x) / PARTS;
    const int k0 = block % tiles * S::BLOCK;  // under a causal mask the longest start first
    const int head_kv = block / tiles % all.heads_kv;
    const auto sequence = sequences.at(all, block / tiles / all.heads_kv);
    const Attention& a = sequence.a;
    if (k0 >= a.S_k) return;
    const int group = a.group(), head_begin = head_kv * group, head_end = head_begin + group;
    // Queries before q_begin do not see the tile's first key, and those from q_end on do not see its last.
    const int q_begin = max(k0 - a.last, 0) / S::STREAM * S::STREAM;
    const int q_end = MASKED ? min(a.S_q, max(k0 + S::BLOCK - a.first, 0)) : a.S_q;

    int next_head = head_begin;
    int next_q0 = q_begin;
    const auto load_next = [&](int stage) {
        load_tile<S::STREAM, D, S::THREADS>(q_tile(stage), sequence.queries(p.query, next_head) + next_q0 * p.query.row,
                                            p.query, a.S_q - next_q0, a.D);
        load_tile<S::STREAM, D, S::THREADS>(grad_tile(stage),
                                            sequence.queries(p.grad, next_head) + next_q0 * p.grad.row, p.grad,
                                            a.S_q - next_q0, a.D_v);
        cp_async_commit();
        load_row_stats<S, MASKED>(row_stats + stage * STATS * S::STREAM, p, sequence.first_row(next_head), next_q0,
                                  a.S_q);
        next_q0 += S::STREAM;
        if (next_q0 >= q_end) next_q0 = q_begin, ++next_head;
    };
    load_tile<S::BLOCK, D, S::THREADS>(k_tile, sequence.keys(p.key, head_kv) + k0 * p.key.row, p.key, a.S_k - k0, a.D);
    load_tile<S::BLOCK, D, S::THREADS>(v_tile, sequence.keys(p.value, head_kv) + k0 * p.value.row, p.value, a.S_k - k0,
                                       a.D_v);
    cp_async_commit();
    if (q_begin < q_end) load_next(0);

    const int warp_row = threadIdx.x / WARP * S::ROWS;
    const MaskedUnits units(p.mask, a);
    Squares<1, S::COLUMNS / 8> grad_key, grad_value;
    grad_key.clear();
    grad_value.clear();

    int stage = 0;
    for (int head = head_begin; head < head_end; ++head) {
        const int64_t mask_offset = MASKED ? sequence.mask(p.mask, head) : 0;
        for (int q0 = q_begin; q0 < q_end; q0 += S::STREAM, stage ^= 1) {
            cp_async_wait<0>();
            __syncthreads();  // this stage has landed for all threads, and all have read the other, which is filled next
            if (next_head < head_end) load_next(stage ^ 1);

            // Rows are keys here, and columns queries.
            [[maybe_unused]] uint32_t kept = 0;
            if constexpr (Sequences::GENERAL) {
                const int64_t row = sequence.first_row(head) + q0;
                if (sequences.drops) kept = kept_transposed<N>(sequences.dropout, row, k0 + warp_row, a);
            }
            Squares<1, N> weights, grad_scores;
            multiply_rows<T, D>(weights, k_tile, warp_row, q_tile(stage));
            multiply_rows<T, D>(grad_scores, v_tile, warp_row, grad_tile(stage));
            if constexpr (Sequences::GENERAL) {
                if (sequences.drops) drop(grad_scores, kept, sequences.dropout.scale);
            }
            weights_and_gradients<S, MASKED>(weights, grad_scores, row_stats + stage * STATS * S::STREAM, p, a, units,
                                             mask_offset, k0 + warp_row, q0);
            if constexpr (Sequences::GENERAL) {
                if (sequences.drops) drop(weights, kept, sequences.dropout.scale);
            }
            multiply_accumulate<T, D>(grad_value, round_squares<T>(weights), grad_tile(stage), column0);
            multiply_accumulate<T, D>(grad_key, round_squares<T>(grad_scores), q_tile(stage), column0);
        }
    }
    cp_async_wait<0>();  // the resident tiles are still in flight where no query sees these keys

    const int rows_left = a.S_k - k0 - warp_row;
    store_squares(grad_key, sequence.keys(p.grad_key, head_kv) + (k0 + warp_row) * p.grad_key.row + column0,
                  p.grad_key.row, rows_left, a.D - column0, [&](int, int) { return a.scale; });
    store_squares(grad_value, sequence.keys(p.grad_value, head_kv) + (k0 + warp_row) * p.grad_value.row + column0,
                  p.grad_value.row, rows_left, a.D_v - column0, [](int, int) { return 1.0f; });
#endif
}

template <typename T, typename Sequences>
void launch_products(const FlashGradients<T>& operands, const Attention& a, const Sequences& sequences,
                     const Launch& launch) {
    const int head_dim = std::max(a.D, a.D_v);
    const bool small =
        Sequences::GENERAL || shared_limit(launch.device) < std::max(KEY_SHARED<KeyShape128>, KEY_SHARED<KeyShape256>);
    const auto query = [&](auto shape) {
        using S = decltype(shape);
        const auto kernel = attention_flash_query_kernel<T, S, Sequences>;
        static DeviceSet asked;
        allow_shared(kernel, SHARED<S>, launch.device, asked);
        const auto grid = grid_size(sequences.count(a) * a.heads * ceil_div(sequences.longest_q(a), S::BLOCK));
        kernel<<<grid, S::THREADS, SHARED<S>, launch.stream>>>(operands, a, sequences);
    };
    if (small) {
        dispatch_shape<QueryShape64, SmallQueryShape128, SmallQueryShape256>(head_dim, query);
    } else if constexpr (!Sequences::GENERAL) {
        dispatch_shape<QueryShape64, QueryShape128, QueryShape256>(head_dim, query);
    }
    KL_LAUNCH_CHECK();
    FlashGradients<T> by_key = operands;  // there, heads of key and value count, not those of query
    by_key.key.group = by_key.value.group = 1;
    const auto key = [&](auto shape) {
        using S = decltype(shape);
        const auto kernel = attention_flash_key_kernel<T, S, Sequences>;
        static DeviceSet asked;
        allow_shared(kernel, KEY_SHARED<S>, launch.device, asked);
        const int64_t parts = S::HEAD_DIM / S::COLUMNS;
        const auto grid =
            grid_size(sequences.count(a) * a.heads_kv * ceil_div(sequences.longest_k(a), S::BLOCK) * parts);
        kernel<<<grid, S::THREADS, KEY_SHARED<S>, launch.stream>>>(by_key, a, sequences);
    };
    if (small) {
        dispatch_shape<KeyShape64, SmallKeyShape128, SmallKeyShape256>(head_dim, key);
    } else if constexpr (!Sequences::GENERAL) {
        dispatch_shape<KeyShape64, KeyShape128, KeyShape256>(head_dim, key);
    }
    KL_LAUNCH_CHECK();
}

/// Memory for the gradient of an operand, in its shape and memory order. Packed operands are (1, H, T, D), and their
/// gradients (T, H, D), as callers pass them.
template <typename Sequences>
Tensor empty_gradient(const Tensor& x) {
    if constexpr (!Sequences::PACKED) return empty_ordered_like(x, x.size(-1));
    return empty(x, x.scalar_type(), {x.size(2), x.size(1), x.size(3)});
}
template <typename T, typename Sequences>
View<T> gradient_view(const Tensor& gradient) {
    if constexpr (Sequences::PACKED) return packed_view<T>(gradient);
    return make_view<T>(gradient);
}

/// Checks the output's gradient and what the forward pass returned.
inline void check_saved(const Tensor& grad, const Tensor& query, const Tensor& output, const Tensor& lse,
                        const Mask& mask, const Attention& a) {
    check_attention_output(grad, query, a, "grad");
    check_attention_output(output, query, a, "output");
    check_cuda(lse, "attention_backward", "lse");
    KL_CHECK(lse.scalar_type() == ScalarType::Float && lse.is_contiguous() &&
                 lse.get_device_index() == query.get_device_index() &&
                 lse.numel() == a.rows() * (mask.additive() ? 2 : 1),
             "attention_backward: argument `lse` must be what the forward pass returned");
}

/// The gradients of query, key and value.
template <typename Sequences>
std::tuple<Tensor, Tensor, Tensor> flash_backward(const Tensor& grad, const std::optional<Tensor>& grad_lse,
                                                  const Tensor& query, const Tensor& key, const Tensor& value,
                                                  const Tensor& output, const Tensor& lse, const Mask& mask,
                                                  bool hides_left, const Attention& a, const Sequences& sequences,
                                                  const std::optional<DropoutMask>& dropout = {}) {
    const float* of_lse = grad_lse_pointer(grad_lse, query, a);
    check_saved(grad, query, output, lse, mask, a);
    const Launch launch(query);
    Tensor grad_query = empty_gradient<Sequences>(query), grad_key = empty_gradient<Sequences>(key),
           grad_value = empty_gradient<Sequences>(value);
    if (a.rows() * a.S_k == 0) {
        for (Tensor* gradient : {&grad_query, &grad_key, &grad_value}) fill_zero(*gradient, launch.stream);
        return {grad_query, grad_key, grad_value};
    }
    const Tensor delta = empty_like_query(query, ScalarType::Float, 0);
    launch_flash_delta(delta, of_lse, grad, output, a, launch);
    dispatch_16bit(query.scalar_type(), "attention_backward", [&](auto zero) {
        using T = decltype(zero);
        const FlashGradients<T> operands{make_view<T>(query),
                                         make_view<T>(key, a.group()),
                                         make_view<T>(value, a.group()),
                                         make_view<T>(grad),
                                         gradient_view<T, Sequences>(grad_query),
                                         gradient_view<T, Sequences>(grad_key),
                                         gradient_view<T, Sequences>(grad_value),
                                         make_lse(lse, mask, a).data,
                                         make_lse(lse, mask, a).log_sum,
                                         static_cast<const float*>(delta.data_ptr()),
                                         mask};
        if (mask.kind != MaskKind::NONE || hides_left || dropout) {
            return launch_flash_masked_backward(operands, a, General(sequences, dropout), launch);
        }
        launch_products(operands, a, Any(sequences), launch);
    });
    return {grad_query, grad_key, grad_value};
}

/// Adds the attributes of the products' kernels, named by head dimension below `prefix`.
template <typename Sequences>
void flash_backward_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype, const std::string& prefix) {
    if (dtype == ScalarType::Float) return;
    dispatch_16bit(dtype, "attention_backward", [&](auto zero) {
        using T = decltype(zero);
        const auto add = [&](const char* head_dim, auto query_shape, auto key_shape) {
            using Q = decltype(query_shape);
            using K = decltype(key_shape);
            attributes.push_back(kernel_attributes<attention_flash_query_kernel<T, Q, Sequences>>(
                (prefix + "query." + head_dim).c_str(), Q::THREADS, SHARED<Q>));
            attributes.push_back(kernel_attributes<attention_flash_key_kernel<T, K, Sequences>>(
                (prefix + "key." + head_dim).c_str(), K::THREADS, KEY_SHARED<K>));
        };
        if constexpr (!Sequences::GENERAL) {
            attributes.push_back(
                kernel_attributes<attention_flash_delta_kernel<T>>((prefix + "delta").c_str(), DELTA_THREADS));
            add("128", QueryShape128{}, KeyShape128{});
            add("256", QueryShape256{}, KeyShape256{});
        }
        add("64", QueryShape64{}, KeyShape64{});
        add("128.small", SmallQueryShape128{}, SmallKeyShape128{});
        add("256.small", SmallQueryShape256{}, SmallKeyShape256{});
    });
}

}  // namespace
}  // namespace kl
