// What the rungs on Hopper's wgmma share: how operands are read, how a stage is multiplied, how outputs are stored. The
// order of tiles is in tile_scheduler.cuh, the list of rungs in matmul.cuh.
#pragma once

#include <functional>
#include <limits>
#include <optional>

#include "core/launch.cuh"
#include "matmul/matmul.cuh"
#include "matmul/tile_scheduler.cuh"
#include "sm90/sm90.cuh"
#include "sm90/tensor_map.h"

namespace kl {

// A tile's 128 bytes of k are four instructions. An operand's tile is panels of 64 rows of 128 bytes (sm90.cuh), each
// loaded by one TMA instruction. A panel is 64 of x by 128 bytes of k in either orientation (x = m or n).
constexpr int STEPS = 4;
/// setmaxnreg: the registers of a thread of the producers' warpgroup, and of the two of consumers. 384 threads start with
/// 168 each, 64,512 in all, and 40 · 128 + 232 · 256 are as many.
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;
constexpr int PANEL_X = 64;
constexpr int PANEL_BYTES = 64 * SWIZZLE_ROW;
template <typename T>
constexpr int BLOCK_K = SWIZZLE_ROW / sizeof(T);

// A product in 32-bit numbers, as kernels take it.
struct Tiled {
    int M, N, K;
    int batches;
    int a_step, b_step;  // 0 where all batches share the operand, else 1
    int64_t c_batch;     // elements between the outputs of two batches
    int64_t c_row;       // and of two rows: N, or more where this is a part of a product
};

// Both operands for TMA: coordinates are (k, x, batch) where memory runs along k, (x, k, batch) where along x.
struct TmaOperands {
    CUtensorMap a, b;

    __device__ void prefetch() const {
        tma_prefetch(a);
        tma_prefetch(b);
    }
};

// ---- host: hopper.cu ------------------------------------------------------------------------------------------------

// The padded copy of an operand of X rows (columns), kept for the parts that follow: the next may have the same operand.
struct KeptCopy {
    Tensor memory;
    int64_t room = 0;  // elements
    const void* of = nullptr;
    int64_t X = 0, batches = 0;
};
struct KeptCopies {
    KeptCopy a, b;
};

// A call as the rungs on Hopper see it.
struct HopperCall {
    Product product;
    Tensor output;
    Tiled tiled;
    bool a_by_tma, b_by_tma;  // whether TMA can read them, and in which orientation
    Major a_major, b_major;
    TmaTensor a, b;

    const void *a_data, *b_data;
    void* c;
    bool copied = true;          // whether operands may be copied
    KeptCopies* kept = nullptr;  // a part of a call that is worth its copies
    bool a_copied = false;       // A is a copy
    bool padded = false;         // outputs have padding, up to a multiple of 16 bytes, that may be written too
    bool part() const { return kept != nullptr; }
    bool done() const { return product.batches * product.M * product.N == 0 || product.K == 0; }
    bool by_tma() const { return a_by_tma && b_by_tma; }
    TmaOperands operands() const { return {tensor_map(a), tensor_map(b)}; }
};

// Derives the other fields from a call's product and its operands' addresses.
void describe(HopperCall* call, ScalarType dtype);

// A HopperCall of a call that `prepare` has checked. Zeroes the output where K is 0.
HopperCall prepare_hopper(const Call& prepared, const Tensor& input, const Tensor& other, bool allow_tf32,
                          const char* op, const char* step);

// Whether TMA can read an operand of X rows (columns), along k, or else along x where the tensor cores can.
bool readable(ScalarType dtype, const void* data, int64_t X, int64_t stride_x, int64_t K, int64_t stride_k,
              int64_t batches, int64_t batch_stride, TmaTensor* tensor, Major* major);

// Copies the operands of a call that TMA cannot read, where the product is worth it, and points the call to the copies.
// They live as long as what is returned; those of a part, as long as its `kept`.
Tensor pad_operands(HopperCall* call, ScalarType dtype, const Launch& on);
// Runs a call of which TMA cannot read an operand. Where copies would take more than 64 MiB, it runs parts of the
// outputs one after the other; without copies where parts would be too small.
void chunked_copy(HopperCall& call, ScalarType dtype, const Launch& on, const std::function<void(HopperCall&)>& run);
void pad_operands_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype);

// Copies an A of few rows that lies along M to lie along K, where that pays, and points the call to the copy. The
// kernel that reads the copy may be launched with programmatic dependent launch. Returns nothing where A is not copied.
std::optional<Tensor> transpose_small_a(HopperCall* call, ScalarType dtype, const Launch& on);

// Whether to share the last waves of 128×256 tiles (stream-K), by an estimate.
bool worth_sharing(const Tiled& p, int64_t k_tiles, int64_t workers);
// The same for a whole call, as kernel_ladder/selection/matmul.py counts it: stages saved, over those of the fix-up and of
// operands that leave the L2.
bool sharing_pays(const Tiled& p, int64_t k_tiles, int64_t workers);

