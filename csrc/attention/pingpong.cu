// Attention on Hopper; the table of the climb stands in attention.cuh.
//
//   pingpong   TMA and wgmma: one warpgroup's softmax under the other's products     every block loads its own K and V
//
// FlashAttention-3 (Shah et al., arXiv:2407.08608; Dao-AILab/flash-attention, hopper/). A block has 64 queries for each of
// its consumer warpgroups. A producer warp has TMA bring tiles of keys and values into a ring, ahead of their use. Three
// things overlap:
//
//   - Within a warpgroup, the products of the next tile's scores and of this tile's values are issued together, and run
//     while the softmax of the next tile is made. Weights stay in registers, as the first operand of their product.
//   - Between warpgroups, products are issued in turn, by named barriers: so one's softmax falls under the other's
//     products, and not beside it.
//   - Loads run under all of it. The consumers take the registers that the producer does not need.
//
// Tiles are walked from the last keys to the first, and longest tiles first, as in flash.cu; tiles outside of the band of
// keys that are seen are passed over, and only those at its edges are masked.

#include "../sm90.cuh"
#include "../tensor_map.h"
#include "tile.cuh"

namespace kl {
namespace {

constexpr int PANEL = 64;  // columns of 16 bits in a row of the swizzle
constexpr int STAGES = 2;

// Head dimension, padded on chip; keys of a tile; consumer warpgroups; registers of a producer's and a consumer's thread.
template <int HEAD_DIM_, int KEYS_, int CONSUMERS_, int PRODUCER_REGISTERS_, int CONSUMER_REGISTERS_>
struct HopperShape {
    static constexpr int HEAD_DIM = HEAD_DIM_, KEYS = KEYS_, CONSUMERS = CONSUMERS_;
    static constexpr int PRODUCER_REGISTERS = PRODUCER_REGISTERS_, CONSUMER_REGISTERS = CONSUMER_REGISTERS_;
    static constexpr int QUERIES = 64 * CONSUMERS, THREADS = (1 + CONSUMERS) * WARPGROUP;
    static constexpr int PANELS = (HEAD_DIM + PANEL - 1) / PANEL;
    static constexpr int Q_PANEL = QUERIES * SWIZZLE_ROW, KV_PANEL = KEYS * SWIZZLE_ROW;  // bytes
    static constexpr int Q_BYTES = PANELS * Q_PANEL, KV_BYTES = PANELS * KV_PANEL;
    static constexpr int SHARED = SWIZZLE_ATOM + Q_BYTES + STAGES * 2 * KV_BYTES + (1 + 4 * STAGES) * 8;
    static_assert(KV_PANEL % SWIZZLE_ATOM == 0 && HEAD_DIM % 16 == 0 && KEYS % 16 == 0);
    // What is given back must be enough for what is taken.
    static_assert(PRODUCER_REGISTERS * WARPGROUP + CONSUMER_REGISTERS * WARPGROUP * CONSUMERS <= 65536);
};
using Hopper64 = HopperShape<64, 128, 3, 32, 160>;
using Hopper96 = HopperShape<96, 128, 2, 24, 240>;
using Hopper128 = HopperShape<128, 128, 2, 24, 240>;
using Hopper256 = HopperShape<256, 80, 2, 24, 240>;

template <typename F>
void dispatch_hopper(int head_dim, F&& f) {
    if (head_dim <= 64) return f(Hopper64{});
    if (head_dim <= 96) return f(Hopper96{});
    if (head_dim <= 128) return f(Hopper128{});
    f(Hopper256{});
}

struct Maps {
    CUtensorMap query, key, value;  // (D, S, H, B), a box of 64 columns
};

#if KL_SM90A

// Barriers in shared memory: a tile has landed, or all consumer warps have done with it.
struct Barriers {
    uint32_t base;
    __device__ uint32_t query() const { return base; }
    __device__ uint32_t key_full(int stage) const { return base + 8 * (1 + stage); }
    __device__ uint32_t key_empty(int stage) const { return base + 8 * (1 + STAGES + stage); }
    __device__ uint32_t value_full(int stage) const { return base + 8 * (1 + 2 * STAGES + stage); }
    __device__ uint32_t value_empty(int stage) const { return base + 8 * (1 + 3 * STAGES + stage); }
};

// The i-th tile of a ring: where it stands, and the parity of the phase in which it lands.
__device__ inline int stage_of(int i) { return i % STAGES; }
__device__ inline uint32_t phase_of(int i) { return i / STAGES % 2; }

// Box by box, a tile of ROWS rows.
template <int PANELS>
__device__ inline void load_panels(uint32_t shared, const CUtensorMap& map, uint32_t barrier, int panel_bytes, int row,
                                   int head, int batch) {
    mbarrier_arrive_expect(barrier, PANELS * panel_bytes);
#pragma unroll
    for (int i = 0; i < PANELS; ++i) tma_load(shared + i * panel_bytes, map, barrier, i * PANEL, row, head, batch);
}

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

// A thread's two rows of a running softmax.
template <int KEYS>
struct Softmax {
    float row_max[2] = {-INFINITE, -INFINITE};
    float row_sum[2] = {0.0f, 0.0f};  // of this thread's columns
    float rescale[2];                 // what the output was made of must be multiplied by

