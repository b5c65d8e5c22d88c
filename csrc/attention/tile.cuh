// attention on mma.sync: tiles in shared memory, and the two products. For flash.cuh, flash_backward.cuh, split_kv.cu.
//
// A tile is ROWS × HEAD_DIM elements of 16 bits, in rows of HEAD_DIM / 8 chunks of 16 bytes. Chunk c of row r is stored at
// chunk c ^ (r mod 8). ldmatrix reads one chunk of eight consecutive rows, and these then fall on different banks. Chunk 0
// of eight rows, where it is stored:
//
//   place      0 1 2 3 4 5 6 7
//   row 0      0 . . . . . . .        Eight places are 128 bytes: all 32 banks. Without the exclusive or, chunk 0 of every
//   row 1      . 0 . . . . . .        row would lie in the same four banks, and the read would take eight turns.
//   row 2      . . 0 . . . . .
//     …
//   row 7      . . . . . . . 0
#pragma once

#include "attention/attention.cuh"
#include "core/mma.cuh"
#include "core/philox.cuh"

namespace kl {

/// Tile shape by head dimension, padded on chip. Each warp has BLOCK / WARPS rows of the resident tile; tiles of the other
/// operands stream past.
template <int HEAD_DIM_, int BLOCK_, int STREAM_, int WARPS_, int COLUMNS_ = HEAD_DIM_>
struct FlashShape {
    static constexpr int HEAD_DIM = HEAD_DIM_, BLOCK = BLOCK_, STREAM = STREAM_, WARPS = WARPS_;
    static constexpr int COLUMNS = COLUMNS_;  // columns of the head dimension that one block accumulates
    static constexpr int THREADS = WARPS * WARP, ROWS = BLOCK / WARPS;
    static constexpr int BLOCK_BYTES = BLOCK * HEAD_DIM * 2, STREAM_BYTES = STREAM * HEAD_DIM * 2;
    static_assert(HEAD_DIM % 64 == 0 && ROWS % 16 == 0 && STREAM % 16 == 0 && HEAD_DIM % COLUMNS == 0);
};

/// Calls f with the shape for a head dimension.
template <typename S64, typename S128, typename S256, typename F>
void dispatch_shape(int head_dim, F&& f) {
    if (head_dim <= 64) return f(S64{});
    if (head_dim <= 128) return f(S128{});
    f(S256{});
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

/// Hides the origin of an address from the compiler, so that derived addresses are recomputed instead of kept in registers.
__device__ inline void recompute(uint32_t& address) { asm volatile("" : "+r"(address)); }

template <int HEAD_DIM>
__device__ uint32_t tile_offset(int row, int chunk) {
    return (row * (HEAD_DIM / 8) + (chunk ^ (row % 8))) * 16;
}

/// Moves an address of chunk 0 or 1 of a row `chunks` chunks to the right; `chunks` is even and known at compile time.
/// Tiles start at multiples of 128 bytes, so that the swizzle stays one exclusive or. To recompute it costs less than to
/// keep it in a register.
__device__ inline uint32_t step_chunks(uint32_t address, int chunks) {
    return (address ^ (chunks % 8 * 16)) + chunks / 8 * 128;
}

/// Copies ROWS rows from `source` on to a tile. Of the operand, `rows_left` rows (≥ 1, may exceed ROWS) and `columns` columns
/// are left; zeros fill the rest. Without EDGE all rows are inside. VECTORIZED: 16 bytes at a time, with cp.async. All of
/// THREADS threads call it with their number.
template <int ROWS, int HEAD_DIM, int THREADS, bool VECTORIZED, bool EDGE, typename T>
__device__ void load_tile(uint32_t shared, const T* source, const View<T>& view, int rows_left, int columns,
                          int thread = threadIdx.x) {
    constexpr int CHUNKS = HEAD_DIM / 8;
    if constexpr (VECTORIZED) {
        constexpr int STEP = THREADS / CHUNKS;  // rows per iteration
        static_assert(THREADS % CHUNKS == 0 && ROWS % STEP == 0 && (STEP & (STEP - 1)) == 0);
        const int chunk = thread % CHUNKS, row = thread / CHUNKS;
        const bool inside = chunk * 8 < columns;
        const uint32_t place = shared + tile_offset<HEAD_DIM>(row, chunk);
        const T* p = source + row * view.row + chunk * 8;
#pragma unroll
        for (int i = 0; i < ROWS / STEP; ++i) {
            const uint32_t swizzled = place ^ (i * STEP % 8 * 16);  // row is below STEP, a power of 2
            cp_async16_if(swizzled + i * STEP * HEAD_DIM * 2, p, inside && (!EDGE || row + i * STEP < rows_left));
            p += STEP * view.row;
        }
    } else {
#pragma unroll 1
        for (int i = thread; i < ROWS * CHUNKS; i += THREADS) {
            const int row = i / CHUNKS, chunk = i % CHUNKS;
            Vec<T> v;
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                const int column = chunk * 8 + e;
                const bool inside = (!EDGE || row < rows_left) && column < columns;
                v[e] = inside ? source[row * view.row + column * view.column] : from_float<T>(0.0f);
            }
            store_shared16(shared + tile_offset<HEAD_DIM>(row, chunk), *reinterpret_cast<const uint4*>(&v));
        }
    }
}

/// The same where only the launch knows whether the operand consists of aligned vectors.
template <int ROWS, int HEAD_DIM, int THREADS, typename T>
__device__ void load_tile(uint32_t shared, const T* source, const View<T>& view, int rows_left, int columns,
                          int thread = threadIdx.x) {
    if (view.whole) {
        return load_tile<ROWS, HEAD_DIM, THREADS, true, true>(shared, source, view, rows_left, columns, thread);
    }
    load_tile<ROWS, HEAD_DIM, THREADS, false, true>(shared, source, view, rows_left, columns, thread);
}

/// Accumulators of a warp: M × 16 rows by N × 8 columns. Of square (m, n), lane 4g + t holds:
///
///                        column 8n + 2t   column 8n + 2t + 1
///   row 16m + g          x[m][n][0]       x[m][n][1]              h = 0
///   row 16m + g + 8      x[m][n][2]       x[m][n][3]              h = 1
///
/// So the four lanes of a quad, 4g … 4g + 3, share two rows of each m.
template <int M, int N>
struct Squares {
    float x[M][N][4];

