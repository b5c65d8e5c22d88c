// attention on Hopper's wgmma: what the rungs wgmma, warp_specialized, pingpong and persistent share. The shared-memory
// layout, TMA loads, the two products, the softmax between them, and the epilogue. attention.cuh has the ladder.
//
// A block has 64 queries, the rows of one wgmma, for each of its consumer warpgroups. TMA loads keys and values in tiles,
// each into a pipeline of STAGES stages. The mainloop walks over the tiles of keys from the last to the first. It skips
// tiles outside the band of visible keys, and masks only the tiles at the edges of the band.
//
//   operand   product                             layout in shared memory (sm90.cuh)
//   Q         A of S = Q · Kᵀ, 64 × D             Major::K: rows are queries, in panels of 64 columns
//   K         B of S = Q · Kᵀ, D × KEYS           Major::K: rows are keys
//   V         B of O = P · V, KEYS × D_v          Major::MN: rows are keys too, which here are the k of the product
//   P         A of O = P · V, 64 × KEYS           none: the accumulator of S, rounded, is a fragment of A in registers
#pragma once

#include <initializer_list>

#include "attention/tile.cuh"
#include "sm90/sm90.cuh"
#include "sm90/tensor_map.h"

namespace kl {

constexpr int PANEL = 64;  // columns of 16 bits in a row of the swizzle
constexpr int STAGES = 2;

/// Tile shape: head dimension, padded on chip; keys per tile; consumer warpgroups; registers per producer thread and per
/// consumer thread, where the kernel is warp-specialized; head dimension of values.
template <int HEAD_DIM_, int KEYS_, int CONSUMERS_, int PRODUCER_REGISTERS_ = 0, int CONSUMER_REGISTERS_ = 0,
          int VALUE_DIM_ = HEAD_DIM_>
struct HopperShape {
    static constexpr int HEAD_DIM = HEAD_DIM_, VALUE_DIM = VALUE_DIM_, KEYS = KEYS_, CONSUMERS = CONSUMERS_;
    static constexpr int PRODUCER_REGISTERS = PRODUCER_REGISTERS_, CONSUMER_REGISTERS = CONSUMER_REGISTERS_;
    static constexpr int QUERIES = 64 * CONSUMERS, PRODUCERS = PRODUCER_REGISTERS > 0;
    static constexpr int THREADS = (PRODUCERS + CONSUMERS) * WARPGROUP;
    static constexpr int PANELS = (HEAD_DIM + PANEL - 1) / PANEL, VALUE_PANELS = (VALUE_DIM + PANEL - 1) / PANEL;
    static constexpr int Q_PANEL = QUERIES * SWIZZLE_ROW, KV_PANEL = KEYS * SWIZZLE_ROW;  // bytes
    static constexpr int Q_BYTES = PANELS * Q_PANEL, K_BYTES = PANELS * KV_PANEL, V_BYTES = VALUE_PANELS * KV_PANEL;
    static constexpr int TILE_BYTES = Q_BYTES + STAGES * (K_BYTES + V_BYTES), BARRIERS = 2 + 4 * STAGES;
    static constexpr int SHARED = SWIZZLE_ATOM + TILE_BYTES + (BARRIERS + 1) * 8;
    static_assert(KV_PANEL % SWIZZLE_ATOM == 0 && HEAD_DIM % 32 == 0 && VALUE_DIM % 32 == 0 && KEYS % 16 == 0);
    // setmaxnreg: the registers that the producer releases must cover those that the consumers request.
    static_assert(PRODUCER_REGISTERS * WARPGROUP + CONSUMER_REGISTERS * WARPGROUP * CONSUMERS <= 65536);
};

struct QkvMaps {
    CUtensorMap query, key, value;  // (D, S, H, B), a box of 64 columns
};

// ---- host: one call -------------------------------------------------------------------------------------------------

/// TMA description of a (B, H, S, D) operand, read in boxes of `rows` rows.
inline TmaTensor tma_operand(const Tensor& x, int rows) {
    const auto sizes = x.sizes(), strides = x.strides();
    return {x.scalar_type(),
            4,
            x.data_ptr(),
            {sizes[3], sizes[2], sizes[1], sizes[0]},
            {strides[3], strides[2], strides[1], strides[0]},
            {PANEL, rows, 1, 1}};
}

/// Calls f(zero, shape) with a zero of the dtype and the first of the shapes into which the head dimensions fit.
template <typename... Shapes, typename F>
void dispatch_first(const char* op, const std::string& rung, ScalarType dtype, const Attention& a, F&& f) {
    dispatch_16bit(dtype, op, [&](auto zero) {
        bool found = false;
        const auto offer = [&](auto shape) {
            using S = decltype(shape);
            if (found || a.D > S::HEAD_DIM || a.D_v > S::VALUE_DIM) return;
            found = true;
            f(zero, shape);
        };
        (offer(Shapes{}), ...);
        KL_CHECK(found, op, ": ", rung, " takes no head dimension of ", std::max(a.D, a.D_v));
    });
}

/// A result in memory: (B, H, S, columns) in any order with dense rows, or of packed sequences (S, H, columns).
template <typename T>
struct Result {
    T* data;
    int64_t batch, head, row;  // strides

