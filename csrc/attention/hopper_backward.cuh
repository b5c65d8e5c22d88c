// Backward pass of attention on Hopper's wgmma: what the rungs wgmma and warp_specialized share. Checks and workspaces, the
// preprocess kernel, masks and weights of transposed tiles, and the epilogue.
//
// With P the weights and dP = dO · Vᵀ, the gradient of the scores is dS = P ∘ (dP − delta). delta is the sum of dO ∘ O over
// a query's row, less the gradient of its log-sum-exp. Then dV = Pᵀ · dO, dK = scale · dSᵀ · Q and dQ = scale · dS · K.
//
// Transposed tiles, Sᵀ = K · Qᵀ and dPᵀ = V · dOᵀ, have one key per row. wgmma leaves them in registers in the layout of
// its A operand. So Pᵀ and dSᵀ enter the products of dV and dK without a copy (FlashAttention-3, Shah et al.,
// arXiv:2407.08608; Dao-AILab/flash-attention, hopper/mainloop_bwd_sm90_tma_gmma_ws.hpp).
#pragma once

#include "attention/hopper.cuh"

namespace kl {

constexpr int QUERY_TILE = 64;  // queries of a streamed tile; statistics are padded to whole tiles
constexpr int STATS_BYTES = 2 * QUERY_TILE * static_cast<int>(sizeof(float));
constexpr int PREPROCESS_THREADS = 256;

/// Statistics of a tile of queries: 64 logarithms of weights' sums, in base 2, then 64 deltas. Of every 16 queries, a
/// thread of a transposed tile needs 2t, 2t + 1, 2t + 8 and 2t + 9 (t = lane mod 4). They are stored side by side, for one
/// load of 16 bytes:
///
///   place    0  1  2  3 │ 4  5  6  7 │ 8  9  10 11 │ 12 13 14 15
///   query    0  1  8  9 │ 2  3  10 11│ 4  5  12 13 │ 6  7  14 15
__host__ __device__ constexpr int stat_place(int query) {
    return query / 16 * 16 + query % 8 / 2 * 4 + query % 16 / 8 * 2 + query % 2;
}

struct BackwardMaps {
    CUtensorMap query, key, value, grad;
};

// ---- host -----------------------------------------------------------------------------------------------------------

/// One call: checks the operands and allocates gradients and statistics.
struct BackwardCall {
    const std::string rung;
    const Tensor &grad, &query, &key, &value, &output, &lse;
    const Attention a;
    const float* grad_lse;
    const int64_t sequences;  // packed ones; 0 for batches
    const Launch launch;
    Tensor grad_query, grad_key, grad_value, stats;

    BackwardCall(const char* rung, const Tensor& grad, const std::optional<Tensor>& grad_lse, const Tensor& query,
                 const Tensor& key, const Tensor& value, const Tensor& output, const Tensor& lse,
                 const std::optional<Tensor>& attn_mask, int64_t first, int64_t last, double scale, bool enable_gqa,
                 int64_t sequences = 0)
        : rung(rung),
          grad(grad),
          query(query),
          key(key),
          value(value),
          output(output),
          lse(lse),
          a(prepare_attention(query, key, value, first, last, scale, enable_gqa)),
          grad_lse(grad_lse_pointer(grad_lse, query, a)),
          sequences(sequences),
          launch(query) {
        KL_CHECK(!attn_mask.has_value(), "attention_backward: ", rung, " takes no mask in memory");
        KL_CHECK(query.dim() == 4, "attention_backward: ", rung, " takes 4 dimensions (B, H, S, D), got ", query.dim());
        KL_CHECK(a.D % 8 == 0 && a.D_v % 8 == 0, "attention_backward: ", rung,
                 " takes head dimensions that are multiples of 8");
        check_attention_output(grad, query, a, "grad");
        check_attention_output(output, query, a, "output");
        check_cuda(lse, "attention_backward", "lse");
        KL_CHECK(lse.scalar_type() == ScalarType::Float && lse.is_contiguous() &&
                     lse.get_device_index() == query.get_device_index() && lse.numel() == a.rows(),
                 "attention_backward: argument `lse` must be what the forward pass returned");
        KL_CHECK(a.rows() == 0 || (make_view<half>(output).whole && make_view<half>(grad).whole),
                 "attention_backward: rows of `output` and `grad` must be dense and start on 16 bytes");
        const auto empty_gradient = [&](const Tensor& x) {
            if (sequences > 0) return empty(x, x.scalar_type(), {x.size(2), x.size(1), x.size(3)});
            return empty_ordered_like(x, x.size(3));
        };
        grad_query = empty_gradient(query), grad_key = empty_gradient(key), grad_value = empty_gradient(value);
    }

