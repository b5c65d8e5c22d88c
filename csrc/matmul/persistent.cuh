// The kernel of `persistent` and `stream_k`; persistent.cu says what it does. Who loads is its argument, a class that
// gives
//
//   Element, Source        of the operands, and what describes them to the kernel
//   BLOCKS, WARPGROUPS     in a cluster; that load, the first ones of a block
//   ARRIVALS               at a stage's barrier until it is full
//   REGISTERS, CONSUMER_REGISTERS    a thread, of those that load and those that multiply
//   Multiply               multiply(sum, stage, half, accumulate) begins a stage's products of one of the warpgroups
//   SUMS                   where in the output they belong
//   prefetch, takes_part, load       at the kernel's beginning; which threads load; one stage
#pragma once

#include "hopper.cuh"

namespace kl {

constexpr int BM = 128, BN = 256, STAGES = 4, CONSUMERS = 2;
constexpr int A_BYTES = BM * SWIZZLE_ROW, B_BYTES = BN * SWIZZLE_ROW, STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int OUT_BYTES = CONSUMERS * 2 * PANEL_BYTES;
constexpr int SHARED = STAGES * STAGE_BYTES + OUT_BYTES + SWIZZLE_ATOM + 2 * STAGES * 8;

// Both operands from shared memory.
template <typename T, Major A, Major B, int PARTS = 1>
struct MultiplyShared {
    __device__ void operator()(float (&sum)[BN / 2], uint32_t stage, int half, bool accumulate) const {
        multiply_stage<T, A, B, BN, PARTS>(sum, stage + half * PANEL_BYTES, stage + A_BYTES, accumulate);
    }
};

// ---- outputs --------------------------------------------------------------------------------------------------------

// Which output a tile's sum (row, column) is: that of its place; or that of the transposed product; or rows and columns
// are dealt out by their remainder modulo RESIDUES, those of the first remainder first.
enum class Sums { in_order, transposed, by_residue };
constexpr int RESIDUES = 8;

// Lays 64 columns of a warpgroup's sums, rounded, into a panel: from 64 · part on, or, by residue, those whose outputs
// lie there. A panel's rows are rows of the output, except that by residue its row r is output 8 · (r % 16) + r / 16 of
// those that begin at the warpgroup's first residue.
template <typename T, Sums SUMS>
__device__ inline void fill_panel(uint32_t panel, const float (&sum)[BN / 2], int part) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x % WARPGROUP / WARP;
    if constexpr (SUMS == Sums::by_residue) {
        // Column j of residue r stands at r · BN / 8 + j: of a thread's sums, those one residue apart are neighbours.
        constexpr int NEXT = BN / RESIDUES / 8 * 4;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float* d = sum + part * 4 + i;
            const int row = warp * 16 + lane / 4 + i / 2 * 8, chunk = lane % 4 * 2 + i % 2;
            store_shared16(panel + swizzled(row, chunk),
                           make_uint4(pack_pair<T>(d[0], d[NEXT]), pack_pair<T>(d[2 * NEXT], d[3 * NEXT]),
                                      pack_pair<T>(d[4 * NEXT], d[5 * NEXT]), pack_pair<T>(d[6 * NEXT], d[7 * NEXT])));
        }
    } else {
        // Lane 8i + r names row r of square i: rows 0–7 and 8–15 of eight columns, then of the next eight.
#pragma unroll
        for (int j = 0; j < PANEL_X / 8; j += 2) {
            const float* d = sum + part * PANEL_X / 2 + j * 4;
            const uint32_t squares[4] = {pack_pair<T>(d[0], d[1]), pack_pair<T>(d[2], d[3]), pack_pair<T>(d[4], d[5]),
                                         pack_pair<T>(d[6], d[7])};
            if constexpr (SUMS == Sums::in_order) {
                stmatrix(panel + swizzled(warp * 16 + lane % 16, j + lane / 16), squares);
            } else {
                stmatrix_transposed(panel + swizzled((j + lane / 16) * 8 + lane % 8, warp * 2 + lane / 8 % 2), squares);
            }
        }
    }
}