    explicit Result(const Tensor& x)
        : data(static_cast<T*>(x.data_ptr())),
          batch(x.dim() == 4 ? x.stride(0) : 0),
          head(x.stride(1)),
          row(x.stride(x.dim() == 4 ? 2 : 0)) {}
    /// A row of head `outer` of all batches' heads.
    __device__ T* at(unsigned outer, int heads, int row_index) const {
        return data + outer / heads * batch + outer % heads * head + row_index * row;
    }
};

/// One call: checks the operands and allocates the results.
struct AttentionCall {
    const std::string rung;
    const Tensor &query, &key, &value;
    const Attention a;
    const Launch launch;
    Tensor output, lse;

    /// `packed`: one batch, whose results are (S, H, D_v) and (H, S).
    AttentionCall(const char* rung, const Tensor& query, const Tensor& key, const Tensor& value,
                  const std::optional<Tensor>& attn_mask, int64_t first, int64_t last, double scale, bool enable_gqa,
                  bool packed = false)
        : rung(rung),
          query(query),
          key(key),
          value(value),
          a(prepare_attention(query, key, value, first, last, scale, enable_gqa)),
          launch(query) {
        KL_CHECK(!attn_mask.has_value(), "attention: ", rung, " takes no mask in memory");
        KL_CHECK(query.dim() == 4, "attention: ", rung, " takes 4 dimensions (B, H, S, D), got ", query.dim());
        KL_CHECK(a.D % 8 == 0 && a.D_v % 8 == 0, "attention: ", rung, " takes head dimensions that are multiples of 8");
        for (const Tensor* x : {&query, &key, &value}) {
            KL_CHECK(x->numel() == 0 || x->size(3) == 1 || x->stride(3) == 1, "attention: ", rung,
                     " takes dense rows of the head dimension");
        }
        const ScalarType dtype = query.scalar_type();
        output = packed ? empty(query, dtype, {a.S_q, a.heads, a.D_v}) : empty_ordered_like(query, a.D_v);
        lse =
            packed ? empty(query, ScalarType::Float, {a.heads, a.S_q}) : empty_like_query(query, ScalarType::Float, 0);
    }

    /// Returns the results. Calls f(zero, shape) to launch the kernel, unless there are no summands. `zero` has the
    /// operands' type; `shape` is the first of the shapes into which the head dimensions fit.
    template <typename... Shapes, typename F>
    std::tuple<Tensor, Tensor> results(F&& f) {
        if (sums_nothing(a, output, lse, launch.stream)) return {output, lse};
        dispatch_first<Shapes...>("attention", rung, query.scalar_type(), a, f);
        return {output, lse};
    }

    template <typename S>
    int64_t tiles() const {
        return a.batches * a.heads * ceil_div(a.S_q, S::QUERIES);
    }