    /// Tiles of statistics of a head: packed_tiles, where sequences are packed.
    int64_t query_tiles() const { return sequences > 0 ? a.S_q / QUERY_TILE + sequences : ceil_div(a.S_q, QUERY_TILE); }

    /// Returns the gradients. Calls f(zero, shape) to launch the kernels, unless there are no summands. `zero` has the
    /// operands' type; `shape` is the first of the shapes into which the head dimensions fit.
    template <typename... Shapes, typename F>
    std::tuple<Tensor, Tensor, Tensor> results(F&& f) {
        if (a.rows() * a.S_k == 0) {
            for (Tensor* gradient : {&grad_query, &grad_key, &grad_value}) fill_zero(*gradient, launch.stream);
            return {grad_query, grad_key, grad_value};
        }
        stats = empty(query, ScalarType::Float, {a.batches, a.heads, query_tiles(), 2 * QUERY_TILE});
        dispatch_first<Shapes...>("attention_backward", rung, query.scalar_type(), a, f);
        return {grad_query, grad_key, grad_value};
    }

    /// Tensor maps that read tiles of `query_rows` queries and `key_rows` keys.
    BackwardMaps maps(int query_rows, int key_rows) const {
        return {tensor_map(tma_operand(query, query_rows)), tensor_map(tma_operand(key, key_rows)),
                tensor_map(tma_operand(value, key_rows)), tensor_map(tma_operand(grad, query_rows))};
    }

    float* stats_pointer() const { return static_cast<float*>(stats.data_ptr()); }