    // scores becomes exp(scores − row_max).
    __device__ void next(float (&scores)[KEYS / 2], float scale) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float new_max = row_max[h];  // fmaxf drops NaN; the exponential of such a score brings it back
#pragma unroll
            for (int j = 0; j < KEYS / 8; ++j) {
                new_max = fmaxf(new_max, fmaxf(scores[4 * j + 2 * h], scores[4 * j + 2 * h + 1]));
            }
            new_max = fmaxf(new_max, __shfl_xor_sync(FULL_MASK, new_max, 1));
            new_max = fmaxf(new_max, __shfl_xor_sync(FULL_MASK, new_max, 2));
            // While a row has seen only −inf, nothing is subtracted: its exponentials are 0, not NaN.
            const float shift = new_max == -INFINITE ? 0.0f : new_max * scale;
            rescale[h] = exp2_approx(fmaf(row_max[h], scale, -shift));
            row_max[h] = new_max;
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < KEYS / 8; ++j) {
#pragma unroll
                for (int e = 4 * j + 2 * h; e < 4 * j + 2 * h + 2; ++e) {
                    scores[e] = exp2_approx(fmaf(scores[e], scale, -shift));
                    sum += scores[e];
                }
            }
            row_sum[h] = fmaf(row_sum[h], rescale[h], sum);
        }
    }
};

