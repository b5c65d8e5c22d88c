// Which tile a block of the backward kernels of `warp_specialized` has, of batches or of packed sequences.
//
// Packed sequences: a sequence that begins at row r begins at tile ⌊r / ROWS⌋ + its number. So no two share a tile, no sum
// over lengths is needed, and T / ROWS + sequences tiles are enough for T rows. Each sequence leaves at most one tile
// unused, so that the grid needs no longest length.
//
// Offsets in device memory may be wrong. A tile belongs to the last sequence that begins at or before it. Then the owned
// tiles of a sequence follow each other from its first one on, whatever the offsets say. Blocks draw them in this order.
// They wait only for earlier tiles of their own sequence and head. These are owned and drawn, so there is no deadlock.
//
// Neighbouring tiles of a sequence wait for each other's sums. So blocks draw the tiles of several heads alternately. Other
// blocks start between a tile and its neighbour, and by then the sums of the tile have gone ahead.
#pragma once

#include "attention/hopper_backward.cuh"
#include "attention/sequences.cuh"

namespace kl {

/// Tiles that packed rows take at most.
template <int ROWS>
__host__ __device__ inline int64_t packed_tiles(int rows, int64_t sequences) {
    return rows / ROWS + sequences;
}

/// Tiles of ROWS keys of a head.
template <int ROWS>
inline int64_t key_tiles(const Batched&, const Attention& all) {
    return ceil_div(all.S_k, ROWS);
}
template <int ROWS>
inline int64_t key_tiles(const Packed& packed, const Attention& all) {
    return packed_tiles<ROWS>(all.S_k, packed.sequences);
}

/// Blocks draw tiles of several heads by turns: of as many heads as have so many key tiles together, times the head
/// dimension. Their queries, output gradients and sums of dQ then take about 16 MiB of the L2 cache.
constexpr unsigned INTERLEAVED = 128 * 128;

/// Where the `index`-th tile that blocks draw lies: of which head, of all batches, and which of the head's tiles.
struct DrawnTile {
    unsigned outer, tile;

    /// `heads` have `tiles` each, those of a sequence `of_sequence`.
    __device__ DrawnTile(unsigned index, unsigned heads, unsigned tiles, unsigned of_sequence, unsigned head_dim) {
        const unsigned interleaved = min(heads, max(INTERLEAVED / (head_dim * max(of_sequence, 1u)), 1u));
        const unsigned first = index / (interleaved * tiles) * interleaved, within = index % (interleaved * tiles);
        const unsigned count = min(interleaved, heads - first);
        outer = first + within % count;
        tile = within / count;
    }
};

/// A block's tile of batches.
struct BatchedBlock {
    const Attention& a;
    unsigned outer, tile;  // batch · heads + head; tile of the head
    static constexpr int query_row = 0, key_row = 0;

    __device__ static constexpr bool inside() { return true; }
    /// Index of a tile of statistics and of dQ.
    __device__ int64_t query_tile(int batch, int head, int of_head) const {
        const int64_t tiles = (a.S_q + QUERY_TILE - 1) / QUERY_TILE;
        return (int64_t{batch} * a.heads + head) * tiles + of_head;
    }
};

/// A block's tile of packed sequences. The batch is 0.
struct PackedBlock : PackedSequence {
    unsigned outer;       // head
    int tile, rows_left;  // of the sequence; rows from the tile's first on, none for an unused tile
    int first_tile;       // of the sequence's queries
    int64_t sequences;    // of the call