// Writes a warp's 16 rows of a panel to rows of the output that begin anywhere: `to(r)` is where row r belongs, or null;
// the first `columns` count. Eight lanes a row write 16 bytes each, at multiples of 16; of the last one's eight columns
// some stand at the row's beginning, and go one by one.
template <typename T, typename To>
__device__ inline void store_rows(uint32_t panel, int columns, To&& to) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x % WARPGROUP / WARP, chunk = lane % 8;
#pragma unroll 2  // more under way would not fit the registers
    for (int i = 0; i < 16; i += WARP / 8) {
        const int row = warp * 16 + i + lane / 8;
        T* const out = to(row);
        if (out == nullptr) continue;
        const auto before = static_cast<uint32_t>(-reinterpret_cast<uintptr_t>(out) % 16);  // bytes to such a multiple
        uint32_t v[4];
        join<T>(v, load_shared16(panel + swizzled(row, chunk)), load_shared16(panel + swizzled(row, (chunk + 1) % 8)),
                before);
        const int first = chunk * 8 + static_cast<int>(before / sizeof(T));
        if (first + 8 <= min(columns, PANEL_X)) {
            *reinterpret_cast<uint4*>(out + first) = make_uint4(v[0], v[1], v[2], v[3]);
        } else {
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                const int x = (first + e) % PANEL_X;
                if (x < columns) reinterpret_cast<uint16_t*>(out)[x] = static_cast<uint16_t>(v[e / 2] >> e % 2 * 16);
            }
        }
    }
}

// A warpgroup's 64×256 sums of the tile at (m0, n0), through two panels of shared memory. (M, N) are the output's.
template <typename T, Sums SUMS>
__device__ inline void store_through_shared(const float (&sum)[BN / 2], T* c, const CUtensorMap& to, bool by_tma, int M,
                                            int N, uint32_t panels, int half, int batch, int m0, int n0) {
    const bool leader = threadIdx.x % WARPGROUP == 0;
    const int group = static_cast<int>(threadIdx.x) / WARPGROUP;
    // A panel is the work of all four warps where TMA writes it, or where each warp's sums are columns of it.
    const bool together = by_tma || SUMS == Sums::transposed;
#pragma unroll
    for (int part = 0; part < BN / PANEL_X; ++part) {
        const uint32_t panel = panels + part % 2 * PANEL_BYTES;
        if (by_tma) {
            if (leader) tma_store_wait_read<1>();  // the panel's last box has left
            named_barrier_sync(group, WARPGROUP);
        } else {
            __syncwarp();
        }
        fill_panel<T, SUMS>(panel, sum, part);
        int m = m0, n = n0 + part * PANEL_X;
        if constexpr (SUMS == Sums::in_order) m += half * PANEL_X;
        if constexpr (SUMS == Sums::transposed) m = n, n = m0 + half * PANEL_X;
        if (by_tma) fence_async_shared();
        together ? named_barrier_sync(group, WARPGROUP) : __syncwarp();
        if (by_tma) {
            if (leader) {
                tma_store(to, panel, n, m, batch);
                tma_store_commit();
            }
        } else {
            store_rows<T>(panel, N - n, [&](int row) -> T* {
                if constexpr (SUMS == Sums::by_residue) {
                    row = row % (BM / RESIDUES) * RESIDUES + half * RESIDUES / CONSUMERS + row / (BM / RESIDUES);
                }
                return m + row < M ? c + (int64_t{batch} * M + m + row) * N + n : nullptr;
            });
        }
    }
}

// ---- tiles that blocks share ----------------------------------------------------------------------------------------