// −inf where a query does not see a key. `row` and `column` are this thread's first.
template <int KEYS>
__device__ inline void hide(float (&scores)[KEYS / 2], const Attention& a, int row, int column) {
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

#endif

template <typename T, typename S>
__global__ void __launch_bounds__(S::THREADS, 1)
    attention_pingpong_kernel(T* output_pointer, float* lse, const __grid_constant__ Maps maps,
                              const __grid_constant__ Attention a) {
#if KL_SM90A
    extern __shared__ unsigned char shared_bytes[];
    const uint32_t q_tile = (shared_address(shared_bytes) + SWIZZLE_ATOM - 1) / SWIZZLE_ATOM * SWIZZLE_ATOM;
    const auto k_tile = [&](int i) { return q_tile + S::Q_BYTES + stage_of(i) * S::KV_BYTES; };
    const auto v_tile = [&](int i) { return k_tile(i) + STAGES * S::KV_BYTES; };
    const Barriers barriers{q_tile + S::Q_BYTES + STAGES * 2 * S::KV_BYTES};

    const unsigned tiles = (a.S_q + S::QUERIES - 1) / S::QUERIES, outer = blockIdx.x / tiles;
    const int q0 = static_cast<int>(tiles - 1 - blockIdx.x % tiles) * S::QUERIES;
    const int batch = static_cast<int>(outer / a.heads), head = static_cast<int>(outer % a.heads);
    // The tiles of keys that some query of the block sees, at least one.
    const int last_tile = max((min(a.S_k, q0 + S::QUERIES + a.last) + S::KEYS - 1) / S::KEYS, 1) - 1;
    const int first_tile = min(max(q0 + a.first, 0) / S::KEYS, last_tile);
    const int steps = last_tile - first_tile + 1;

    if (threadIdx.x == 0) {
        mbarrier_init(barriers.query(), 1);
        for (int s = 0; s < STAGES; ++s) {
            mbarrier_init(barriers.key_full(s), 1);
            mbarrier_init(barriers.value_full(s), 1);
            mbarrier_init(barriers.key_empty(s), S::CONSUMERS * WARPGROUP / WARP);
            mbarrier_init(barriers.value_empty(s), S::CONSUMERS * WARPGROUP / WARP);
        }
        mbarrier_init_fence();
    }
    __syncthreads();

    const int warp = warp_index(), group = warp / (WARPGROUP / WARP);
    if (group == 0) {
        registers_decrease<S::PRODUCER_REGISTERS>();
        if (warp == 0 && elect_one()) {
            const int head_kv = head / a.group();
            const auto load_key = [&](int i) {
                mbarrier_wait(barriers.key_empty(stage_of(i)), phase_of(i) ^ 1);
                load_panels<S::PANELS>(k_tile(i), maps.key, barriers.key_full(stage_of(i)), S::KV_PANEL,
                                       (last_tile - i) * S::KEYS, head_kv, batch);
            };
            load_panels<S::PANELS>(q_tile, maps.query, barriers.query(), S::Q_PANEL, q0, head, batch);
            load_key(0);
            for (int i = 0; i < steps; ++i) {
                if (i + 1 < steps) load_key(i + 1);
                mbarrier_wait(barriers.value_empty(stage_of(i)), phase_of(i) ^ 1);
                load_panels<S::PANELS>(v_tile(i), maps.value, barriers.value_full(stage_of(i)), S::KV_PANEL,
                                       (last_tile - i) * S::KEYS, head_kv, batch);
            }
        }
        return;
    }

    registers_increase<S::CONSUMER_REGISTERS>();
    const int consumer = group - 1, next_consumer = (consumer + 1) % S::CONSUMERS;
    const int lane = threadIdx.x % WARP, lane_row = warp % (WARPGROUP / WARP) * 16 + lane / 4;
    const int row0 = q0 + consumer * 64, column0 = lane % 4 * 2;
    const uint32_t q = q_tile + consumer * 64 * SWIZZLE_ROW;
    const float scale = a.scale * LOG2E;  // exp(x) = 2^(x · log2 e)

    const auto done_with = [&](uint32_t barrier) {
        if (lane == 0) mbarrier_arrive(barrier);
    };
    const auto hide_tile = [&](float (&scores)[S::KEYS / 2], int i) {
        const int k0 = (last_tile - i) * S::KEYS;
        const bool whole = k0 + S::KEYS <= min(a.S_k, row0 + a.last + 1) && k0 >= row0 + 63 + a.first;
        if (!whole) hide<S::KEYS>(scores, a, row0 + lane_row, k0 + column0);
    };

    float output[S::HEAD_DIM / 2];
    float scores[S::KEYS / 2];
    uint32_t weights[S::KEYS / 16][4];
    Softmax<S::KEYS> softmax;

    mbarrier_wait(barriers.query(), 0);
    mbarrier_wait(barriers.key_full(0), 0);
    issue_scores<T, S>(scores, q, k_tile(0));
    wgmma_wait<0>();
    wgmma_pin(scores);
    done_with(barriers.key_empty(0));
    hide_tile(scores, 0);
    softmax.next(scores, scale);
    round_weights<T, S::KEYS>(weights, scores);

    // Whose turn it is to issue products: barrier 1 + n lets consumer n go on, and the first goes first.
    if (consumer == 0) named_barrier_arrive(1, 2 * WARPGROUP);
    if (steps > 1) mbarrier_wait(barriers.key_full(stage_of(1)), phase_of(1));
    for (int i = 1; i < steps; ++i) {
        named_barrier_sync(1 + consumer, 2 * WARPGROUP);
        issue_scores<T, S>(scores, q, k_tile(i));
        mbarrier_wait(barriers.value_full(stage_of(i - 1)), phase_of(i - 1));
        issue_output<T, S>(output, weights, v_tile(i - 1), i > 1);
        named_barrier_arrive(1 + next_consumer, 2 * WARPGROUP);
        wgmma_wait<1>();
        wgmma_pin(scores);
        done_with(barriers.key_empty(stage_of(i)));
        hide_tile(scores, i);
        softmax.next(scores, scale);
        // The softmax must stand before the wait that follows, else it would not run beside the products of the values; the
        // assembler moves a wait up as far as it may, but not past the loop in which a barrier is asked.
        wgmma_pin(scores);
        if (i + 1 < steps) mbarrier_wait(barriers.key_full(stage_of(i + 1)), phase_of(i + 1));
        wgmma_wait<0>();
        wgmma_pin(output);
        done_with(barriers.value_empty(stage_of(i - 1)));
        round_weights<T, S::KEYS>(weights, scores);
#pragma unroll
        for (int j = 0; j < S::HEAD_DIM / 8; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) output[4 * j + e] *= softmax.rescale[e / 2];
        }
    }
    mbarrier_wait(barriers.value_full(stage_of(steps - 1)), phase_of(steps - 1));
    issue_output<T, S>(output, weights, v_tile(steps - 1), steps > 1);
    wgmma_wait<0>();
    wgmma_pin(output);

#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float sum = softmax.row_sum[h];
        sum += __shfl_xor_sync(FULL_MASK, sum, 1);
        sum += __shfl_xor_sync(FULL_MASK, sum, 2);
        const int row = row0 + lane_row + 8 * h;
        if (row >= a.S_q) continue;
        const int64_t index = int64_t{outer} * a.S_q + row;
        if (lane % 4 == 0) lse[index] = softmax.row_max[h] * a.scale + logf(sum);
        const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;  // a row of nothing but −inf gives zeros
        T* out = output_pointer + index * a.D_v;
#pragma unroll
        for (int j = 0; j < S::HEAD_DIM / 8; ++j) {
            const int column = 8 * j + column0;
            if (column < a.D_v) {  // a multiple of 8
                *reinterpret_cast<uint32_t*>(out + column) =
                    pack(output[4 * j + 2 * h] * inverse, output[4 * j + 2 * h + 1] * inverse, T{});
            }
        }
    }
