// attention, backward pass of rung 4 of 7: warp_specialized. One kernel, five products.
// Idea      One kernel and five products. A block keeps 128 keys and walks over queries. dS goes through shared memory, as
//           the operand of dQ; a producer warp loads tiles, another adds dQ to memory in float32, in bulk.
// Predicts  5 products instead of 7, 1.4 × `wgmma` at the same rate; dQ's sums cost 4·S_q·S_k·D / 128 bytes a head.
// Limit now Shared memory's bandwidth: operands of products with 64 columns, and dQ on its way to memory.
// Next      Fewer bytes on chip: operands in registers at head dimension 128 too, or two blocks that exchange dS.
//
// The two consumer warpgroups have 64 keys each. They take turns at dQ: of step i, warpgroup i mod 2 multiplies dS of both
// by the keys. So a warpgroup waits for the other on its turn only, and dS has two stages. (FlashAttention-3,
// hopper/mainloop_bwd_sm90_tma_gmma_ws.hpp, divides each dQ between the warpgroups, behind a barrier of both.)
//
// Deterministic: blocks add to a tile of dQ in the order of their keys. A counter for each tile says whose turn it is.
// Blocks draw their tiles of keys from a counter too, in that order. So a block only ever waits for blocks that have
// started: there is no deadlock. All walk from the last queries to the first. Under a causal mask the block with most work
// then starts first and waits for none. The first block of a tile stores, so that the accumulator needs no zeros.
// Neighbouring tiles of a head start a while apart, as heads take turns (backward_blocks.cuh): sums rarely wait.
//
// Packed sequences (attention_varlen's `pingpong`): backward_blocks.cuh says which tile a block has. TMA loads the next
// sequence's rows too. Consumers clear them among queries, dO and keys, where a product of 0 and NaN would be NaN.

#include "attention/backward_blocks.cuh"

namespace kl {
namespace {

/// Tile shape: head dimension, padded on chip, and stages of queries. 64 queries by 128 keys. Where registers last,
/// consumers keep keys and values there, as operands of S and dP: that halves what these products read of shared memory.
template <int HEAD_DIM_, int Q_STAGES_, bool IN_REGISTERS_>
struct SpecializedShape {
    static constexpr int HEAD_DIM = HEAD_DIM_, VALUE_DIM = HEAD_DIM_, Q_STAGES = Q_STAGES_, KEYS = 128;
    static constexpr bool IN_REGISTERS = IN_REGISTERS_;
    static constexpr int THREADS = 3 * WARPGROUP, PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;
    static constexpr int PANELS = (HEAD_DIM + PANEL - 1) / PANEL;
    static constexpr int K_PANEL = KEYS * SWIZZLE_ROW, Q_PANEL = QUERY_TILE * SWIZZLE_ROW;
    static constexpr int K_BYTES = PANELS * K_PANEL, Q_BYTES = PANELS * Q_PANEL;
    static constexpr int DS_BYTES = KEYS * SWIZZLE_ROW;  // a row is a key: 64 queries of 16 bits
    static constexpr int DQ_ELEMENTS = QUERY_TILE * HEAD_DIM, DQ_BYTES = DQ_ELEMENTS * 4;
    static constexpr int BARRIERS = 1 + 2 * Q_STAGES + 4 + 2;
    static constexpr int SHARED = SWIZZLE_ATOM + 2 * K_BYTES + Q_STAGES * (2 * Q_BYTES + STATS_BYTES) + 2 * DS_BYTES +
                                  DQ_BYTES + (BARRIERS + 1) * 8;
    static_assert(SHARED <= 227 * 1024);
};
using Specialized64Backward = SpecializedShape<64, 4, true>;
using Specialized96Backward = SpecializedShape<96, 2, false>;
using Specialized128Backward = SpecializedShape<128, 2, false>;

/// dQ's accumulator, the counters of its tiles, and the counter from which blocks draw. Both counters are null where the
/// order of the sums is free.
struct QueryGradients {
    float* accumulator;
    uint32_t *semaphores, *next_tile;
};

/// The first tile of keys that one of the 64 queries from `q0` on sees. The tiles that they see follow each other.
template <typename S>
__device__ inline int first_key_tile(const Attention& a, int q0) {
    return max(q0 + a.first, 0) / S::KEYS;
}
/// Whether they see any, by whole tiles of queries and keys as KeyTile counts.
template <typename S>
__device__ inline bool sees_keys(const Attention& a, int q0) {
    return max(q0 + a.first, 0) < a.S_k && first_key_tile<S>(a, q0) * S::KEYS <= q0 + QUERY_TILE - 1 + a.last;
}

#if KL_SM90A

/// Barriers: who arrives, and how often in a phase.
///   key_full        the loading thread, with the bytes of keys and values
///   full[stage]     the loading thread, with the bytes of queries, dO and statistics
///   empty[stage]    eight consumer warps, which have read all of them
///   ds_full[w]      eight consumer warps, which have written their rows of dS
///   ds_empty[w]     the four warps of warpgroup w, whose dQ has read dS
///   dq_full         the four warps that have written dQ
///   dq_empty        the adding thread, whose bulk operation has read dQ
/// Step i uses dS stage i mod 2, which warpgroup i mod 2 reads.
template <typename S>
struct SpecializedSmem {
    uint32_t key;