    /// Launches KERNEL on `blocks` blocks; `more` follows the arguments that all rungs have.
    template <auto* KERNEL, typename T, typename S, typename... More>
    void run(int64_t blocks, const More&... more) {
        check_hopper(reinterpret_cast<const void*>(KERNEL), launch.device, ("attention." + rung).c_str());
        static DeviceSet asked;
        allow_shared(KERNEL, S::SHARED, launch.device, asked);
        const QkvMaps maps{tensor_map(tma_operand(query, S::QUERIES)), tensor_map(tma_operand(key, S::KEYS)),
                           tensor_map(tma_operand(value, S::KEYS))};
        const auto kernel = KERNEL;
        kernel<<<grid_size(blocks), S::THREADS, S::SHARED, launch.stream>>>(
            Result<T>(output), static_cast<float*>(lse.data_ptr()), maps, a, more...);
        KL_LAUNCH_CHECK();
    }
};

/// Adds the attributes of a rung's kernels, one per shape: `of(zero, shape, name)` returns those of one.
template <typename... Shapes, typename F>
void hopper_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype,
                       std::initializer_list<const char*> names, F&& of) {
    if (dtype == ScalarType::Float) return;
    dispatch_16bit(dtype, "attention", [&](auto zero) {
        auto name = names.begin();
        (attributes.push_back(of(zero, Shapes{}, *name++)), ...);
    });
}

#if KL_SM90A

// ---- shared memory and tiles ----------------------------------------------------------------------------------------

/// Pipeline state of the i-th tile: its stage, and the phase parity of its full barrier.
__device__ inline unsigned stage_of(unsigned i) { return i % STAGES; }
__device__ inline uint32_t phase_of(unsigned i) { return i / STAGES % 2; }

/// Shared memory of a block, from a multiple of 1024 bytes on:
///
///   Q                                   QUERIES × HEAD_DIM
///   K of stage 0, K of stage 1          KEYS × HEAD_DIM each
///   V of stage 0, V of stage 1          KEYS × VALUE_DIM each
///   mbarriers                           full and empty: of Q, then of each stage of K and of V
///   work tile index                     persistent kernel alone
///
/// A full barrier completes when TMA has written the tile, an empty one when all consumer warps have released it.
template <typename S>
struct AttentionSmem {
    uint32_t q;

    __device__ explicit AttentionSmem(const void* shared) : q(align_to_swizzle(shared)) {}
    __device__ uint32_t key(int i) const { return q + S::Q_BYTES + stage_of(i) * S::K_BYTES; }
    __device__ uint32_t value(int i) const { return q + S::Q_BYTES + STAGES * S::K_BYTES + stage_of(i) * S::V_BYTES; }
    __device__ uint32_t query_full() const { return barrier(0); }
    __device__ uint32_t query_empty() const { return barrier(1); }
    __device__ uint32_t key_full(int i) const { return barrier(2 + stage_of(i)); }
    __device__ uint32_t key_empty(int i) const { return barrier(2 + STAGES + stage_of(i)); }
    __device__ uint32_t value_full(int i) const { return barrier(2 + 2 * STAGES + stage_of(i)); }
    __device__ uint32_t value_empty(int i) const { return barrier(2 + 3 * STAGES + stage_of(i)); }
    __device__ uint32_t tile_index() const {
        return barrier(S::BARRIERS);
    }  // work tile index, in the persistent kernel

    /// All threads of the block must call it.
    __device__ void init_barriers() const {
        if (threadIdx.x == 0) {
            constexpr int WARPS = S::CONSUMERS * WARPGROUP / WARP;
            mbarrier_init(query_full(), 1);
            mbarrier_init(query_empty(), WARPS);
            for (int i = 0; i < STAGES; ++i) {
                mbarrier_init(key_full(i), 1);
                mbarrier_init(value_full(i), 1);
                mbarrier_init(key_empty(i), WARPS);
                mbarrier_init(value_empty(i), WARPS);
            }
            mbarrier_init_fence();
        }
        __syncthreads();
    }

  private:
    __device__ uint32_t barrier(int i) const { return q + S::TILE_BYTES + 8 * i; }
};

/// A tile of queries and the tiles of keys that they see, at least one. `outer` = batch · heads + head. Steps count from the
/// last of these tiles to the first:
///
///   tiles of keys   │ 0 │ 1 │ 2 │ 3 │ 4 │ 5 │        visible: 2 to 4, so last = 4 and steps = 3
///   step                    │ 2 │ 1 │ 0 │
template <typename S>
struct QueryTile {
    unsigned outer;
    int batch, head, head_kv, q0, last, steps;
    int query_row = 0, key_row = 0;  // first row of the sequence, where sequences are packed

    __device__ QueryTile(const Attention& a, unsigned outer, unsigned tile)
        : outer(outer),
          batch(static_cast<int>(outer / a.heads)),
          head(static_cast<int>(outer % a.heads)),
          head_kv(head / a.group()),
          q0(static_cast<int>(tile) * S::QUERIES) {
        last = max((min(a.S_k, q0 + S::QUERIES + a.last) + S::KEYS - 1) / S::KEYS, 1) - 1;
        steps = last - min(max(q0 + a.first, 0) / S::KEYS, last) + 1;
    }
    __device__ int first_key(int step) const { return (last - step) * S::KEYS; }
};