    __device__ void clear() {
#pragma unroll
        for (int m = 0; m < M; ++m) {
#pragma unroll
            for (int n = 0; n < N; ++n) {
#pragma unroll
                for (int e = 0; e < 4; ++e) x[m][n][e] = 0.0f;
            }
        }
    }
};

/// The row of this lane's elements 2h and 2h + 1 in a warp's squares, and the column of element 0.
__device__ inline int lane_row(int m, int h) { return m * 16 + h * 8 + threadIdx.x % WARP / 4; }
__device__ inline int lane_column(int n) { return n * 8 + threadIdx.x % 4 * 2; }

/// Units of scores that may be masked. Under an additive mask they are scaled, to base e. Multiplied by log2 e, the lowest
/// number of float32 would become −inf and hide its key. Without one they are not yet scaled. `factor` converts differences
/// to powers of 2.
struct MaskedUnits {
    float factor, to_log;  // `to_log` converts a maximum to base e

    __device__ MaskedUnits(const Mask& mask, const Attention& a)
        : factor(mask.additive() ? LOG2E : a.scale * LOG2E), to_log(mask.additive() ? 1.0f : a.scale) {}
};

/// Applies mask and band to a warp's squares, which begin at query row0 and key column0. Scores are then in MaskedUnits, and
/// −inf where a query does not see a key.
template <typename T, int M, int N>
__device__ void apply_mask(Squares<M, N>& scores, const Mask& mask, int64_t offset, int row0, int column0,
                           const Attention& a) {
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = row0 + lane_row(m, h);
            const int begin = row + a.first, end = min(a.S_k, row < a.S_q ? row + 1 + a.last : 0);
            const int64_t mask_row = offset + row * mask.row;
#pragma unroll
            for (int n = 0; n < N; ++n) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int column = column0 + lane_column(n) + e;
                    float& score = scores.x[m][n][2 * h + e];
                    if (column < begin || column >= end) {
                        score = -INFINITE;
                    } else if (mask.kind != MaskKind::NONE) {
                        score = mask.template apply<T>(score, mask_row + column * mask.column, a.scale);
                    }
                }
            }
        }
    }
}

