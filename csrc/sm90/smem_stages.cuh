// Rows on their way into shared memory while those before them are worked on.
#pragma once

#include "core/mma.cuh"
#include "reduce/rows.cuh"

namespace kl {

// Of the memory of slots. cp.async brings sectors of 32 bytes: where they came to lie across two sectors of shared memory,
// 16 bytes off, the norms' backward pass took a seventh longer.
constexpr int SLOT_ALIGNMENT = 128;

// A thread's own vectors in shared memory, 16 bytes of each operand's row that it shares. Each thread fetches, and later
// reads, its own ones only, so that no barrier is needed; and cp.async needs no register until they have come.
// THREADS: of the block, where that is known; so far apart are a thread's slots. ONCE: what comes here comes once().
template <typename T, int THREADS = 0, bool ONCE = true>
struct Slots {
    uint4* own;

    __device__ explicit Slots(uint4* shared) : own(shared + threadIdx.y * blockDim.x + threadIdx.x) {}

    __device__ uint4* slot(int i) const {
        return own + i * (THREADS > 0 ? THREADS : static_cast<int>(blockDim.x * blockDim.y));
    }

    __device__ void read(int i, float (&x)[Vec<T>::size]) const {
        const uint4 word = *slot(i);
        unpack(reinterpret_cast<const Vec<T>&>(word), x);
    }

    // Vectors from slot `begin` on, once they have come.
    __device__ void take(Vec<T> (&tile)[ROW_VECTORS], int begin) const {
#pragma unroll
        for (int v = 0; v < ROW_VECTORS; ++v) reinterpret_cast<uint4&>(tile[v]) = *slot(begin + v);
    }

    // Vector v of a row, of V, goes to slot begin + v: zeros past the end of the row, and for a thread without one.
    template <bool WHOLE, int V, typename Share>
    __device__ void fetch(int begin, const T* row, const Rows& rows, const Share& share, bool live,
                          int64_t length) const {
#pragma unroll(WHOLE ? V : 1)  // element by element a vector is code enough
        for (int v = 0; v < V; ++v) {
            const int first = share.at(v) * Vec<T>::size;
            const bool inside = live && share.template has<T>(v, length);
            if (WHOLE || (rows.whole && inside && first + Vec<T>::size <= static_cast<int>(length))) {
                cp_async16_if<ONCE>(shared_address(slot(begin + v)), row + first, inside);
            } else {
                const Vec<T> loaded = load_chunk(row, rows, first, inside ? length : 0, 0.0f);
                *slot(begin + v) = reinterpret_cast<const uint4&>(loaded);
            }
        }
    }

    // The same of an operand that all rows share, and so by way of the L1 of the SM, whose other blocks want it too.
    // Where there is none (null), `absent` stands for it.
    template <bool WHOLE, int V, typename Share>
    __device__ void fetch_parameter(int begin, const T* parameter, const Rows& rows, const Share& share, int64_t length,
                                    float absent) const {
#pragma unroll(WHOLE ? V : 1)
        for (int v = 0; v < V; ++v) {
            const int first = share.at(v) * Vec<T>::size;
            if (WHOLE && parameter != nullptr && share.template has<T>(v, length)) {
                asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(shared_address(slot(begin + v))),
                             "l"(parameter + first)
                             : "memory");
            } else if (WHOLE || parameter == nullptr) {
                *slot(begin + v) = filled<T>(absent);
            } else {
                const Vec<T> loaded = load_chunk(parameter, rows, first, length, absent);
                *slot(begin + v) = reinterpret_cast<const uint4&>(loaded);
            }
        }
    }
};

// Bytes of shared memory for so many vectors of each thread.
constexpr int slot_bytes(unsigned threads, int vectors) { return static_cast<int>(threads) * vectors * 16; }

}  // namespace kl