/// The work tile of a block in a kernel that is not persistent. Under a causal mask the longest tiles start first.
template <typename S>
__device__ inline QueryTile<S> tile_of_block(const Attention& a) {
    const unsigned tiles = (a.S_q + S::QUERIES - 1) / S::QUERIES;
    return {a, blockIdx.x / tiles, tiles - 1 - blockIdx.x % tiles};
}

/// A thread's part of the wgmma accumulator. Of a consumer's 64 queries from `first` on, it has rows `lane_row` and
/// `lane_row + 8`; of every eight columns, `column` and `column + 1`.
struct ThreadRows {
    int first, lane_row, column;

    __device__ ThreadRows(int q0, int consumer)
        : first(q0 + consumer * 64),
          lane_row(warp_index() % (WARPGROUP / WARP) * 16 + static_cast<int>(threadIdx.x) % WARP / 4),
          column(static_cast<int>(threadIdx.x) % 4 * 2) {}
};

// ---- producer -------------------------------------------------------------------------------------------------------

/// Loads a tile of queries, keys or values, one TMA box per panel.
template <int PANELS>
__device__ inline void load_panels(uint32_t shared, const CUtensorMap& map, uint32_t barrier, int panel_bytes, int row,
                                   int head, int batch) {
    mbarrier_arrive_expect_tx(barrier, PANELS * panel_bytes);
#pragma unroll
    for (int i = 0; i < PANELS; ++i) tma_load(shared + i * panel_bytes, map, barrier, i * PANEL, row, head, batch);
}
template <typename S>
__device__ inline void load_query(const AttentionSmem<S>& smem, const QkvMaps& maps, const QueryTile<S>& tile) {
    load_panels<S::PANELS>(smem.q, maps.query, smem.query_full(), S::Q_PANEL, tile.query_row + tile.q0, tile.head,
                           tile.batch);
}
/// Loads the keys, or values, of a step as pipeline tile `i`.
template <typename S>
__device__ inline void load_key(const AttentionSmem<S>& smem, const QkvMaps& maps, const QueryTile<S>& tile, int step,
                                int i) {
    load_panels<S::PANELS>(smem.key(i), maps.key, smem.key_full(i), S::KV_PANEL, tile.key_row + tile.first_key(step),
                           tile.head_kv, tile.batch);
}
template <typename S>
__device__ inline void load_value(const AttentionSmem<S>& smem, const QkvMaps& maps, const QueryTile<S>& tile, int step,
                                  int i) {
    load_panels<S::VALUE_PANELS>(smem.value(i), maps.value, smem.value_full(i), S::KV_PANEL,
                                 tile.key_row + tile.first_key(step), tile.head_kv, tile.batch);
}

/// Producer: one thread loads work tile number `iteration` of the block, each stage as soon as it is released. The order is
/// K0, Q, K1, V0, K2, V1, …: keys come first, because S of a step precedes O of the step before. The first step is
/// pipeline tile `begin`. What `publish` stores is visible to consumers once the queries' barrier is full.
template <typename S, typename F>
__device__ inline void producer(const AttentionSmem<S>& smem, const QkvMaps& maps, const QueryTile<S>& tile,
                                int iteration, int begin, F&& publish) {
    const auto next_key = [&](int step) {
        const int i = begin + step;
        mbarrier_wait(smem.key_empty(i), phase_of(i) ^ 1);
        load_key(smem, maps, tile, step, i);
    };
    next_key(0);
    mbarrier_wait(smem.query_empty(), iteration % 2 ^ 1);
    publish();
    load_query(smem, maps, tile);
    for (int step = 0; step < tile.steps; ++step) {
        if (step + 1 < tile.steps) next_key(step + 1);
        const int i = begin + step;
        mbarrier_wait(smem.value_empty(i), phase_of(i) ^ 1);
        load_value(smem, maps, tile, step, i);
    }
}

/// The same for a block with one work tile.
template <typename S>
__device__ inline void producer(const AttentionSmem<S>& smem, const QkvMaps& maps, const QueryTile<S>& tile) {
    producer(smem, maps, tile, 0, 0, [] {});
}