    __device__ explicit SpecializedSmem(const void* shared) : key(align_to_swizzle(shared)) {}
    __device__ uint32_t value() const { return key + S::K_BYTES; }
    __device__ uint32_t query(int stage) const { return key + 2 * S::K_BYTES + stage * 2 * S::Q_BYTES; }
    __device__ uint32_t grad(int stage) const { return query(stage) + S::Q_BYTES; }
    __device__ uint32_t ds(int i) const { return query(S::Q_STAGES) + i % 2 * S::DS_BYTES; }
    __device__ uint32_t dq() const { return query(S::Q_STAGES) + 2 * S::DS_BYTES; }
    __device__ uint32_t stats(int stage) const { return dq() + S::DQ_BYTES + stage * STATS_BYTES; }
    __device__ uint32_t key_full() const { return barrier(0); }
    __device__ uint32_t full(int stage) const { return barrier(1 + stage); }
    __device__ uint32_t empty(int stage) const { return barrier(1 + S::Q_STAGES + stage); }
    __device__ uint32_t ds_full(int i) const { return barrier(1 + 2 * S::Q_STAGES + i % 2); }
    __device__ uint32_t ds_empty(int i) const { return barrier(3 + 2 * S::Q_STAGES + i % 2); }
    __device__ uint32_t dq_full() const { return barrier(5 + 2 * S::Q_STAGES); }
    __device__ uint32_t dq_empty() const { return barrier(6 + 2 * S::Q_STAGES); }

    /// Initialises the barriers and returns the block's tile. All threads of the block must call it.
    __device__ unsigned begin(const QueryGradients& dq) const {
        const uint32_t tile = barrier(S::BARRIERS);
        if (threadIdx.x == 0) {
            constexpr int WARPS = WARPGROUP / WARP;
            mbarrier_init(key_full(), 1);
            PipelineState<S::Q_STAGES>::init(full(0), empty(0), 1, 2 * WARPS);
            PipelineState<2>::init(ds_full(0), ds_empty(0), 2 * WARPS, WARPS);
            PipelineState<1>::init(dq_full(), dq_empty(), WARPS, 1);
            mbarrier_init_fence();
            store_shared8(tile, dq.next_tile != nullptr ? atomicAdd(dq.next_tile, 1) : blockIdx.x, 0);
        }
        __syncthreads();
        return load_shared(tile);
    }