// `persistent`'s kernel with plain loads, for operands that TMA cannot read: every rung here uses it.
void launch_plain(const HopperCall& call, ScalarType dtype, const Launch& on);
void launch_persistent(const HopperCall& call, ScalarType dtype, const Launch& on, bool share);
// `stream_k`'s launch of that kernel, and that of `split_k` with a tile of its own.
void launch_stream_k(const HopperCall& call, ScalarType dtype, const Launch& on);
struct SplitKPlan {
    int64_t rows, columns;  // of a tile
    int64_t splits;         // blocks that share the K of one
    bool pair;
};
void launch_split_k(HopperCall call, ScalarType dtype, const Launch& on, const SplitKPlan& asked);

// Runs a call of a rung: `by_tma(call, launch)` launches it where TMA can read both operands, or copies of them.
template <typename F>
void run_hopper(HopperCall& call, const Tensor& input, F&& by_tma) {
    if (call.done()) return;
    const Launch on(input);
    const ScalarType dtype = input.scalar_type();
    if (call.by_tma()) return by_tma(call, on);
    chunked_copy(call, dtype, on, [&](HopperCall& part) {
        const Tensor copies = pad_operands(&part, dtype, on);
        part.by_tma() ? by_tma(part, on) : launch_plain(part, dtype, on);
    });
}
template <typename F>
Tensor run_hopper(const Tensor& input, const Tensor& other, bool allow_tf32, const char* step, F&& by_tma) {
    HopperCall call = prepare_hopper(prepare(input, other), input, other, allow_tf32, "matmul", step);
    run_hopper(call, input, by_tma);
    return call.output;
}

// The output as TMA writes it, in boxes of 64×64; where its rows are not multiples of 16 bytes, TMA cannot.
TmaTensor output_tensor(const HopperCall& call);

// BM×BN tiles, in groups of 2048 rows.
TileRaster tile_order(const Tiled& p, int BM, int BN);

// How many tiles there are in all batches; raises where 32 bits do not count them.
int tile_count(const TileRaster& order, const Tiled& p);

// Pairs of BM×BN tiles: side by side only where that leaves fewer tiles empty.
ClusterRaster pair_order(const Tiled& p, int BM, int BN);

// Calls f(T{}, a_major, b_major), the last two as types: what a Hopper kernel is compiled for.
template <Major MAJOR>
using MajorOf = std::integral_constant<Major, MAJOR>;
template <typename F>
void dispatch_hopper(const HopperCall& call, ScalarType dtype, F&& f) {
    dispatch(dtype, "matmul", [&](auto zero) {
        using K = MajorOf<Major::K>;
        if constexpr (sizeof(zero) == 4) {
            f(zero, K{}, K{});
        } else {
            using MN = MajorOf<Major::MN>;
            if (call.a_major == Major::K) return call.b_major == Major::K ? f(zero, K{}, K{}) : f(zero, K{}, MN{});
            return call.b_major == Major::K ? f(zero, MN{}, K{}) : f(zero, MN{}, MN{});
        }
    });
}

struct HopperGrid {
    int blocks, cluster, threads, shared;
    bool pdl = false;  // programmatic dependent launch: the kernel waits at griddepcontrol.wait
};

// Launches a kernel of the given name; checks once for each kernel and device that it can run there.
template <typename... Parameters, typename... Arguments>
void launch_hopper(void (*kernel)(Parameters...), const char* name, const HopperGrid& grid, const Launch& on,
                   DeviceSet& asked, Arguments&&... arguments) {
    if (!asked.has(on.device)) {
        check_hopper(reinterpret_cast<const void*>(kernel), on.device, name);
        allow_shared(kernel, grid.shared, on.device, asked);
    }
    LaunchConfig config(dim3(grid.blocks), dim3(grid.threads), grid.shared, on);
    config.clusters_of(grid.cluster).pdl(grid.pdl).run(kernel, std::forward<Arguments>(arguments)...);
}

// ---- device ---------------------------------------------------------------------------------------------------------

// Dynamic shared memory from the first multiple of 1024 bytes on, as panels need it. Launches ask for 1024 bytes more.
__device__ inline uint32_t aligned_shared() {
    extern __shared__ unsigned char shared_bytes[];
    return align_to_swizzle(shared_bytes);
}

// WIDTH of x, from x on, by 128 bytes of k; no more than `panels` panels.
template <Major MAJOR, int WIDTH>
__device__ inline void load_tile(uint32_t shared, const CUtensorMap& map, uint32_t barrier, int x, int k, int batch,
                                 int panels = WIDTH / PANEL_X) {
#pragma unroll
    for (int i = 0; i < WIDTH; i += PANEL_X) {
        if (i >= panels * PANEL_X) break;
        const int c0 = MAJOR == Major::K ? k : x + i, c1 = MAJOR == Major::K ? x + i : k;
        tma_load(shared + i * SWIZZLE_ROW, map, barrier, c0, c1, batch);
    }
}
// The same into several blocks of the cluster.
template <Major MAJOR, int WIDTH>
__device__ inline void load_tile_multicast(uint32_t shared, const CUtensorMap& map, uint32_t barrier, uint16_t blocks,
                                           int x, int k, int batch) {
#pragma unroll
    for (int i = 0; i < WIDTH; i += PANEL_X) {
        const int c0 = MAJOR == Major::K ? k : x + i, c1 = MAJOR == Major::K ? x + i : k;
        tma_load_multicast(shared + i * SWIZZLE_ROW, map, barrier, blocks, c0, c1, batch);
    }
}