    __device__ bool inside() const { return rows_left > 0; }
    __device__ int64_t query_tile(int, int head, int of_sequence) const {
        return head * packed_tiles<QUERY_TILE>(total_q, sequences) + first_tile + of_sequence;
    }
};

/// The last sequence that begins at or before a tile, or −1. All lanes of a warp must call it.
template <int ROWS>
__device__ inline int sequence_of_tile(const int32_t* offsets, int sequences, int rows, int tile) {
    for (int base = min(sequences - 1, tile) / WARP * WARP; base >= 0; base -= WARP) {
        const int sequence = base + static_cast<int>(threadIdx.x) % WARP;
        const bool begun = sequence < sequences && min(max(offsets[sequence], 0), rows) / ROWS + sequence <= tile;
        const unsigned any = __ballot_sync(FULL_MASK, begun);
        if (any != 0) return base + WARP - 1 - __clz(static_cast<int>(any));
    }
    return -1;
}

/// The `tile`-th tile of ROWS rows of a head.
template <int ROWS, bool OF_KEYS>
__device__ inline PackedBlock packed_block(const Packed& packed, const Attention& all, unsigned head, int tile) {
    const int rows = OF_KEYS ? all.S_k : all.S_q, sequences = static_cast<int>(packed.sequences);
    const int found =
        sequence_of_tile<ROWS>(OF_KEYS ? packed.cu_seqlens_k : packed.cu_seqlens_q, sequences, rows, tile);
    const PackedSequence sequence = packed.at(all, max(found, 0));
    const int of_sequence = tile - (OF_KEYS ? sequence.key_row : sequence.query_row) / ROWS - found;
    const int rows_left = found < 0 ? 0 : (OF_KEYS ? sequence.a.S_k : sequence.a.S_q) - of_sequence * ROWS;
    return {sequence, head, of_sequence, rows_left, sequence.query_row / QUERY_TILE + found, packed.sequences};
}

/// The `index`-th tile of keys that blocks of shape S draw.
template <typename S>
__device__ inline BatchedBlock key_block(const Batched&, const Attention& all, unsigned index) {
    const unsigned tiles = (all.S_k + S::KEYS - 1) / S::KEYS;
    const DrawnTile drawn(index, all.batches * all.heads_kv, tiles, tiles, S::HEAD_DIM);
    return {all, drawn.outer, drawn.tile};
}
template <typename S>
__device__ inline PackedBlock key_block(const Packed& packed, const Attention& all, unsigned index) {
    const auto sequences = static_cast<unsigned>(packed.sequences);
    const auto tiles = static_cast<unsigned>(packed_tiles<S::KEYS>(all.S_k, packed.sequences));
    const DrawnTile drawn(index, all.heads_kv, tiles, tiles / sequences, S::HEAD_DIM);
    return packed_block<S::KEYS, true>(packed, all, drawn.outer, static_cast<int>(drawn.tile));
}

/// The `index`-th tile of queries, in the order of query_tile.
__device__ inline BatchedBlock query_block(const Batched&, const Attention& all, unsigned index) {
    const unsigned tiles = (all.S_q + QUERY_TILE - 1) / QUERY_TILE;
    return {all, index / tiles, index % tiles};
}
__device__ inline PackedBlock query_block(const Packed& packed, const Attention& all, unsigned index) {
    const auto tiles = static_cast<unsigned>(packed_tiles<QUERY_TILE>(all.S_q, packed.sequences));
    return packed_block<QUERY_TILE, false>(packed, all, index / tiles, static_cast<int>(index % tiles));
}

/// preprocess_tile for either kind.
template <typename T>
__device__ inline void preprocess_tile(float* stats, const float* lse, const float* grad_lse, const View<T>& output,
                                       const View<T>& grad, const Attention& all, const Batched&) {
    preprocess_tile(stats, lse, grad_lse, output, grad, all);
}
template <typename T>
__device__ inline void preprocess_tile(float* stats, const float* lse, const float* grad_lse, const View<T>& output,
                                       const View<T>& grad, const Attention& all, const Packed& packed) {
    const PackedBlock block = query_block(packed, all, blockIdx.x);
    if (!block.inside()) return;
    const int head = static_cast<int>(block.outer), q0 = block.tile * QUERY_TILE;
    const int64_t row = block.first_row(head) + q0;
    preprocess_rows(stats, PreprocessRows<T>{block.queries(output, head) + q0 * output.row,
                                             block.queries(grad, head) + q0 * grad.row, output.row, grad.row, lse + row,
                                             grad_lse == nullptr ? nullptr : grad_lse + row, block.rows_left, all.D_v});
}

#if KL_SM90A

/// Clears the rows from `first` on of a tile of 64, those of another sequence: a weight of zero times their NaN would be
/// NaN. A warpgroup's threads must call it. It makes the zeros visible to the warpgroup's wgmma; `barrier` is its own.
template <int PANELS>
__device__ inline void clear_rows(std::initializer_list<uint32_t> tiles, int panel_bytes, int first, int barrier) {
    const int begin = max(first, 0) * SWIZZLE_ROW + static_cast<int>(threadIdx.x) % WARPGROUP * 16;
    for (const uint32_t tile : tiles) {
        for (int panel = 0; panel < PANELS; ++panel) {
#pragma unroll 1
            for (int i = begin; i < 64 * SWIZZLE_ROW; i += WARPGROUP * 16) {
                store_shared16(tile + panel * panel_bytes + i, make_uint4(0, 0, 0, 0));
            }
        }
    }
    fence_async_shared();
    named_barrier_sync(barrier, WARPGROUP);
}

#endif

}  // namespace kl
