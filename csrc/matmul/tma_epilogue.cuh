// Epilogue of the persistent kernels: sums leave the registers by stmatrix into shared memory, in TMA's swizzle. TMA
// writes them out while the warps go on: panels of 64×64, two buffers per warpgroup.
#pragma once

#include "matmul/persistent_loaders.cuh"

namespace kl {
namespace persistent {

constexpr int OUT_BYTES = CONSUMERS * 2 * PANEL_BYTES;
// Of a block: stages, panels of outputs, what aligns them, and two barriers a stage.
constexpr int SHARED = STAGES * STAGE_BYTES + OUT_BYTES + SWIZZLE_ATOM + 2 * STAGES * 8;

// Writes a warp's 16 rows of a panel to the outputs from (m0, n0) on, whose rows need no alignment. Eight lanes per row
// write 16 bytes each, at multiples of 16. The last lane's eight columns may wrap to the beginning of the row: it
// writes them one by one.
template <typename T>
__device__ inline void store_rows(T* c, const Tiled& p, int batch, int m0, int n0, uint32_t panel) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x % WARPGROUP / WARP, chunk = lane % 8;
    const int columns = p.N - n0;
#pragma unroll 2  // more under way would not fit the registers
    for (int i = 0; i < 16; i += WARP / 8) {
        const int row = warp * 16 + i + lane / 8;
        if (m0 + row >= p.M) continue;
        T* const to = c + batch * p.c_batch + (m0 + row) * p.c_row + n0;
        const auto before = static_cast<uint32_t>(-reinterpret_cast<uintptr_t>(to) % 16);  // bytes to such a multiple
        uint32_t v[4];
        join<T>(v, load_shared16(panel + swizzled(row, chunk)), load_shared16(panel + swizzled(row, (chunk + 1) % 8)),
                before);
        const int first = chunk * 8 + static_cast<int>(before / sizeof(T));
        if (first + 8 <= min(columns, PANEL_X)) {
            *reinterpret_cast<uint4*>(to + first) = make_uint4(v[0], v[1], v[2], v[3]);
        } else {
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                const int x = (first + e) % PANEL_X;
                if (x < columns) reinterpret_cast<uint16_t*>(to)[x] = static_cast<uint16_t>(v[e / 2] >> e % 2 * 16);
            }
        }
    }
}

// Where outputs go. `by_tma`: TMA can address them.
template <typename T>
struct OutputTarget {
    T* c;
    const CUtensorMap& map;
    bool by_tma;
};

// Stores a warpgroup's 64×64 outputs through a panel of shared memory. Every second call uses the same panel. ADD: adds
// them to the outputs instead, which TMA must be able to address.
template <typename T, bool ADD = false>
__device__ inline void store_columns(const float (&d)[PANEL_X / 2], const OutputTarget<T>& to, const Tiled& p,
                                     uint32_t panel, int batch, int m0, int n0) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x % WARPGROUP / WARP, group = threadIdx.x / WARPGROUP;
    const bool leader = threadIdx.x % WARPGROUP == 0;
    // Lane 8i + r names row r of square i: rows 0–7 and 8–15 of eight columns, then of the next eight.
    const int row = warp * 16 + lane % 16, square = lane / 16;
    if (ADD || to.by_tma) {
        if (leader) tma_store_wait_read<1>();  // the panel's last box has left
        named_barrier_sync(group, WARPGROUP);
    } else {
        __syncwarp();  // each warp reads back what it wrote itself
    }
#pragma unroll
    for (int j = 0; j < PANEL_X / 8; j += 2) {
        stmatrix(panel + swizzled(row, j + square), pack_pair<T>(d[j * 4], d[j * 4 + 1]),
                 pack_pair<T>(d[j * 4 + 2], d[j * 4 + 3]), pack_pair<T>(d[j * 4 + 4], d[j * 4 + 5]),
                 pack_pair<T>(d[j * 4 + 6], d[j * 4 + 7]));
    }
    if (ADD || to.by_tma) {
        fence_async_shared();
        named_barrier_sync(group, WARPGROUP);
        if (leader) {
            ADD ? tma_add(to.map, panel, n0, m0, batch) : tma_store(to.map, panel, n0, m0, batch);
            tma_store_commit();
        }
    } else {
        __syncwarp();
        store_rows(to.c, p, batch, m0, n0, panel);
    }
}

constexpr int PARTS_N = BN / PANEL_X;
using Columns = float[PANEL_X / 2];
__device__ inline Columns& columns_of(float (&sum)[BN / 2], int part) {
    return *reinterpret_cast<Columns*>(sum + part * PANEL_X / 2);
}

// matmul's epilogue: stores the sums unchanged.
struct IdentityEpilogue {
    template <typename T>
    struct Tile {
        __device__ Tile(const IdentityEpilogue&, int, int) {}

        __device__ void store(float (&sum)[BN / 2], const OutputTarget<T>& to, const Tiled& p, uint32_t panels,
                              int batch, int m0, int n0) const {
            if constexpr (sizeof(T) == 4) {  // two float32 of four lanes fill a sector: nothing to gain
                store_outputs<T, BN>(sum, to.c + batch * p.c_batch, p, m0, n0);
            } else {
#pragma unroll
                for (int part = 0; part < PARTS_N; ++part) {
                    store_columns(columns_of(sum, part), to, p, panels + part % 2 * PANEL_BYTES, batch, m0,
                                  n0 + part * PANEL_X);
                }
            }
        }
    };
};

}  // namespace persistent
}  // namespace kl