// Loads a block's tiles of both operands, BM and BN wide. One it reads alone; of the other, which both blocks of the
// cluster read, it loads half. `barrier` of each block counts a whole stage.
template <Major A, Major B, int BM, int BN>
__device__ inline void load_pair(uint32_t stage, const TmaOperands& from, uint32_t barrier, bool below, int m0, int n0,
                                 int k, int a_batch, int b_batch) {
    constexpr uint16_t BOTH = 0b11;
    constexpr int A_BYTES = BM * SWIZZLE_ROW, A_HALF = BM / CLUSTER, B_HALF = BN / CLUSTER;
    const int rank = static_cast<int>(cluster_rank());
    if (below) {
        const int part = rank * B_HALF;
        load_tile<A, BM>(stage, from.a, barrier, m0, k, a_batch);
        load_tile_multicast<B, B_HALF>(stage + A_BYTES + part * SWIZZLE_ROW, from.b, barrier, BOTH, n0 + part, k,
                                       b_batch);
    } else {
        const int part = rank * A_HALF;
        load_tile_multicast<A, A_HALF>(stage + part * SWIZZLE_ROW, from.a, barrier, BOTH, m0 + part, k, a_batch);
        load_tile<B, BN>(stage + A_BYTES, from.b, barrier, n0, k, b_batch);
    }
}

// d += A · B over one stage's k, by one warpgroup: `a` is the panel of its 64 rows of A, `b` the first panel of B.
// PARTS instructions share the BN columns: the widest needs more registers than a thread of a large block starts with.
template <typename T, Major A, Major B, int BN, int PARTS = 1>
__device__ inline void multiply_stage(float (&d)[BN / 2], uint32_t a, uint32_t b, bool accumulate) {
    constexpr int N = BN / PARTS;
    const uint64_t a_matrix = matrix_descriptor<A>(a, PANEL_BYTES), b_matrix = matrix_descriptor<B>(b, PANEL_BYTES);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            auto& columns = *reinterpret_cast<float (*)[N / 2]>(d + part * N / 2);
            Wgmma<N>::template multiply<T, A, B>(columns, a_matrix + step * DESCRIPTOR_STEP<A>,
                                                 b_matrix + step * DESCRIPTOR_STEP<B> + part * N * SWIZZLE_ROW / 16,
                                                 accumulate || step > 0);
        }
    }
    wgmma_commit();
}

// Four sums: two neighbouring outputs of row m from column n on, and two of row m + 8.
template <typename T>
__device__ inline void store_eight_columns(const float* d, T* c, const Tiled& p, int m, int n) {
    struct alignas(2 * sizeof(T)) Pair {
        T first, second;
    };
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if (m + i * 8 >= p.M) continue;
        T* const out = c + (m + i * 8) * p.c_row + n;
        const Pair pair{from_float<T>(d[i * 2]), from_float<T>(d[i * 2 + 1])};
        // Every pair of columns that begins at an even one is then aligned.
        if (p.N % 2 == 0 && p.c_row % 2 == 0 && n < p.N) {
            *reinterpret_cast<Pair*>(out) = pair;
        } else {
            if (n < p.N) out[0] = pair.first;
            if (n + 1 < p.N) out[1] = pair.second;
        }
    }
}

// Stores a warpgroup's 64×BN outputs from (m0, n0) on, from registers. Four lanes together hold 16 bytes of a row.
// Where rows begin at multiples of 16 bytes they transpose four such runs and store one each: whole sectors, a quarter
// of the stores.
template <typename T, int BN>
__device__ inline void store_outputs(const float (&d)[BN / 2], T* c, const Tiled& p, int m0, int n0) {
    const int lane = threadIdx.x % WARP, m = m0 + threadIdx.x % WARPGROUP / WARP * 16 + lane / 4;
    if constexpr (sizeof(T) == 2) {
        if (p.N % 8 == 0 && p.c_row % 8 == 0) {
#pragma unroll
            for (int j = 0; j < BN / 8; j += 4) {
                const int n = n0 + (j + lane % 4) * 8;
#pragma unroll
                for (int row = 0; row < 2; ++row) {
                    uint32_t words[4];
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        words[i] = pack_pair<T>(d[(j + i) * 4 + row * 2], d[(j + i) * 4 + row * 2 + 1]);
                    }
                    transpose_quad(words);
                    if (m + row * 8 < p.M && n < p.N) {
                        *reinterpret_cast<uint4*>(c + (m + row * 8) * p.c_row + n) =
                            make_uint4(words[0], words[1], words[2], words[3]);
                    }
                }
            }
            return;
        }
    }
#pragma unroll
    for (int j = 0; j < BN / 8; ++j) store_eight_columns<T>(d + j * 4, c, p, m, n0 + j * 8 + lane % 4 * 2);
}

}  // namespace kl