#endif
}

// A (B, H, S, D) operand as TMA sees it, read by boxes of `rows` rows.
TmaTensor described(const Tensor& x, int rows) {
    const auto sizes = x.sizes(), strides = x.strides();
    return {x.scalar_type(),
            4,
            x.data_ptr(),
            {sizes[3], sizes[2], sizes[1], sizes[0]},
            {strides[3], strides[2], strides[1], strides[0]},
            {PANEL, rows, 1, 1}};
}

}  // namespace

std::tuple<Tensor, Tensor> attention_pingpong(const Tensor& query, const Tensor& key, const Tensor& value,
                                              const std::optional<Tensor>& attn_mask, int64_t first, int64_t last,
                                              double scale, bool enable_gqa) {
    const Attention a = prepare_attention(query, key, value, first, last, scale, enable_gqa);
    KL_CHECK(!attn_mask.has_value(), "attention: pingpong takes no mask in memory");
    KL_CHECK(query.dim() == 4, "attention: pingpong takes 4 dimensions (B, H, S, D), got ", query.dim());
    KL_CHECK(a.D % 8 == 0 && a.D_v % 8 == 0, "attention: pingpong takes head dimensions that are multiples of 8");
    for (const Tensor* x : {&query, &key, &value}) {
        KL_CHECK(x->numel() == 0 || x->size(3) == 1 || x->stride(3) == 1,
                 "attention: pingpong takes dense rows of the head dimension");
    }
    const Launch launch(query);
    Tensor output = empty_like_query(query, query.scalar_type(), a.D_v);
    Tensor lse = empty_like_query(query, ScalarType::Float, 0);
    if (a.rows() == 0) return {output, lse};
    if (a.S_k == 0) {  // sums over no keys
        fill_zero(output, launch.stream);
        attention_fill_negative_infinity(lse, launch.stream);
        return {output, lse};
    }
    dispatch_16bit(query.scalar_type(), "attention", [&](auto zero) {
        using T = decltype(zero);
        dispatch_hopper(std::max(a.D, a.D_v), [&](auto shape) {
            using S = decltype(shape);
            const auto kernel = attention_pingpong_kernel<T, S>;
            check_hopper(reinterpret_cast<const void*>(kernel), launch.device, "attention.pingpong");
            const Maps maps{tensor_map(described(query, S::QUERIES)), tensor_map(described(key, S::KEYS)),
                            tensor_map(described(value, S::KEYS))};
            static DeviceSet asked;
            allow_shared(kernel, S::SHARED, launch.device, asked);
            const auto grid = grid_size(a.batches * a.heads * ceil_div(a.S_q, S::QUERIES));
            kernel<<<grid, S::THREADS, S::SHARED, launch.stream>>>(static_cast<T*>(output.data_ptr()),
                                                                   static_cast<float*>(lse.data_ptr()), maps, a);
            KL_LAUNCH_CHECK();
        });
    });
    return {output, lse};
}

void attention_pingpong_kernel_facts(std::vector<KernelFacts>& facts, ScalarType dtype) {
    if (dtype == ScalarType::Float) return;
    dispatch_16bit(dtype, "attention", [&](auto zero) {
        const auto add = [&](const char* name, auto shape) {
            using T = decltype(zero);
            using S = decltype(shape);
            facts.push_back(kernel_facts<attention_pingpong_kernel<T, S>>(name, S::THREADS, S::SHARED));
        };
        add("attention.pingpong.64", Hopper64{});
        add("attention.pingpong.96", Hopper96{});
        add("attention.pingpong.128", Hopper128{});
        add("attention.pingpong.256", Hopper256{});
    });
}

}  // namespace kl