/// Which of a lane's scores, of 16 rows by N × 8 columns, keep their weights. Bit 4n + e stands for element e of square n.
/// `two(h, n)` gives bits 2h and 2h + 1 of a square. This is a loop, because unrolled calls of Philox would be most of the
/// kernel's code. It precedes the scores, because both take registers.
template <int N, typename Two>
__device__ uint32_t kept_bits(Two&& two) {
    static_assert(4 * N <= 32);
    uint32_t kept = 0;
#pragma unroll 2
    for (int i = 0; i < 2 * N; ++i) kept |= two(i % 2, i / 2) << 2 * i;
    return kept;
}

/// The bits of a warp's squares that begin at query `row`, counted over all heads of all batches, and at a key.
template <int N>
__device__ uint32_t kept_weights(const DropoutMask& mask, int64_t row, int key, const Attention& a) {
    return kept_bits<N>(
        [&](int h, int n) { return mask.keeps_two((row + lane_row(0, h)) * a.S_k + key + lane_column(n)); });
}
/// The same of transposed squares: rows are keys.
template <int N>
__device__ uint32_t kept_transposed(const DropoutMask& mask, int64_t row, int key, const Attention& a) {
    return kept_bits<N>([&](int h, int n) {
        const int64_t element = (row + lane_column(n)) * a.S_k + key + lane_row(0, h);
        return (mask.keeps(element) ? 1u : 0u) | (mask.keeps(element + a.S_k) ? 2u : 0u);
    });
}

/// Multiplies by dropout's factors.
template <int N>
__device__ void drop(Squares<1, N>& c, uint32_t kept, float scale) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) c.x[0][n][e] *= (kept >> (4 * n + e) & 1) != 0 ? scale : 0.0f;
    }
}

/// c = A · Bᵀ over the head dimension: A is M · 16 rows of a tile from a_row on, B the first N · 8 rows of another. Each
/// fragment of B serves all M squares.
template <typename T, int HEAD_DIM, int M, int N>
__device__ void multiply_rows(Squares<M, N>& c, uint32_t a, int a_row, uint32_t b) {
    static_assert(N % 2 == 0);
    const int lane = threadIdx.x % WARP;
    // Lanes 8i … 8i + 7 name the rows of the i-th 8×8 matrix. In A's fragment rows change first, in B's the head
    // dimension.
    const int low = lane / 8 % 2, high = lane / 16;
    uint32_t lane_a = a + tile_offset<HEAD_DIM>(a_row + low * 8 + lane % 8, high);
    uint32_t lane_b = b + tile_offset<HEAD_DIM>(high * 8 + lane % 8, low);
    recompute(lane_a);
    recompute(lane_b);
    c.clear();
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; ++k) {
        uint32_t fa[M][4];
#pragma unroll
        for (int m = 0; m < M; ++m) ldmatrix(fa[m], step_chunks(lane_a, 2 * k) + m * 16 * HEAD_DIM * 2);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            uint32_t fb[4];
            ldmatrix(fb, step_chunks(lane_b, 2 * k) + n * 8 * HEAD_DIM * 2);
#pragma unroll
            for (int m = 0; m < M; ++m) {
                mma(c.x[m][n], fa[m], fb[0], fb[1], T{});
                mma(c.x[m][n + 1], fa[m], fb[2], fb[3], T{});
            }
        }
    }
}

/// A warp's squares rounded to T: accumulators have the register layout of mma's A operand.
template <int M, int K>
struct Fragments {
    uint32_t x[K / 2][M][4];
};

template <typename T, int M, int K>
__device__ Fragments<M, K> round_squares(const Squares<M, K>& a) {
    static_assert(K % 2 == 0);
    Fragments<M, K> f;
#pragma unroll
    for (int k = 0; k < K; k += 2) {
#pragma unroll
        for (int m = 0; m < M; ++m) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* pair = &a.x[m][k + i / 2][i % 2 * 2];
                f.x[k / 2][m][i] = pack_pair<T>(pair[0], pair[1]);
            }
        }
    }
    return f;
}