// Where blocks share the k of a tile: each that does not begin it lays its sums into its place in `sums`, 16 bytes of a
// thread beside those of the others, and raises its flag; the one that begins it adds them up, in the order of k.
struct Workspace {
    float* sums;
    uint32_t* flags;
};
constexpr int ADDERS = CONSUMERS * WARPGROUP;
constexpr int ADDERS_BARRIER = 4;  // past those of the warpgroups, which one may still need while the other adds
__device__ inline float4* place_of(const Workspace& space, int block, int thread) {
    return reinterpret_cast<float4*>(space.sums) + int64_t{block} * (BM * BN / 4) + thread;
}
__device__ inline void lay_down(const float (&sum)[BN / 2], const Workspace& space, int block, int thread) {
    float4* const place = place_of(space, block, thread);
#pragma unroll
    for (int j = 0; j < BN / 8; ++j) {
        place[j * ADDERS] = make_float4(sum[j * 4], sum[j * 4 + 1], sum[j * 4 + 2], sum[j * 4 + 3]);
    }
    __threadfence();
    named_barrier_sync(ADDERS_BARRIER, ADDERS);
    if (thread == 0) store_release(space.flags + block, 1);
}
__device__ inline void add_up(float (&sum)[BN / 2], const Workspace& space, int block, int thread) {
    if (thread == 0) {
        while (load_acquire(space.flags + block) == 0) {
        }
    }
    named_barrier_sync(ADDERS_BARRIER, ADDERS);
    const float4* const place = place_of(space, block, thread);
#pragma unroll
    for (int j = 0; j < BN / 8; ++j) {
        const float4 v = __ldcg(place + j * ADDERS);
        sum[j * 4] += v.x, sum[j * 4 + 1] += v.y, sum[j * 4 + 2] += v.z, sum[j * 4 + 3] += v.w;
    }
}

// ---- the kernel -----------------------------------------------------------------------------------------------------

template <typename Loader>
__global__ void __launch_bounds__((Loader::WARPGROUPS + CONSUMERS) * WARPGROUP, 1)
    matmul_persistent_kernel(typename Loader::Element* c, const __grid_constant__ CUtensorMap to, bool by_tma,
                             const __grid_constant__ typename Loader::Source from, Tiled p, PairOrder order,
                             Shares shares, Workspace space) {
#if KL_SM90A
    using T = typename Loader::Element;
    const uint32_t stages = aligned_shared(), panels = stages + STAGES * STAGE_BYTES;
    const uint32_t full = panels + OUT_BYTES, empty = full + STAGES * 8;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            mbarrier_init(full + s * 8, Loader::ARRIVALS);
            mbarrier_init(empty + s * 8, Loader::BLOCKS * CONSUMERS * WARPGROUP / WARP);
        }
        mbarrier_init_fence();
        Loader::prefetch(from);
    }
    Loader::BLOCKS > 1 ? cluster_sync() : __syncthreads();

    const int rank = Loader::BLOCKS > 1 ? static_cast<int>(cluster_rank()) : 0;
    const int worker = static_cast<int>(blockIdx.x) / Loader::BLOCKS;
    const int group = warp_index() / (WARPGROUP / WARP), lane = threadIdx.x % WARP;
    int batch, m0, n0;
    Ring<STAGES> at;
    Piece piece;
    Pieces pieces(shares, worker);
    if (group < Loader::WARPGROUPS) {
        registers_decrease<Loader::REGISTERS>();
        if (Loader::takes_part()) {
            while (pieces.next(&piece)) {
                order.at<BM, BN, Loader::BLOCKS>(piece.tile, rank, &batch, &m0, &n0);
                const Loader loader(from, p, order.below, batch, m0, n0);
                for (int i = piece.begin; i < piece.end; ++i, at.next()) {
                    mbarrier_wait(empty + at.stage * 8, at.phase ^ 1);
                    loader.load(stages + at.stage * STAGE_BYTES, full + at.stage * 8, i * BLOCK_K<T>);
                }
            }
        }
        __syncwarp();
        if constexpr (Loader::BLOCKS > 1) cluster_leave();
    } else {
        registers_increase<Loader::CONSUMER_REGISTERS>();
        const int half = group - Loader::WARPGROUPS;
        const int thread = static_cast<int>(threadIdx.x) - Loader::WARPGROUPS * WARPGROUP;
        float sum[BN / 2];
        const auto release = [&](int stage) {
            if constexpr (Loader::BLOCKS > 1) {
                if (lane < Loader::BLOCKS) mbarrier_arrive_at(empty + stage * 8, lane);
            } else {
                if (lane == 0) mbarrier_arrive(empty + stage * 8);
            }
        };
        while (pieces.next(&piece)) {
            typename Loader::Multiply multiply;
            int before = 0;
            for (int i = piece.begin; i < piece.end; ++i, at.next()) {
                const uint32_t stage = stages + at.stage * STAGE_BYTES;
                mbarrier_wait(full + at.stage * 8, at.phase);
                multiply(sum, stage, half, i > piece.begin);
                wgmma_wait<1>();
                if (i > piece.begin) release(before);
                before = at.stage;
            }
            wgmma_wait<0>();
            release(before);
            wgmma_pin(sum);
            if (piece.begin > 0) {
                lay_down(sum, space, worker * Loader::BLOCKS + rank, thread);
                continue;
            }
            if (piece.end < shares.k_tiles) {
                const int end = (piece.tile + 1) * shares.k_tiles;
                for (int other = worker + 1; shares.begin(other) < end; ++other) {
                    if (shares.begin(other) == shares.begin(other + 1)) continue;  // it has no share
                    add_up(sum, space, other * Loader::BLOCKS + rank, thread);
                }
            }
            order.at<BM, BN, Loader::BLOCKS>(piece.tile, rank, &batch, &m0, &n0);
            if constexpr (sizeof(T) == 4) {  // two float32 of four lanes fill a sector: nothing to gain
                store_outputs<T, BN>(sum, c + batch * p.c_batch, p.M, p.N, m0 + half * PANEL_X, n0);
            } else {
                constexpr bool SWAPPED = Loader::SUMS == Sums::transposed;
                store_through_shared<T, Loader::SUMS>(sum, c, to, by_tma, SWAPPED ? p.N : p.M, SWAPPED ? p.M : p.N,
                                                      panels + half * 2 * PANEL_BYTES, half, batch, m0, n0);
            }
        }
        tma_store_wait_read<0>();
        __syncwarp();
        if constexpr (Loader::BLOCKS > 1) cluster_leave();  // shared memory stays until the other block is done with it
    }