/// Releases a stage: the warp has read the tile. All consumer warps must call it.
__device__ inline void release_stage(uint32_t empty) {
    if (threadIdx.x % WARP == 0) mbarrier_arrive(empty);
}

// ---- consumer: products ---------------------------------------------------------------------------------------------

/// Issues scores = Q · Kᵀ for 64 queries from `q` on, and commits the wgmma group.
template <typename T, typename S>
__device__ inline void gemm_qk(float (&scores)[S::KEYS / 2], uint32_t q, uint32_t k) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < S::HEAD_DIM / 16; ++i) {
        const uint64_t a =
            matrix_descriptor<Major::K>(q + i / 4 * S::Q_PANEL, S::Q_PANEL) + i % 4 * DESCRIPTOR_STEP<Major::K>;
        const uint64_t b =
            matrix_descriptor<Major::K>(k + i / 4 * S::KV_PANEL, S::KV_PANEL) + i % 4 * DESCRIPTOR_STEP<Major::K>;
        Wgmma<S::KEYS>::template multiply<T, Major::K, Major::K>(scores, a, b, i > 0);
    }
    wgmma_commit();
}

/// Issues output += P · V, or output = P · V without `accumulate`, and commits the wgmma group.
template <typename T, typename S>
__device__ inline void gemm_pv(float (&output)[S::VALUE_DIM / 2], uint32_t (&weights)[S::KEYS / 16][4], uint32_t v,
                               bool accumulate) {
    wgmma_fence();
    const uint64_t b = matrix_descriptor<Major::MN>(v, S::KV_PANEL);
#pragma unroll
    for (int i = 0; i < S::KEYS / 16; ++i) {
        Wgmma<S::VALUE_DIM>::template multiply<T, Major::MN>(output, weights[i], b + i * DESCRIPTOR_STEP<Major::MN>,
                                                             accumulate || i > 0);
    }
    wgmma_commit();
}

// ---- consumer: softmax ----------------------------------------------------------------------------------------------

/// Online softmax state of a thread's two rows. row_max follows the maximum only where weights would otherwise pass
/// 2^SLACK, which 16 bits hold as exactly as weights up to 1. So outputs are seldom rescaled (flash-attention,
/// flash_attn/cute/softmax.py).
constexpr float SLACK = 8.0f;
template <int KEYS>
struct OnlineSoftmaxState {
    float row_max[2] = {-INFINITE, -INFINITE};
    float row_sum[2] = {0.0f, 0.0f};  // of this thread's columns
    float rescale[2];                 // factor for the output accumulated so far

    /// Replaces scores by exp(scores − row_max), with a maximum that may be stale. `scale` includes log2 e. Maxima and
    /// sums are chains of dependent instructions: two chains per row, and both rows at once, hide their latency.
    __device__ void update(float (&scores)[KEYS / 2], float scale) {
        float new_max[2], shift[2], largest[2][2], sum[2][2] = {};
        const auto each_score = [&](auto&& f) {
#pragma unroll
            for (int i = 0; i < KEYS / 2; ++i) f(scores[i], i / 2 % 2, i % 2);
        };
#pragma unroll
        for (int i = 0; i < 4; ++i) largest[i / 2][i % 2] = scores[i];
        // fmaxf drops NaN; the special function unit brings it back.
        each_score([&](float x, int h, int chain) { largest[h][chain] = fmaxf(largest[h][chain], x); });
#pragma unroll
        for (int h = 0; h < 2; ++h) new_max[h] = fmaxf(row_max[h], fmaxf(largest[h][0], largest[h][1]));
#pragma unroll
        for (int lanes = 1; lanes < 4; lanes *= 2) {
#pragma unroll
            for (int h = 0; h < 2; ++h) new_max[h] = fmaxf(new_max[h], __shfl_xor_sync(FULL_MASK, new_max[h], lanes));
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            // From −inf the difference is infinite, or no number: then too the maximum is a new one.
            const bool kept = (new_max[h] - row_max[h]) * scale <= SLACK;
            if (kept) new_max[h] = row_max[h];
            // While a row has seen only −inf, nothing is subtracted: its exponentials are 0, not NaN.
            shift[h] = new_max[h] == -INFINITE ? 0.0f : new_max[h] * scale;
            // The power is not quite 1 where nothing has changed: `shift` is rounded.
            rescale[h] = kept ? 1.0f : exp2_approx(fmaf(row_max[h], scale, -shift[h]));
            row_max[h] = new_max[h];
        }
        each_score([&](float& x, int h, int chain) {
            x = exp2_approx(fmaf(x, scale, -shift[h]));
            sum[h][chain] += x;
        });
#pragma unroll
        for (int h = 0; h < 2; ++h) row_sum[h] = fmaf(row_sum[h], rescale[h], sum[h][0] + sum[h][1]);
    }