/// c += A · B: A stays in registers. B is columns from b_column on, a multiple of 64, of a tile with K · 8 rows.
template <typename T, int HEAD_DIM, int M, int N, int K>
__device__ void multiply_accumulate(Squares<M, N>& c, const Fragments<M, K>& a, uint32_t b, int b_column) {
    static_assert(N % 2 == 0);
    const int lane = threadIdx.x % WARP, low = lane / 8 % 2, high = lane / 16;
    uint32_t lane_b = b + b_column * 2 + tile_offset<HEAD_DIM>(low * 8 + lane % 8, high);
    recompute(lane_b);
#pragma unroll
    for (int k = 0; k < K; k += 2) {
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            uint32_t fb[4];
            ldmatrix_transposed(fb, step_chunks(lane_b, n) + k * 8 * HEAD_DIM * 2);
#pragma unroll
            for (int m = 0; m < M; ++m) {
                mma(c.x[m][n], a.x[k / 2][m], fb[0], fb[1], T{});
                mma(c.x[m][n + 1], a.x[k / 2][m], fb[2], fb[3], T{});
            }
        }
    }
}

/// Sums over the four lanes of a row.
__device__ inline float quad_sum(float part) {
    part += __shfl_xor_sync(FULL_MASK, part, 1);
    return part + __shfl_xor_sync(FULL_MASK, part, 2);
}

/// One row's step of online softmax over a tile of keys: scores become weights, and the row's sum and output are rescaled.
/// The row is `h` of this lane's two. `highest` is the maximum of the row so far and of this lane's scores in the tile.
template <int N, int M>
__device__ inline void softmax_step(Squares<1, N>& scores, Squares<1, M>& output, int h, float highest, float& row_max,
                                    float& row_sum, float factor) {
    highest = fmaxf(highest, __shfl_xor_sync(FULL_MASK, highest, 1));
    highest = fmaxf(highest, __shfl_xor_sync(FULL_MASK, highest, 2));
    const float shift = highest == -INFINITE ? 0.0f : highest;
    const float rescale = exp2_approx((row_max - shift) * factor);
    row_max = highest;
    float sum[2] = {};
#pragma unroll
    for (int j = 0; j < N; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            float& x = scores.x[0][j][2 * h + e];
            x = exp2_approx((x - shift) * factor);
            sum[e] += x;
        }
    }
    row_sum = fmaf(row_sum, rescale, sum[0] + sum[1]);
#pragma unroll
    for (int e = 2 * h; e < 2 * h + 2; ++e) {
#pragma unroll
        for (int j = 0; j < M; ++j) output.x[0][j][e] *= rescale;
    }
}

/// Stores a warp's partial results of its ROWS rows in shared memory, for all warps to merge: D columns of output in
/// `results`, maximum and sum in `stats`. `row_sum` covers this lane's columns.
template <int ROWS, int D>
__device__ inline void store_of_warp(float* results, float* stats, const Squares<1, D / 8>& output,
                                     const float (&row_max)[2], const float (&row_sum)[2]) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int row = warp * ROWS + lane_row(0, h);
#pragma unroll
        for (int j = 0; j < D / 8; ++j) {
            results[row * D + lane_column(j)] = output.x[0][j][2 * h];
            results[row * D + lane_column(j) + 1] = output.x[0][j][2 * h + 1];
        }
        const float sum = quad_sum(row_sum[h]);
        if (lane % 4 == 0) {
            stats[row * 2] = row_max[h];
            stats[row * 2 + 1] = sum;
        }
    }
}

/// Stores squares to `out`, each row multiplied by factor(m, h). Pairs of columns are stored together in rows that begin on
/// 4 bytes: with an odd head dimension, those of every second head may not.
template <typename T, int M, int N, typename Factor>
__device__ void store_squares(const Squares<M, N>& c, T* out, int64_t row_stride, int rows_left, int columns_left,
                              Factor factor) {
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = lane_row(m, h);
            if (row >= rows_left) continue;
            const float f = factor(m, h);
            T* p = out + row * row_stride;
            const bool pairs = reinterpret_cast<uintptr_t>(p) % sizeof(uint32_t) == 0;
#pragma unroll
            for (int n = 0; n < N; ++n) {
                const int column = lane_column(n);
                const float x0 = c.x[m][n][2 * h] * f, x1 = c.x[m][n][2 * h + 1] * f;
                if (column + 1 < columns_left && pairs) {
                    *reinterpret_cast<uint32_t*>(p + column) = pack_pair<T>(x0, x1);
                } else {
                    if (column < columns_left) p[column] = from_float<T>(x0);
                    if (column + 1 < columns_left) p[column + 1] = from_float<T>(x1);
                }
            }
        }
    }
}

#endif

}  // namespace kl
