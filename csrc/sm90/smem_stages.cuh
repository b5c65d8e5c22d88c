// Staging buffers in shared memory that cp.async fills with later rows while threads compute on earlier ones.
#pragma once

#include "core/mma.cuh"
#include "reduce/rows.cuh"

namespace kl {

// Alignment of the staging memory. cp.async moves 32-byte sectors. At an offset of 16 bytes, across two sectors, the
// norms' backward pass took a seventh longer.
constexpr int STAGE_ALIGNMENT = 128;

/// A thread's 16-byte stages in shared memory. Each thread copies and reads only its own, so that no barrier is needed.
/// cp.async holds no register while data is in flight.
///
///             thread 0   thread 1   …   thread THREADS − 1
///   stage 0   16 bytes   16 bytes   …   16 bytes
///   stage 1   16 bytes   16 bytes   …   16 bytes
///
/// THREADS: the threads of the block, where known at compile time; neighbouring stages of a thread are as many vectors
/// apart. SINGLE_USE: copies use the cache policy of evict_last().
template <typename T, int THREADS = 0, bool SINGLE_USE = true>
struct SmemStages {
    uint4* own;

    __device__ explicit SmemStages(uint4* shared) : own(shared + threadIdx.y * blockDim.x + threadIdx.x) {}

    __device__ uint4* stage(int i) const {
        return own + i * (THREADS > 0 ? THREADS : static_cast<int>(blockDim.x * blockDim.y));
    }

    __device__ void read(int i, float (&x)[Vec<T>::size]) const {
        const uint4 word = *stage(i);
        unpack(reinterpret_cast<const Vec<T>&>(word), x);
    }

    // Reads vectors from stage `begin` on. Their copies must have completed.
    __device__ void take(Vec<T> (&tile)[ROW_VECTORS], int begin) const {
#pragma unroll
        for (int v = 0; v < ROW_VECTORS; ++v) reinterpret_cast<uint4&>(tile[v]) = *stage(begin + v);
    }

    // Copies this thread's V vectors of a row, vector v to stage begin + v. Zeros stand past the row's end and for a thread
    // without a row.
    template <bool VECTORIZED, int V, typename Partition>
    __device__ void fetch(int begin, const T* row, const Rows& rows, const Partition& partition, bool has_row,
                          int64_t length) const {
#pragma unroll(VECTORIZED ? V : 1)  // element by element, one vector is long code
        for (int v = 0; v < V; ++v) {
            const int first = partition.at(v) * Vec<T>::size;
            const bool inside = has_row && partition.template has<T>(v, length);
            if (VECTORIZED || (rows.whole && inside && first + Vec<T>::size <= static_cast<int>(length))) {
                cp_async16_if<SINGLE_USE>(shared_address(stage(begin + v)), row + first, inside);
            } else {
                const Vec<T> loaded = load_chunk(row, rows, first, inside ? length : 0, 0.0f);
                *stage(begin + v) = reinterpret_cast<const uint4&>(loaded);
            }
        }
    }

    // The same for a parameter, through the L1 (.ca): the SM's other blocks read it too. `absent` replaces a parameter that
    // is null.
    template <bool VECTORIZED, int V, typename Partition>
    __device__ void fetch_parameter(int begin, const T* parameter, const Rows& rows, const Partition& partition,
                                    int64_t length, float absent) const {
#pragma unroll(VECTORIZED ? V : 1)
        for (int v = 0; v < V; ++v) {
            const int first = partition.at(v) * Vec<T>::size;
            if (VECTORIZED && parameter != nullptr && partition.template has<T>(v, length)) {
                asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(shared_address(stage(begin + v))),
                             "l"(parameter + first)
                             : "memory");
            } else if (VECTORIZED || parameter == nullptr) {
                *stage(begin + v) = filled<T>(absent);
            } else {
                const Vec<T> loaded = load_chunk(parameter, rows, first, length, absent);
                *stage(begin + v) = reinterpret_cast<const uint4&>(loaded);
            }
        }
    }
};

// Bytes of shared memory for `vectors` 16-byte vectors per thread.
constexpr int stage_bytes(unsigned threads, int vectors) { return static_cast<int>(threads) * vectors * 16; }

}  // namespace kl