    template <int COUNT>
    __device__ void rescale_output(float (&output)[COUNT]) const {
        if (__all_sync(FULL_MASK, rescale[0] == 1.0f && rescale[1] == 1.0f)) return;
#pragma unroll
        for (int j = 0; j < COUNT; ++j) output[j] *= rescale[j % 4 / 2];
    }
};

/// Sets scores to −inf where a query does not see a key of the tile that begins with key k0.
template <int KEYS>
__device__ inline void apply_mask(float (&scores)[KEYS / 2], const Attention& a, const ThreadRows& rows, int k0) {
    if (k0 + KEYS <= min(a.S_k, rows.first + a.last + 1) && k0 >= rows.first + 63 + a.first) return;
    const int row = rows.first + rows.lane_row, column = k0 + rows.column;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int begin = row + 8 * h + a.first - column, end = min(a.S_k, row + 8 * h + a.last + 1) - column;
#pragma unroll
        for (int j = 0; j < KEYS / 8; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                if (8 * j + e < begin || 8 * j + e >= end) scores[4 * j + 2 * h + e] = -INFINITE;
            }
        }
    }
}

/// Rounds weights to T, in the register layout of wgmma's A operand.
template <typename T, int KEYS>
__device__ inline void round_weights(uint32_t (&weights)[KEYS / 16][4], const float (&scores)[KEYS / 2]) {
#pragma unroll
    for (int i = 0; i < KEYS / 16; ++i) {
#pragma unroll
        for (int r = 0; r < 4; ++r) weights[i][r] = pack_pair<T>(scores[8 * i + 2 * r], scores[8 * i + 2 * r + 1]);
    }
}

// ---- epilogue -------------------------------------------------------------------------------------------------------

/// Divides the output by the sum of weights and stores it, 16 bytes per store, with the log-sum-exp. The pointers are
/// those of query 0.
template <typename T, typename S>
__device__ inline void store_results(T* first_output, int64_t stride, float* first_lse, const Attention& a,
                                     const ThreadRows& rows, const float (&output)[S::VALUE_DIM / 2],
                                     const OnlineSoftmaxState<S::KEYS>& softmax) {
    const int lane = threadIdx.x % 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float sum = softmax.row_sum[h];
        sum += __shfl_xor_sync(FULL_MASK, sum, 1);
        sum += __shfl_xor_sync(FULL_MASK, sum, 2);
        const int row = rows.first + rows.lane_row + 8 * h;
        if (row < a.S_q && lane == 0) first_lse[row] = softmax.row_max[h] * a.scale + logf(sum);
        const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;  // a row of nothing but −inf gives zeros
#pragma unroll
        for (int j = 0; j < S::VALUE_DIM / 8; j += 4) {
            uint32_t x[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* pair = output + 4 * (j + i) + 2 * h;
                x[i] = pack_pair<T>(pair[0] * inverse, pair[1] * inverse);
            }
            transpose_quad(x);
            const int column = 8 * (j + lane);
            store_16_bytes_if(first_output + row * stride + column, make_uint4(x[0], x[1], x[2], x[3]),
                              row < a.S_q && column < a.D_v);  // a multiple of 8
        }
    }
}
/// The same for batches, whose log-sum-exps are (B, H, S).
template <typename T, typename S>
__device__ inline void store_results(const Result<T>& all_outputs, float* all_lse, const Attention& a,
                                     const QueryTile<S>& tile, const ThreadRows& rows,
                                     const float (&output)[S::VALUE_DIM / 2],
                                     const OnlineSoftmaxState<S::KEYS>& softmax) {
    store_results<T, S>(all_outputs.at(tile.outer, a.heads, 0), all_outputs.row, all_lse + int64_t{tile.outer} * a.S_q,
                        a, rows, output, softmax);
}

#endif

}  // namespace kl