    /// Makes a kernel ready to launch: raises where it cannot run.
    template <auto* KERNEL>
    void prepare(int shared) const {
        check_hopper(reinterpret_cast<const void*>(KERNEL), launch.device, ("attention_backward." + rung).c_str());
        static DeviceSet asked;
        allow_shared(KERNEL, shared, launch.device, asked);
    }
};

// ---- preprocess -----------------------------------------------------------------------------------------------------

/// What the preprocess kernel reads of a tile of queries, from the tile's first row on.
template <typename T>
struct PreprocessRows {
    const T *output, *grad;
    int64_t output_row, grad_row;  // strides
    const float *lse, *grad_lse;   // the latter may be null
    int rows_left, columns;
};

/// Writes a block's tile of statistics, of 64 queries: sixteen lanes read a row, 128 columns at once, four rows each.
template <typename T>
__device__ inline void preprocess_rows(float* stats, const PreprocessRows<T>& p) {
    constexpr int LANES = 16, ROWS_AT_ONCE = PREPROCESS_THREADS / LANES, WIDEST = 256;
    const int first = static_cast<int>(threadIdx.x) / LANES, lane = threadIdx.x % LANES;
    float sums[QUERY_TILE / ROWS_AT_ONCE];
#pragma unroll
    for (int i = 0; i < QUERY_TILE / ROWS_AT_ONCE; ++i) {
        const int row = i * ROWS_AT_ONCE + first;
        sums[i] = 0.0f;
#pragma unroll
        for (int column = lane * Vec<T>::size; column < WIDEST; column += LANES * Vec<T>::size) {
            if (row >= p.rows_left || column >= p.columns) break;
            float x[Vec<T>::size], y[Vec<T>::size];
            unpack(load_vec(p.output + row * p.output_row + column), x);
            unpack(load_vec(p.grad + row * p.grad_row + column), y);
#pragma unroll
            for (int e = 0; e < Vec<T>::size; ++e) sums[i] = fmaf(x[e], y[e], sums[i]);
        }
    }
    float* tile_stats = stats + int64_t{blockIdx.x} * 2 * QUERY_TILE;
#pragma unroll
    for (int i = 0; i < QUERY_TILE / ROWS_AT_ONCE; ++i) {
        float sum = sums[i];
#pragma unroll
        for (int lanes = 1; lanes < LANES; lanes *= 2) sum += __shfl_xor_sync(FULL_MASK, sum, lanes);
        const int row = i * ROWS_AT_ONCE + first;
        if (lane != 0) continue;
        // Past the end, and where a query sees no key, the logarithm is infinite: weights are 2^(−∞) = 0.
        const float log_sum = row < p.rows_left ? p.lse[row] : -INFINITE;
        if (p.grad_lse != nullptr && row < p.rows_left) sum -= p.grad_lse[row];
        tile_stats[stat_place(row)] = log_sum == -INFINITE ? INFINITE : log_sum * LOG2E;
        tile_stats[QUERY_TILE + stat_place(row)] = sum;
    }
}

/// Writes the statistics of a tile of 64 queries. One block per tile.
template <typename T>
__device__ inline void preprocess_tile(float* stats, const float* lse, const float* grad_lse, const View<T>& output,
                                       const View<T>& grad, const Attention& a) {
    const int tiles = (a.S_q + QUERY_TILE - 1) / QUERY_TILE;
    const int64_t outer = blockIdx.x / tiles;
    const int64_t batch = outer / a.heads, q0 = blockIdx.x % tiles * QUERY_TILE, row = outer * a.S_q + q0;
    const int head = static_cast<int>(outer % a.heads);
    preprocess_rows(stats,
                    PreprocessRows<T>{output.at(batch, head) + q0 * output.row, grad.at(batch, head) + q0 * grad.row,
                                      output.row, grad.row, lse + row, grad_lse == nullptr ? nullptr : grad_lse + row,
                                      static_cast<int>(a.S_q - q0), a.D_v});
}

/// Launches a rung's preprocess kernel, whose parameters are those of preprocess_tile and `more`.
template <typename T, typename Kernel, typename... More>
void run_preprocess(Kernel* kernel, const BackwardCall& call, const More&... more) {
    const auto grid = grid_size(call.a.batches * call.a.heads * call.query_tiles());
    kernel<<<grid, PREPROCESS_THREADS, 0, call.launch.stream>>>(
        call.stats_pointer(), static_cast<const float*>(call.lse.data_ptr()), call.grad_lse, make_view<T>(call.output),
        make_view<T>(call.grad), call.a, more...);
    KL_LAUNCH_CHECK();
}

// ---- tiles in shared memory -----------------------------------------------------------------------------------------

/// A block keeps two tiles of 64 rows, and two stages of two streamed ones with their statistics. Of two tiles, one has the
/// head dimension of queries and keys, the other that of dO and values.
template <int HEAD_DIM_, int VALUE_DIM_>
struct BackwardTile {
    static constexpr int HEAD_DIM = HEAD_DIM_, VALUE_DIM = VALUE_DIM_, ROWS = 64;
    static constexpr int PANELS = HEAD_DIM / PANEL, VALUE_PANELS = VALUE_DIM / PANEL, PANEL_BYTES = ROWS * SWIZZLE_ROW;
    static constexpr int TILE_BYTES = PANELS * PANEL_BYTES, PAIR_BYTES = TILE_BYTES + VALUE_PANELS * PANEL_BYTES;
    static constexpr int ALL_BYTES = (1 + STAGES) * PAIR_BYTES;
};

#if KL_SM90A

/// Where the tiles of a block lie in shared memory.
template <typename S>
struct BackwardTiles {
    uint32_t resident;

    __device__ explicit BackwardTiles(const void* shared) : resident(align_to_swizzle(shared)) {}
    __device__ uint32_t resident_other() const { return resident + S::TILE_BYTES; }
    __device__ uint32_t streamed(int stage) const { return resident + (1 + stage) * S::PAIR_BYTES; }
    __device__ uint32_t streamed_other(int stage) const { return streamed(stage) + S::TILE_BYTES; }
    __device__ uint32_t tiles_end() const { return resident + S::ALL_BYTES; }

    /// One thread loads two tiles; `barrier` is full when they have landed, and `more` bytes that the caller requests.
    __device__ void load(uint32_t shared, uint32_t barrier, const CUtensorMap& map, const CUtensorMap& other, int row,
                         int head, int batch, int more) const {
        mbarrier_arrive_expect_tx(barrier, S::PAIR_BYTES + more);
#pragma unroll
        for (int p = 0; p < S::PANELS; ++p) {
            const uint32_t panel = shared + p * S::PANEL_BYTES;
            tma_load(panel, map, barrier, p * PANEL, row, head, batch);
            if (p < S::VALUE_PANELS) tma_load(panel + S::TILE_BYTES, other, barrier, p * PANEL, row, head, batch);
        }
    }
};

// ---- tiles of keys --------------------------------------------------------------------------------------------------

/// A tile of KEYS keys of one head, and the tiles of queries that see any of them. Each query head that shares the keys has
/// these tiles.
template <int KEYS>
struct KeyTile {
    int batch, head_kv, k0;
    int begin, end;  // tiles of queries
    int heads;       // query heads that share the keys; none where no query sees them

