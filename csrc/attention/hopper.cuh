// What the steps on Hopper's wgmma share: where tiles stand, how they are loaded, the two products, the softmax between
// them, how outputs leave the registers. The table of the climb stands in attention.cuh.
//
// A block has 64 queries for each of its consumer warpgroups, the rows of one wgmma. Keys and values come by TMA in
// tiles, into a ring each in shared memory. They are walked from the last keys to the first; those outside of the band
// of keys that are seen are passed over, and only those at its edges are masked.
#pragma once

#include <initializer_list>

#include "attention/tile.cuh"
#include "sm90/sm90.cuh"
#include "sm90/tensor_map.h"

namespace kl {

constexpr int PANEL = 64;  // columns of 16 bits in a row of the swizzle
constexpr int STAGES = 2;

// Head dimension, padded on chip; keys of a tile; consumer warpgroups; registers of a producer's and a consumer's
// thread, where the two are apart.
template <int HEAD_DIM_, int KEYS_, int CONSUMERS_, int PRODUCER_REGISTERS_ = 0, int CONSUMER_REGISTERS_ = 0>
struct HopperShape {
    static constexpr int HEAD_DIM = HEAD_DIM_, KEYS = KEYS_, CONSUMERS = CONSUMERS_;
    static constexpr int PRODUCER_REGISTERS = PRODUCER_REGISTERS_, CONSUMER_REGISTERS = CONSUMER_REGISTERS_;
    static constexpr int QUERIES = 64 * CONSUMERS, PRODUCERS = PRODUCER_REGISTERS > 0;
    static constexpr int THREADS = (PRODUCERS + CONSUMERS) * WARPGROUP;
    static constexpr int PANELS = (HEAD_DIM + PANEL - 1) / PANEL;
    static constexpr int Q_PANEL = QUERIES * SWIZZLE_ROW, KV_PANEL = KEYS * SWIZZLE_ROW;  // bytes
    static constexpr int Q_BYTES = PANELS * Q_PANEL, KV_BYTES = PANELS * KV_PANEL;
    static constexpr int BARRIERS = 2 + 4 * STAGES;
    static constexpr int SHARED = SWIZZLE_ATOM + Q_BYTES + STAGES * 2 * KV_BYTES + (BARRIERS + 1) * 8;
    static_assert(KV_PANEL % SWIZZLE_ATOM == 0 && HEAD_DIM % 32 == 0 && KEYS % 16 == 0);
    // What is given back must be enough for what is taken.
    static_assert(PRODUCER_REGISTERS * WARPGROUP + CONSUMER_REGISTERS * WARPGROUP * CONSUMERS <= 65536);
};

struct QkvMaps {
    CUtensorMap query, key, value;  // (D, S, H, B), a box of 64 columns
};

// ---- host: one call -------------------------------------------------------------------------------------------------

// A (B, H, S, D) operand as TMA sees it, read by boxes of `rows` rows.
inline TmaTensor tma_operand(const Tensor& x, int rows) {
    const auto sizes = x.sizes(), strides = x.strides();
    return {x.scalar_type(),
            4,
            x.data_ptr(),
            {sizes[3], sizes[2], sizes[1], sizes[0]},
            {strides[3], strides[2], strides[1], strides[0]},
            {PANEL, rows, 1, 1}};
}

// A call, checked, and its results, allocated.
struct AttentionCall {
    const std::string step;
    const Tensor &query, &key, &value;
    const Attention a;
    const Launch launch;
    Tensor output, lse;

    // `packed`: results are to be (S, H, D_v) and (H, S), where there is one batch.
    AttentionCall(const char* step, const Tensor& query, const Tensor& key, const Tensor& value,
                  const std::optional<Tensor>& attn_mask, int64_t first, int64_t last, double scale, bool enable_gqa,
                  bool packed = false)
        : step(step),
          query(query),
          key(key),
          value(value),
          a(prepare_attention(query, key, value, first, last, scale, enable_gqa)),
          launch(query) {
        KL_CHECK(!attn_mask.has_value(), "attention: ", step, " takes no mask in memory");
        KL_CHECK(query.dim() == 4, "attention: ", step, " takes 4 dimensions (B, H, S, D), got ", query.dim());
        KL_CHECK(a.D % 8 == 0 && a.D_v % 8 == 0, "attention: ", step, " takes head dimensions that are multiples of 8");
        for (const Tensor* x : {&query, &key, &value}) {
            KL_CHECK(x->numel() == 0 || x->size(3) == 1 || x->stride(3) == 1, "attention: ", step,
                     " takes dense rows of the head dimension");
        }
        const ScalarType dtype = query.scalar_type();
        output = packed ? empty(query, dtype, {a.S_q, a.heads, a.D_v}) : empty_like_query(query, dtype, a.D_v);
        lse =
            packed ? empty(query, ScalarType::Float, {a.heads, a.S_q}) : empty_like_query(query, ScalarType::Float, 0);
    }

