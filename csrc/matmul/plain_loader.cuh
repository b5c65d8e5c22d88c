// A loader for operands that TMA cannot read and that are not worth a copy (pad_operands.cu). Their products are small,
// no stride is 1, batches have several dimensions, or tf32 does not run along k. Two warpgroups use plain loads and
// store what TMA would have stored: K-major panels with the 128-byte swizzle. What runs along x is transposed in
// registers.
#pragma once

#include "matmul/hopper.cuh"
#include "matmul/unaligned.cuh"

namespace kl {

template <typename T, int THREADS>
struct PlainOperand {
    static constexpr int E = 16 / sizeof(T);  // elements per chunk of 16 bytes
    static constexpr int CHUNKS = SWIZZLE_ROW / 16;

    const T* origin;  // element (x0, k = 0)
    int64_t stride_x, stride_k;
    int x_left;  // of the operand from x0 on

    // Fills WIDTH rows of 128 bytes: x0 … x0 + WIDTH - 1, k0 … k0 + BLOCK_K - 1, zeros outside.
    template <int WIDTH>
    __device__ void load(uint32_t tile, int thread, int k0, int k_left) const {
        const T* source = origin + k0 * stride_k;
        if (stride_k == 1) {
            along_k<WIDTH>(tile, thread, source, k_left);
        } else if (stride_x == 1) {
            along_x<WIDTH>(tile, thread, source, k_left);
        } else {
            one_by_one<WIDTH>(tile, thread, source, k_left);
        }
    }

  private:
    // Of a chunk, `count` elements are inside; the others become zeros.
    __device__ static void finish(uint32_t (&chunk)[4], const UnalignedChunk<T>& loaded, int count) {
        loaded.get(chunk);
        if (count < E) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int bytes = count * static_cast<int>(sizeof(T)) - i * 4;  // of this word that are inside
                if (bytes < 4) chunk[i] = bytes == 2 ? chunk[i] & 0xffff : 0;
            }
        }
    }

    // Eight threads a row; four chunks a thread are under way at once.
    template <int WIDTH>
    __device__ void along_k(uint32_t tile, int thread, const T* source, int k_left) const {
        constexpr int AT_ONCE = 4, ROWS = THREADS / CHUNKS;
        static_assert(WIDTH % (ROWS * AT_ONCE) == 0);
        const int chunk = thread % CHUNKS, inside = min(max(k_left - chunk * E, 0), E);
        source += chunk * E;
#pragma unroll 1
        for (int first = thread / CHUNKS; first < WIDTH; first += ROWS * AT_ONCE) {
            UnalignedChunk<T> words[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int x = first + i * ROWS;
                words[i].begin(source + x * stride_x, x < x_left ? inside : 0);
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int x = first + i * ROWS;
                uint32_t v[4];
                finish(v, words[i], x < x_left ? inside : 0);
                round_to_operand<T>(v);
                store_shared16(tile + swizzled(x, chunk), make_uint4(v[0], v[1], v[2], v[3]));
            }
        }
    }

    // A thread transposes four rows of k of one chunk of x into E rows of x of four elements of k. Those side by side
    // hold all k of a row, so that their stores fill whole rows.
    template <int WIDTH>
    __device__ void along_x(uint32_t tile, int thread, const T* source, int k_left) const {
        constexpr int ROWS = 4, FOURS = SWIZZLE_ROW / (ROWS * sizeof(T)), STEP = THREADS / FOURS * E;
        static_assert(WIDTH % STEP == 0);
        const int four = thread % FOURS;
        source += four * ROWS * stride_k;
        k_left -= four * ROWS;
#pragma unroll 1
        for (int x = thread / FOURS * E; x < WIDTH; x += STEP) {
            const int inside = min(max(x_left - x, 0), E);
            UnalignedChunk<T> words[ROWS];
            uint32_t rows[ROWS][4];  // [k][x]
#pragma unroll
            for (int i = 0; i < ROWS; ++i) words[i].begin(source + x + i * stride_k, i < k_left ? inside : 0);
#pragma unroll
            for (int i = 0; i < ROWS; ++i) finish(rows[i], words[i], i < k_left ? inside : 0);
#pragma unroll
            for (int e = 0; e < E; ++e) {
                if constexpr (sizeof(T) == 4) {
                    uint32_t v[4] = {rows[0][e], rows[1][e], rows[2][e], rows[3][e]};
                    round_to_operand<T>(v);
                    store_shared16(tile + swizzled(x + e, four), make_uint4(v[0], v[1], v[2], v[3]));
                } else {
                    const int halves = e % 2 == 0 ? 0x5410 : 0x7632;
                    store_shared8(tile + swizzled(x + e, four / 2) + four % 2 * 8,
                                  __byte_perm(rows[0][e / 2], rows[1][e / 2], halves),
                                  __byte_perm(rows[2][e / 2], rows[3][e / 2], halves));
                }
            }
        }
    }

    template <int WIDTH>
    __device__ void one_by_one(uint32_t tile, int thread, const T* source, int k_left) const {
        const int chunk = thread % CHUNKS;
#pragma unroll 1
        for (int x = thread / CHUNKS; x < WIDTH; x += THREADS / CHUNKS) {
            Vec<T> v;
#pragma unroll
            for (int e = 0; e < E; ++e) {
                const int k = chunk * E + e;
                v[e] = x < x_left && k < k_left ? source[x * stride_x + k * stride_k] : from_float<T>(0.0f);
            }
            auto& words = reinterpret_cast<uint32_t (&)[4]>(v);
            round_to_operand<T>(words);
            store_shared16(tile + swizzled(x, chunk), make_uint4(words[0], words[1], words[2], words[3]));
        }
    }
};

}  // namespace kl