    __device__ KeyTile(const Attention& a, unsigned outer_kv, unsigned tile)
        : batch(static_cast<int>(outer_kv / a.heads_kv)),
          head_kv(static_cast<int>(outer_kv % a.heads_kv)),
          k0(static_cast<int>(tile) * KEYS) {
        const int key_end = min(k0 + KEYS, a.S_k);
        begin = max(k0 - a.last, 0) / QUERY_TILE;
        end = (max(min(a.S_q, key_end - a.first), 0) + QUERY_TILE - 1) / QUERY_TILE;
        heads = begin < end ? a.group() : 0;
    }
    __device__ int steps() const { return heads * (end - begin); }
};

/// Walks over a key tile's steps: from the last tile of queries to the first, and at each over all heads that share the keys.
/// So all key tiles that see a tile of queries come to it after about as many steps, whichever tile is their first.
struct StepCursor {
    int head, tile;  // query head; tile of queries

    template <int KEYS>
    __device__ StepCursor(const KeyTile<KEYS>& keys) : head(keys.head_kv * keys.heads), tile(keys.end - 1) {}
    template <int KEYS>
    __device__ void advance(const KeyTile<KEYS>& keys) {
        if (++head < (keys.head_kv + 1) * keys.heads) return;
        head = keys.head_kv * keys.heads;
        --tile;
    }
};

/// A tile of statistics in global memory.
__device__ inline const float* stats_tile(const float* stats, const Attention& a, int batch, int head, int tile) {
    const int64_t tiles = (a.S_q + QUERY_TILE - 1) / QUERY_TILE;
    return stats + ((int64_t{batch} * a.heads + head) * tiles + tile) * 2 * QUERY_TILE;
}

/// Bulk copy of statistics to shared memory, whose bytes `barrier` counts.
__device__ inline void load_stats(uint32_t shared, const float* stats, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
        "l"(stats), "n"(STATS_BYTES), "r"(barrier)
        : "memory");
}

// ---- products -------------------------------------------------------------------------------------------------------

/// Issues d = A · Bᵀ, 64 rows of A by 64 of B, over HEAD_DIM columns.
template <typename T, int HEAD_DIM>
__device__ inline void gemm_rows(float (&d)[QUERY_TILE / 2], uint32_t a, int a_panel, uint32_t b, int b_panel) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 16; ++i) {
        const uint64_t of_a =
            matrix_descriptor<Major::K>(a + i / 4 * a_panel, a_panel) + i % 4 * DESCRIPTOR_STEP<Major::K>;
        const uint64_t of_b =
            matrix_descriptor<Major::K>(b + i / 4 * b_panel, b_panel) + i % 4 * DESCRIPTOR_STEP<Major::K>;
        if (i == 0) {
            Wgmma<QUERY_TILE>::template multiply_first<T, Major::K, Major::K>(d, of_a, of_b);
        } else {
            Wgmma<QUERY_TILE>::template multiply<T, Major::K, Major::K>(d, of_a, of_b, true);
        }
    }
    wgmma_commit();
}

/// Loads 64 rows of a tile into registers, in the layout of wgmma's A operand. Each warp has 16 of them.
template <int HEAD_DIM>
__device__ inline void load_operand(uint32_t (&operand)[HEAD_DIM / 16][4], uint32_t tile, int panel) {
    const int lane = static_cast<int>(threadIdx.x) % WARP;
    const int row = warp_index() % (WARPGROUP / WARP) * 16 + lane % 16;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 16; ++i) {
        ldmatrix(operand[i], tile + i / 4 * panel + swizzled(row, i % 4 * 2 + lane / 16));
    }
}

/// The same product as gemm_rows, with A in registers.
template <typename T, int HEAD_DIM>
__device__ inline void gemm_rows(float (&d)[QUERY_TILE / 2], const uint32_t (&a)[HEAD_DIM / 16][4], uint32_t b,
                                 int b_panel) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 16; ++i) {
        const uint64_t of_b =
            matrix_descriptor<Major::K>(b + i / 4 * b_panel, b_panel) + i % 4 * DESCRIPTOR_STEP<Major::K>;
        Wgmma<QUERY_TILE>::template multiply<T, Major::K>(d, a[i], of_b, i > 0);
    }
    wgmma_commit();
}