    // The results. `f` is called to launch the step, unless there is nothing to add up, with a value of the operands' type
    // and the first of the shapes into which the head dimension fits.
    template <typename... Shapes, typename F>
    std::tuple<Tensor, Tensor> results(F&& f) {
        if (sums_nothing(a, output, lse, launch.stream)) return {output, lse};
        const int head_dim = std::max(a.D, a.D_v);
        dispatch_16bit(query.scalar_type(), "attention", [&](auto zero) {
            bool found = false;
            const auto offer = [&](auto shape) {
                if (found || head_dim > decltype(shape)::HEAD_DIM) return;
                found = true;
                f(zero, shape);
            };
            (offer(Shapes{}), ...);
            KL_CHECK(found, "attention: ", step, " takes no head dimension of ", head_dim);
        });
        return {output, lse};
    }

    template <typename S>
    int64_t tiles() const {
        return a.batches * a.heads * ceil_div(a.S_q, S::QUERIES);
    }

    // Launches a kernel on `blocks` blocks; `more` follows the arguments that all steps have.
    template <auto* KERNEL, typename T, typename S, typename... More>
    void run(int64_t blocks, const More&... more) {
        check_hopper(reinterpret_cast<const void*>(KERNEL), launch.device, ("attention." + step).c_str());
        static DeviceSet asked;
        allow_shared(KERNEL, S::SHARED, launch.device, asked);
        const QkvMaps maps{tensor_map(tma_operand(query, S::QUERIES)), tensor_map(tma_operand(key, S::KEYS)),
                           tensor_map(tma_operand(value, S::KEYS))};
        const auto kernel = KERNEL;
        kernel<<<grid_size(blocks), S::THREADS, S::SHARED, launch.stream>>>(
            static_cast<T*>(output.data_ptr()), static_cast<float*>(lse.data_ptr()), maps, a, more...);
        KL_LAUNCH_CHECK();
    }
};

// Facts of a step's kernels by their names, one for each shape: `of(zero, shape, name)` gives those of one.
template <typename... Shapes, typename F>
void hopper_facts(std::vector<KernelFacts>& facts, ScalarType dtype, std::initializer_list<const char*> names, F&& of) {
    if (dtype == ScalarType::Float) return;
    dispatch_16bit(dtype, "attention", [&](auto zero) {
        auto name = names.begin();
        (facts.push_back(of(zero, Shapes{}, *name++)), ...);
    });
}

#if KL_SM90A

// ---- where things stand ---------------------------------------------------------------------------------------------

// The i-th tile of a ring: where it stands, and the parity of the phase in which it lands.
__device__ inline unsigned stage_of(unsigned i) { return i % STAGES; }
__device__ inline uint32_t phase_of(unsigned i) { return i / STAGES % 2; }

// A block's shared memory: its queries, the rings, and barriers, which say that a tile has landed (full), or that all
// consumer warps have done with it (empty).
template <typename S>
struct AttentionShared {
    uint32_t q;

    __device__ explicit AttentionShared(const void* shared)
        : q((shared_address(shared) + SWIZZLE_ATOM - 1) / SWIZZLE_ATOM * SWIZZLE_ATOM) {}
    __device__ uint32_t key(int i) const { return q + S::Q_BYTES + stage_of(i) * S::KV_BYTES; }
    __device__ uint32_t value(int i) const { return key(i) + STAGES * S::KV_BYTES; }
    __device__ uint32_t query_full() const { return barrier(0); }
    __device__ uint32_t query_empty() const { return barrier(1); }
    __device__ uint32_t key_full(int i) const { return barrier(2 + stage_of(i)); }
    __device__ uint32_t key_empty(int i) const { return barrier(2 + STAGES + stage_of(i)); }
    __device__ uint32_t value_full(int i) const { return barrier(2 + 2 * STAGES + stage_of(i)); }
    __device__ uint32_t value_empty(int i) const { return barrier(2 + 3 * STAGES + stage_of(i)); }
    __device__ uint32_t number() const { return barrier(S::BARRIERS); }  // of the tile of queries, where blocks stay