  private:
    __device__ uint32_t barrier(int i) const { return stats(S::Q_STAGES) + 8 * i; }
};

/// One thread loads keys and values, then each step's tiles as soon as their stage is empty.
template <typename S, typename Block>
__device__ inline void load_tiles(const SpecializedSmem<S>& smem, const BackwardMaps& maps, const float* stats,
                                  const Block& block, const KeyTile<S::KEYS>& tile) {
    const auto load = [&](uint32_t shared, const CUtensorMap& map, uint32_t barrier, int panel_bytes, int row,
                          int head) {
#pragma unroll
        for (int p = 0; p < S::PANELS; ++p) {
            tma_load(shared + p * panel_bytes, map, barrier, p * PANEL, row, head, tile.batch);
        }
    };
    const int steps = tile.steps();
    if (steps == 0) return;
    mbarrier_arrive_expect_tx(smem.key_full(), 2 * S::K_BYTES);
    load(smem.key, maps.key, smem.key_full(), S::K_PANEL, block.key_row + tile.k0, tile.head_kv);
    load(smem.value(), maps.value, smem.key_full(), S::K_PANEL, block.key_row + tile.k0, tile.head_kv);
    PipelineState<S::Q_STAGES> state;
    StepCursor step(tile);
    for (int i = 0; i < steps; ++i, state.advance(), step.advance(tile)) {
        const uint32_t full = smem.full(state.stage);
        const int row = block.query_row + step.tile * QUERY_TILE;
        mbarrier_wait(smem.empty(state.stage), state.phase ^ 1);
        mbarrier_arrive_expect_tx(full, 2 * S::Q_BYTES + STATS_BYTES);
        load(smem.query(state.stage), maps.query, full, S::Q_PANEL, row, step.head);
        load(smem.grad(state.stage), maps.grad, full, S::Q_PANEL, row, step.head);
        load_stats(smem.stats(state.stage), stats + block.query_tile(tile.batch, step.head, step.tile) * 2 * QUERY_TILE,
                   full);
    }
}

/// One thread adds each step's dQ to memory, in the order of keys. It waits until the blocks of all earlier keys that the
/// queries see have added theirs. Once its own sum is written, it counts it.
template <typename S, typename Block>
__device__ inline void add_query_gradients(const SpecializedSmem<S>& smem, const QueryGradients& dq, const Block& block,
                                           const KeyTile<S::KEYS>& tile) {
    const bool ordered = dq.semaphores != nullptr;
    const int steps = tile.steps();
    StepCursor step(tile);
    for (int i = 0; i < steps; ++i, step.advance(tile)) {
        const int64_t index = block.query_tile(tile.batch, step.head, step.tile);
        const int rank = tile.k0 / S::KEYS - first_key_tile<S>(block.a, step.tile * QUERY_TILE);
        float* const sum = dq.accumulator + index * S::DQ_ELEMENTS;
        mbarrier_wait(smem.dq_full(), i % 2);
        if (ordered && rank == 0) {
            bulk_store(sum, smem.dq(), S::DQ_BYTES);
        } else {
            if (ordered) {
                while (load_acquire(dq.semaphores + index) < static_cast<uint32_t>(rank)) {
                }
                fence_async_global();  // the others' sums before this one
            }
            bulk_add(sum, smem.dq(), S::DQ_BYTES);
        }
        tma_store_commit();
        tma_store_wait_read<0>();
        mbarrier_arrive(smem.dq_empty());
        if (ordered) {
            tma_store_wait<0>();
            add_release(dq.semaphores + index, 1);
        }
    }
    tma_store_wait<0>();
}

/// Stores dSᵀ of a warpgroup, in the layout of wgmma's A operand, as rows of 64 queries.
__device__ inline void store_grads(uint32_t ds, int consumer, const uint32_t (&operand)[4][4]) {
    const int lane = static_cast<int>(threadIdx.x) % WARP;
    const int row = consumer * 64 + warp_index() % (WARPGROUP / WARP) * 16 + lane % 16;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        stmatrix(ds + swizzled(row, 2 * i + lane / 16), operand[i][0], operand[i][1], operand[i][2], operand[i][3]);
    }
}

/// dQ of all 128 keys: dS, whose rows are keys, times keys. It must be the warpgroup's turn.
template <typename T, typename S>
__device__ inline void query_gradients(const SpecializedSmem<S>& smem, int i, uint32_t empty) {
    float acc[S::HEAD_DIM / 2];
    mbarrier_wait(smem.ds_full(i), i / 2 % 2);
    wgmma_fence();
    const uint64_t ds = matrix_descriptor<Major::MN>(smem.ds(i), S::DS_BYTES);
    const uint64_t key = matrix_descriptor<Major::MN>(smem.key, S::K_PANEL);
    Wgmma<S::HEAD_DIM>::template multiply_first<T, Major::MN, Major::MN>(acc, ds, key);
#pragma unroll
    for (int k = 1; k < S::KEYS / 16; ++k) {
        Wgmma<S::HEAD_DIM>::template multiply<T, Major::MN, Major::MN>(acc, ds + k * DESCRIPTOR_STEP<Major::MN>,
                                                                       key + k * DESCRIPTOR_STEP<Major::MN>, true);
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(acc);
    release_stage(smem.ds_empty(i));
    release_stage(empty);
    mbarrier_wait(smem.dq_empty(), i % 2 ^ 1);
    const uint32_t own = smem.dq() + threadIdx.x % WARPGROUP * 16;
#pragma unroll
    for (int j = 0; j < S::HEAD_DIM / 8; ++j) {
        store_shared16(own + j * WARPGROUP * 16,
                       make_uint4(__float_as_uint(acc[4 * j]), __float_as_uint(acc[4 * j + 1]),
                                  __float_as_uint(acc[4 * j + 2]), __float_as_uint(acc[4 * j + 3])));
    }
    fence_async_shared();
    __syncwarp();
    release_stage(smem.dq_full());
}

#endif

template <typename T, typename Sequences>
__global__ void __launch_bounds__(PREPROCESS_THREADS)
    attention_backward_warp_specialized_preprocess_kernel(float* stats, const float* lse, const float* grad_lse,
                                                          const __grid_constant__ View<T> output,
                                                          const __grid_constant__ View<T> grad,
                                                          const __grid_constant__ Attention all,
                                                          const __grid_constant__ Sequences sequences,
                                                          float* accumulator, int zeros) {
    preprocess_tile(stats, lse, grad_lse, output, grad, all, sequences);
    // Sums of dQ in any order begin at zero, `zeros` elements a tile. In order, the first block stores: no zeros are
    // needed, as for packed sequences, which always have that order.
    if constexpr (Sequences::PACKED) return;
    auto* const to_zero = reinterpret_cast<float4*>(accumulator + int64_t{blockIdx.x} * zeros);
    for (int i = threadIdx.x; i < zeros / 4; i += PREPROCESS_THREADS) to_zero[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

template <typename T, typename S, typename Sequences>
__global__ void __launch_bounds__(S::THREADS, 1)
    attention_backward_warp_specialized_kernel(const __grid_constant__ Result<T> grad_key,
                                               const __grid_constant__ Result<T> grad_value,
                                               const __grid_constant__ QueryGradients dq, const float* stats,
                                               const __grid_constant__ BackwardMaps maps,
                                               const __grid_constant__ Attention all,
                                               const __grid_constant__ Sequences sequences) {
#if KL_SM90A
    extern __shared__ unsigned char shared_bytes[];
    const SpecializedSmem<S> smem(shared_bytes);
    const auto block = key_block<S>(sequences, all, smem.begin(dq));
    if (!block.inside()) return;
    const Attention& a = block.a;
    const KeyTile<S::KEYS> tile(a, block.outer, block.tile);
    const int group = warp_index() / (WARPGROUP / WARP), consumer = group - 1;
    if (group == 0) {
        registers_decrease<S::PRODUCER_REGISTERS>();
        if (warp_index() == 0 && elect_one()) load_tiles(smem, maps, stats, block, tile);
        if (warp_index() == 1 && elect_one()) add_query_gradients(smem, dq, block, tile);
        return;
    }

    registers_increase<S::CONSUMER_REGISTERS>();
    const int k0 = tile.k0 + consumer * 64, steps = tile.steps();
    const uint32_t keys = smem.key + consumer * 64 * SWIZZLE_ROW, values = keys + S::K_BYTES;
    const float scale = a.scale * LOG2E;
    float acc_key[S::HEAD_DIM / 2] = {}, acc_value[S::HEAD_DIM / 2] = {}, weights[32], grads[32];
    uint32_t of_value[4][4], of_key[4][4];
    uint32_t own_keys[S::HEAD_DIM / 16][4], own_values[S::HEAD_DIM / 16][4];
    PipelineState<S::Q_STAGES> state;
    StepCursor step(tile);

    if (steps > 0) mbarrier_wait(smem.key_full(), 0);
    if constexpr (Sequences::PACKED) {
        if (a.S_k - k0 < 64) clear_rows<S::PANELS>({keys}, S::K_PANEL, a.S_k - k0, 1 + consumer);
    }
    if constexpr (S::IN_REGISTERS) {
        load_operand<S::HEAD_DIM>(own_keys, keys, S::K_PANEL);
        load_operand<S::HEAD_DIM>(own_values, values, S::K_PANEL);
    }
    for (int i = 0; i < steps; ++i, state.advance(), step.advance(tile)) {
        const uint32_t q = smem.query(state.stage), grad = smem.grad(state.stage), of_tile = smem.stats(state.stage);
        const int q0 = step.tile * QUERY_TILE;
        mbarrier_wait(smem.full(state.stage), state.phase);
        if constexpr (Sequences::PACKED) {
            if (a.S_q - q0 < QUERY_TILE) clear_rows<S::PANELS>({q, grad}, S::Q_PANEL, a.S_q - q0, 1 + consumer);
        }
        if constexpr (S::IN_REGISTERS) {
            gemm_rows<T, S::HEAD_DIM>(weights, own_keys, q, S::Q_PANEL);
            gemm_rows<T, S::HEAD_DIM>(grads, own_values, grad, S::Q_PANEL);
        } else {
            gemm_rows<T, S::HEAD_DIM>(weights, keys, S::K_PANEL, q, S::Q_PANEL);
            gemm_rows<T, S::HEAD_DIM>(grads, values, S::K_PANEL, grad, S::Q_PANEL);
        }
        wgmma_wait<1>();
        wgmma_pin(weights);
        scores_to_weights(weights, of_tile, scale);
        apply_mask_transposed(weights, a, k0, q0);
        round_weights<T, 64>(of_value, weights);
        gemm_columns<T, S::HEAD_DIM>(acc_value, of_value, grad, S::Q_PANEL);
        wgmma_wait<1>();  // dP; the product of dV still runs
        wgmma_pin(grads);
        grad_of_scores(grads, weights, of_tile);
        apply_mask_transposed(grads, a, k0, q0);
        round_weights<T, 64>(of_key, grads);
        mbarrier_wait(smem.ds_empty(i), i / 2 % 2 ^ 1);
        store_grads(smem.ds(i), consumer, of_key);
        fence_async_shared();
        __syncwarp();
        release_stage(smem.ds_full(i));
        gemm_columns<T, S::HEAD_DIM>(acc_key, of_key, q, S::Q_PANEL);
        wgmma_wait<1>();  // dV, whose weights leave their registers to dQ
        wgmma_pin(acc_value);
        if (i % 2 == consumer) {
            query_gradients<T, S>(smem, i, smem.empty(state.stage));
        } else {
            wgmma_wait<0>();
            release_stage(smem.empty(state.stage));
        }
        wgmma_pin(acc_key);
    }
    const int row = block.key_row + k0;
    store_gradient<T, S::HEAD_DIM>(grad_key.at(block.outer, a.heads_kv, row), grad_key.row, a.D, a.S_k - k0, acc_key,
                                   a.scale);
    store_gradient<T, S::HEAD_DIM>(grad_value.at(block.outer, a.heads_kv, row), grad_value.row, a.D_v, a.S_k - k0,
                                   acc_value, 1.0f);
#endif
}

/// Rounds dQ's accumulator, times scale. One block per tile of 64 queries, with the accumulator's layout in registers.
/// Nothing was written there where the queries see no key.
template <typename T, typename S, typename Sequences>
__global__ void __launch_bounds__(WARPGROUP)
    attention_backward_warp_specialized_convert_kernel(const __grid_constant__ Result<T> grad_query,
                                                       const float* accumulator, const __grid_constant__ Attention all,
                                                       const __grid_constant__ Sequences sequences) {
#if KL_SM90A
    const auto block = query_block(sequences, all, blockIdx.x);
    if (!block.inside()) return;
    const Attention& a = block.a;
    const int q0 = static_cast<int>(block.tile) * QUERY_TILE;
    const float4* own =
        reinterpret_cast<const float4*>(accumulator + int64_t{blockIdx.x} * S::DQ_ELEMENTS) + threadIdx.x;
    const bool written = sees_keys<S>(a, q0);
    float acc[S::HEAD_DIM / 2];
#pragma unroll
    for (int j = 0; j < S::HEAD_DIM / 8; ++j) {
        const float4 x = written ? own[j * WARPGROUP] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        acc[4 * j] = x.x, acc[4 * j + 1] = x.y, acc[4 * j + 2] = x.z, acc[4 * j + 3] = x.w;
    }
    store_gradient<T, S::HEAD_DIM>(grad_query.at(block.outer, a.heads, block.query_row + q0), grad_query.row, a.D,
                                   a.S_q - q0, acc, a.scale);
#endif
}

template <typename T, typename S, typename Sequences>
void run_backward(BackwardCall& call, bool deterministic, const Sequences& sequences) {
    const Attention& a = call.a;
    const Launch& launch = call.launch;
    call.prepare<attention_backward_warp_specialized_kernel<T, S, Sequences>>(S::SHARED);
    const BackwardMaps maps = call.maps(QUERY_TILE, S::KEYS);
    const int64_t query_tiles = a.batches * a.heads * call.query_tiles();
    const auto key_grid = grid_size(a.batches * a.heads_kv * key_tiles<S::KEYS>(sequences, a));
    const auto query_grid = grid_size(query_tiles);

    Tensor accumulator = empty(call.query, ScalarType::Float, {query_tiles, S::DQ_ELEMENTS});
    Tensor counters = empty(call.query, ScalarType::Int, {deterministic ? query_tiles + 1 : 0});
    QueryGradients dq{static_cast<float*>(accumulator.data_ptr()), nullptr, nullptr};
    if (deterministic) {
        fill_zero(counters, launch.stream);
        dq.semaphores = static_cast<uint32_t*>(counters.data_ptr());
        dq.next_tile = dq.semaphores + query_tiles;
    }
    run_preprocess<T>(attention_backward_warp_specialized_preprocess_kernel<T, Sequences>, call, sequences,
                      dq.accumulator, deterministic ? 0 : S::DQ_ELEMENTS);
    const auto grad_key = Result<T>(call.grad_key), grad_value = Result<T>(call.grad_value);
    attention_backward_warp_specialized_kernel<T, S, Sequences><<<key_grid, S::THREADS, S::SHARED, launch.stream>>>(
        grad_key, grad_value, dq, call.stats_pointer(), maps, a, sequences);
    KL_LAUNCH_CHECK();
    attention_backward_warp_specialized_convert_kernel<T, S, Sequences>
        <<<query_grid, WARPGROUP, 0, launch.stream>>>(Result<T>(call.grad_query), dq.accumulator, a, sequences);
    KL_LAUNCH_CHECK();
}

/// Adds the attributes of the kernels, named below `prefix`.
template <typename Sequences>
void add_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype, const std::string& prefix) {
    if (dtype == ScalarType::Float) return;
    dispatch_16bit(dtype, "attention_backward", [&](auto zero) {
        using T = decltype(zero);
        attributes.push_back(kernel_attributes<attention_backward_warp_specialized_preprocess_kernel<T, Sequences>>(
            (prefix + "preprocess").c_str(), PREPROCESS_THREADS));
        const auto add = [&](const char* head_dim, auto shape) {
            using S = decltype(shape);
            attributes.push_back(kernel_attributes<attention_backward_warp_specialized_kernel<T, S, Sequences>>(
                (prefix + head_dim).c_str(), S::THREADS, S::SHARED));
            attributes.push_back(kernel_attributes<attention_backward_warp_specialized_convert_kernel<T, S, Sequences>>(
                (prefix + "convert." + head_dim).c_str(), WARPGROUP, 0));
        };
        add("64", Specialized64Backward{});
        if constexpr (!Sequences::PACKED) add("96", Specialized96Backward{});
        add("128", Specialized128Backward{});
    });
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> attention_backward_warp_specialized(
    const Tensor& grad, const std::optional<Tensor>& grad_lse, const Tensor& query, const Tensor& key,
    const Tensor& value, const Tensor& output, const Tensor& lse, const std::optional<Tensor>& attn_mask, int64_t first,
    int64_t last, double scale, bool enable_gqa, bool deterministic) {
    BackwardCall call("warp_specialized", grad, grad_lse, query, key, value, output, lse, attn_mask, first, last, scale,
                      enable_gqa);
    return call.results<Specialized64Backward, Specialized96Backward, Specialized128Backward>(
        [&](auto zero, auto shape) { run_backward<decltype(zero), decltype(shape)>(call, deterministic, Batched{}); });
}

std::tuple<Tensor, Tensor, Tensor> attention_varlen_backward_warp_specialized(
    const Tensor& grad, const std::optional<Tensor>& grad_lse, const Tensor& query, const Tensor& key,
    const Tensor& value, const Tensor& output, const Tensor& lse, const Tensor& cu_seqlens_q,
    const Tensor& cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k, int64_t left, int64_t right, double scale,
    bool enable_gqa) {
    BackwardCall call("warp_specialized", grad, grad_lse, query, key, value, output, lse, std::nullopt, -MAX_LENGTH,
                      MAX_LENGTH, scale, enable_gqa, cu_seqlens_q.numel() - 1);
    const Packed packed =
        make_packed(query, call.a, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, left, right);
    return call.results<Specialized64Backward, Specialized128Backward>(
        [&](auto zero, auto shape) { run_backward<decltype(zero), decltype(shape)>(call, true, packed); });
}

void attention_warp_specialized_backward_kernel_attributes(std::vector<KernelAttributes>& attributes,
                                                           ScalarType dtype) {
    add_attributes<Batched>(attributes, dtype, "attention_backward.warp_specialized.");
    add_attributes<Packed>(attributes, dtype, "attention_varlen_backward.warp_specialized.");
}

}  // namespace kl