/// Issues d += A · B, with A of 64 × 64 in registers and 64 rows of B.
template <typename T, int HEAD_DIM>
__device__ inline void gemm_columns(float (&d)[HEAD_DIM / 2], const uint32_t (&a)[4][4], uint32_t b, int b_panel) {
    wgmma_fence();
    const uint64_t of_b = matrix_descriptor<Major::MN>(b, b_panel);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        Wgmma<HEAD_DIM>::template multiply<T, Major::MN>(d, a[i], of_b + i * DESCRIPTOR_STEP<Major::MN>, true);
    }
    wgmma_commit();
}

// ---- elementwise ----------------------------------------------------------------------------------------------------

/// Sets elements of a transposed tile to 0 where a query does not see a key, or one of them is outside. The rows are the
/// warpgroup's 64 keys from `k0` on, the columns 64 queries from `q0` on.
__device__ inline void apply_mask_transposed(float (&x)[QUERY_TILE / 2], const Attention& a, int k0, int q0) {
    const int q_last = q0 + QUERY_TILE - 1;
    if (k0 + 64 <= min(a.S_k, q0 + a.last + 1) && q_last < a.S_q && k0 >= q_last + a.first) return;
    const int row = k0 + warp_index() % (WARPGROUP / WARP) * 16 + static_cast<int>(threadIdx.x) % WARP / 4;
    const int column = q0 + static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int key = row + 8 * h;
        const int begin = (key < a.S_k ? key - a.last : q_last + 1) - column,
                  end = min(a.S_q, key - a.first + 1) - column;
#pragma unroll
        for (int j = 0; j < QUERY_TILE / 8; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                if (8 * j + e < begin || 8 * j + e >= end) x[4 * j + 2 * h + e] = 0.0f;
            }
        }
    }
}

/// Replaces scores by weights, 2^(score − log_sum). `stats`: the tile's, in shared memory.
__device__ inline void scores_to_weights(float (&scores)[QUERY_TILE / 2], uint32_t stats, float scale) {
#pragma unroll
    for (int j = 0; j < QUERY_TILE / 16; ++j) {
        const uint4 words = load_shared16(stats + j * 64 + threadIdx.x % 4 * 16);
        const float log_sum[4] = {__uint_as_float(words.x), __uint_as_float(words.y), __uint_as_float(words.z),
                                  __uint_as_float(words.w)};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            float& x = scores[8 * j + i];
            x = exp2_approx(fmaf(x, scale, -log_sum[i / 4 * 2 + i % 2]));
        }
    }
}

/// Replaces dP by dS = P ∘ (dP − delta). Masked elements must be masked again: 0 · ∞ is no number.
__device__ inline void grad_of_scores(float (&grads)[QUERY_TILE / 2], const float (&weights)[QUERY_TILE / 2],
                                      uint32_t stats) {
#pragma unroll
    for (int j = 0; j < QUERY_TILE / 16; ++j) {
        const uint4 words = load_shared16(stats + QUERY_TILE * 4 + j * 64 + threadIdx.x % 4 * 16);
        const float delta[4] = {__uint_as_float(words.x), __uint_as_float(words.y), __uint_as_float(words.z),
                                __uint_as_float(words.w)};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            float& x = grads[8 * j + i];
            x = weights[8 * j + i] * (x - delta[i / 4 * 2 + i % 2]);
        }
    }
}

// ---- epilogue -------------------------------------------------------------------------------------------------------

/// Stores 64 rows of an accumulator, times `factor`, 16 bytes per store. `first`: the warpgroup's first row; rows lie
/// `stride` elements apart, and `rows_left` of them (may exceed 64) are inside.
template <typename T, int HEAD_DIM>
__device__ inline void store_gradient(T* first, int64_t stride, int columns, int rows_left,
                                      const float (&acc)[HEAD_DIM / 2], float factor) {
    const int lane = threadIdx.x % 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int row = warp_index() % (WARPGROUP / WARP) * 16 + static_cast<int>(threadIdx.x) % WARP / 4 + 8 * h;
#pragma unroll
        for (int j = 0; j < HEAD_DIM / 8; j += 4) {
            uint32_t x[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* pair = acc + 4 * (j + i) + 2 * h;
                x[i] = pack_pair<T>(pair[0] * factor, pair[1] * factor);
            }
            transpose_quad(x);
            const int column = 8 * (j + lane);
            store_16_bytes_if(first + row * stride + column, make_uint4(x[0], x[1], x[2], x[3]),
                              row < rows_left && column < columns);  // a multiple of 8
        }
    }
}

#endif

}  // namespace kl