    // By all threads.
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
    __device__ uint32_t barrier(int i) const { return q + S::Q_BYTES + STAGES * 2 * S::KV_BYTES + 8 * i; }
};

// A tile of queries, and the tiles of keys that some of them see, at least one. `outer` numbers batches and heads.
template <typename S>
struct QueryTile {
    unsigned outer;
    int batch, head, head_kv, q0, last, steps;
    int query_row = 0, key_row = 0;  // where the sequence begins, of several one after the other

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

// The block's tile where each has one. Under a causal mask the longest have the lowest numbers, and begin first.
template <typename S>
__device__ inline QueryTile<S> tile_of_block(const Attention& a) {
    const unsigned tiles = (a.S_q + S::QUERIES - 1) / S::QUERIES;
    return {a, blockIdx.x / tiles, tiles - 1 - blockIdx.x % tiles};
}

// Of a consumer's 64 queries, from `first` on, a thread has scores and outputs of row `lane_row` and of the eighth
// after it; and of each eight columns two, from `column` on.
struct ThreadRows {
    int first, lane_row, column;

    __device__ ThreadRows(int q0, int consumer)
        : first(q0 + consumer * 64),
          lane_row(warp_index() % (WARPGROUP / WARP) * 16 + static_cast<int>(threadIdx.x) % WARP / 4),
          column(static_cast<int>(threadIdx.x) % 4 * 2) {}
};

// ---- loading --------------------------------------------------------------------------------------------------------

// Box by box, a tile of queries, keys or values.
template <int PANELS>
__device__ inline void load_panels(uint32_t shared, const CUtensorMap& map, uint32_t barrier, int panel_bytes, int row,
                                   int head, int batch) {
    mbarrier_arrive_expect(barrier, PANELS * panel_bytes);
#pragma unroll
    for (int i = 0; i < PANELS; ++i) tma_load(shared + i * panel_bytes, map, barrier, i * PANEL, row, head, batch);
}
template <typename S>
__device__ inline void load_query(const AttentionShared<S>& at, const QkvMaps& maps, const QueryTile<S>& tile) {
    load_panels<S::PANELS>(at.q, maps.query, at.query_full(), S::Q_PANEL, tile.query_row + tile.q0, tile.head,
                           tile.batch);
}
// The keys, or values, of a step into place `i` of their ring.
template <typename S>
__device__ inline void load_key(const AttentionShared<S>& at, const QkvMaps& maps, const QueryTile<S>& tile, int step,
                                int i) {
    load_panels<S::PANELS>(at.key(i), maps.key, at.key_full(i), S::KV_PANEL, tile.key_row + tile.first_key(step),
                           tile.head_kv, tile.batch);
}
template <typename S>
__device__ inline void load_value(const AttentionShared<S>& at, const QkvMaps& maps, const QueryTile<S>& tile, int step,
                                  int i) {
    load_panels<S::PANELS>(at.value(i), maps.value, at.value_full(i), S::KV_PANEL, tile.key_row + tile.first_key(step),
                           tile.head_kv, tile.batch);
}

// What a producer's one thread does for a tile of queries, the block's `turn`-th: everything as soon as there is room.
// Its first step has place `begin` of the rings. What `announce` stores is there for consumers when the queries are.
template <typename S, typename F>
__device__ inline void produce(const AttentionShared<S>& at, const QkvMaps& maps, const QueryTile<S>& tile, int turn,
                               int begin, F&& announce) {
    const auto next_key = [&](int step) {
        const int i = begin + step;
        mbarrier_wait(at.key_empty(i), phase_of(i) ^ 1);
        load_key(at, maps, tile, step, i);
    };
    next_key(0);
    mbarrier_wait(at.query_empty(), turn % 2 ^ 1);
    announce();
    load_query(at, maps, tile);
    for (int step = 0; step < tile.steps; ++step) {
        if (step + 1 < tile.steps) next_key(step + 1);
        const int i = begin + step;
        mbarrier_wait(at.value_empty(i), phase_of(i) ^ 1);
        load_value(at, maps, tile, step, i);
    }
}

// The same where a block has one tile.
template <typename S>
__device__ inline void produce(const AttentionShared<S>& at, const QkvMaps& maps, const QueryTile<S>& tile) {
    produce(at, maps, tile, 0, 0, [] {});
}

// A consumer's warp has done with a tile.
__device__ inline void done_with(uint32_t empty) {
    if (threadIdx.x % WARP == 0) mbarrier_arrive(empty);
}

// ---- products -------------------------------------------------------------------------------------------------------

// Issues scores = Q · Kᵀ: 64 queries from `q` on.
template <typename T, typename S>
__device__ inline void issue_scores(float (&scores)[S::KEYS / 2], uint32_t q, uint32_t k) {
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

// Issues output += P · V.
template <typename T, typename S>
__device__ inline void issue_output(float (&output)[S::HEAD_DIM / 2], uint32_t (&weights)[S::KEYS / 16][4], uint32_t v,
                                    bool accumulate) {
    wgmma_fence();
    const uint64_t b = matrix_descriptor<Major::MN>(v, S::KV_PANEL);
#pragma unroll
    for (int i = 0; i < S::KEYS / 16; ++i) {
        Wgmma<S::HEAD_DIM>::template multiply<T, Major::MN>(output, weights[i], b + i * DESCRIPTOR_STEP<Major::MN>,
                                                            accumulate || i > 0);
    }
    wgmma_commit();
}

// ---- softmax --------------------------------------------------------------------------------------------------------

// A thread's two rows of a running softmax. What is subtracted from the scores follows their maximum only when weights
// would pass 2^SLACK otherwise, which 16 bits hold as exactly as those up to 1: so that outputs are seldom rescaled.
// (flash-attention, flash_attn/cute/softmax.py.)
constexpr float SLACK = 8.0f;
template <int KEYS>
struct RunningSoftmax {
    float row_max[2] = {-INFINITE, -INFINITE};
    float row_sum[2] = {0.0f, 0.0f};  // of this thread's columns
    float rescale[2];                 // what the output was made of must be multiplied by

    // scores becomes exp(scores − row_max), with a maximum that may be an earlier one. `scale` is of scores in powers of 2.
    // Maxima and sums are chains of dependent instructions: two a row, and both rows at once, hide their latencies.
    __device__ void next(float (&scores)[KEYS / 2], float scale) {
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

// −inf where a query does not see a key of the tile that begins with key k0, if there is such a pair.
template <int KEYS>
__device__ inline void hide(float (&scores)[KEYS / 2], const Attention& a, const ThreadRows& rows, int k0) {
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

// Weights rounded to T, as wgmma wants its first operand.
template <typename T, int KEYS>
__device__ inline void round_weights(uint32_t (&weights)[KEYS / 16][4], const float (&scores)[KEYS / 2]) {
#pragma unroll
    for (int i = 0; i < KEYS / 16; ++i) {
#pragma unroll
        for (int r = 0; r < 4; ++r) weights[i][r] = pack(scores[8 * i + 2 * r], scores[8 * i + 2 * r + 1], T{});
    }
}

// ---- results --------------------------------------------------------------------------------------------------------

// Output over the sum of weights, 16 bytes a store, and the log-sum-exp, to where those of the first query stand.
template <typename T, typename S>
__device__ inline void store_results(T* first_output, int64_t stride, float* first_lse, const Attention& a,
                                     const ThreadRows& rows, const float (&output)[S::HEAD_DIM / 2],
                                     const RunningSoftmax<S::KEYS>& softmax) {
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
        for (int j = 0; j < S::HEAD_DIM / 8; j += 4) {
            uint32_t x[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* pair = output + 4 * (j + i) + 2 * h;
                x[i] = pack(pair[0] * inverse, pair[1] * inverse, T{});
            }
            transpose_quad(x);
            const int column = 8 * (j + lane);
            if (row < a.S_q && column < a.D_v) {  // a multiple of 8
                *reinterpret_cast<uint4*>(first_output + row * stride + column) = make_uint4(x[0], x[1], x[2], x[3]);
            }
        }
    }
}
// The same to dense tensors (B, H, S, D_v) and (B, H, S).
template <typename T, typename S>
__device__ inline void store_results(T* all_output, float* all_lse, const Attention& a, const QueryTile<S>& tile,
                                     const ThreadRows& rows, const float (&output)[S::HEAD_DIM / 2],
                                     const RunningSoftmax<S::KEYS>& softmax) {
    const int64_t begin = int64_t{tile.outer} * a.S_q;
    store_results<T, S>(all_output + begin * a.D_v, a.D_v, all_lse + begin, a, rows, output, softmax);
}

#endif

}  // namespace kl