#endif
}

// Multiplies; `p` is the call's product, or where sums are transposed, that of the operands transposed.
template <typename Loader>
void launch_from(const typename Loader::Source& from, const HopperCall& call, const Tiled& p, const PairOrder& order,
                 const Launch& on, bool share) {
    using T = typename Loader::Element;
    static DeviceSet asked;
    const int tiles = tile_count(order.tiles, p);
    const int fit = multiprocessors(on.device) / Loader::BLOCKS;
    const auto k_tiles = static_cast<int>(ceil_div(p.K, BLOCK_K<T>));
    const int shared = share ? shared_tiles(tiles, k_tiles, fit) : 0;
    const int64_t work = shared > 0 ? int64_t{tiles} * k_tiles : tiles;
    const Shares shares{tiles, shared, k_tiles, static_cast<int>(std::min<int64_t>(work, fit))};
    const int blocks = shares.workers * Loader::BLOCKS;

    Tensor memory;  // given back when this returns; what runs on the stream afterwards may have it
    Workspace space{};
    if (shared > 0) {
        memory = empty(call.output, ScalarType::Float, {int64_t{blocks} * (BM * BN + 1)});
        space.sums = static_cast<float*>(memory.data_ptr());
        space.flags = reinterpret_cast<uint32_t*>(space.sums + int64_t{blocks} * BM * BN);
        KL_CUDA_CHECK(cudaMemsetAsync(space.flags, 0, blocks * sizeof(uint32_t), on.stream));
    }
    const TmaTensor output = output_tensor(call);
    const bool by_tma = sizeof(T) == 2 && Loader::SUMS != Sums::by_residue && tma_can_address(output);
    launch_hopper(matmul_persistent_kernel<Loader>, "matmul.persistent", blocks, Loader::BLOCKS,
                  (Loader::WARPGROUPS + CONSUMERS) * WARPGROUP, SHARED, on, asked,
                  static_cast<T*>(call.output.data_ptr()), by_tma ? tensor_map(output) : CUtensorMap{}, by_tma, from, p,
                  order, shares, space);
}

}  // namespace kl
