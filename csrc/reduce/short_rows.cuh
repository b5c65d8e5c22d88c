// Several rows per thread: a warp holds short rows whole, or all threads of a block share a few rows. Such kernels are
// instruction-bound, so rows must lie evenly apart and consist of whole vectors: one addition leads to the next
// address.
#pragma once

#include <tuple>
#include <type_traits>

#include "sm90/smem_stages.cuh"

namespace kl {

constexpr int SHORT_VALUES = 32;                   // elements per thread
constexpr int SHORT_LENGTH = SHORT_VALUES * WARP;  // elements of the longest row that a warp holds
constexpr int SHORT_ROWS = 4;                      // most rows per thread; such rows may need only part of a warp
constexpr int THREADS_AN_SM = 1024;                // resident threads of 64 registers each
constexpr int SHORT_BLOCKS = THREADS_AN_SM / MIN_BLOCK;

// Vectors per thread of each of ROWS rows.
template <typename T, int ROWS>
constexpr int SHORT_VECTORS = SHORT_VALUES / Vec<T>::size / ROWS;

// A block whose threads share ROWS rows of 16-bit elements, longer than LONGER_THAN and at most UP_TO. Each thread
// holds VECTORS vectors of every row, and so reads the parameters once for all rows.
template <int ROWS_, int VECTORS_, int LONGER_THAN, int UP_TO>
struct BlockRowsShape {
    static constexpr int ROWS = ROWS_, VECTORS = VECTORS_, THREADS = UP_TO / (VECTORS_ * 8);
    static_assert(LONGER_THAN >= VECTORS * 8 * WARP / 2, "a block consists of whole warps");
    static constexpr bool takes(int64_t length) { return LONGER_THAN < length && length <= UP_TO; }
};

// Stores a vector of 16 bytes where `inside`.
template <typename T>
__device__ void store_if(T* to, const Vec<T>& part, bool inside) {
    store_16_bytes_if(to, reinterpret_cast<const uint4&>(part), inside);
}

/// The rows and vectors of this thread: blockDim.x threads share every blockDim.y-th row of the block. They are a whole
/// warp unless a thread has SHORT_ROWS. BY_BLOCK: all threads of the block share all its rows.
template <int ROWS, bool BY_BLOCK = false>
struct MultiRowPartition {
    int lane = threadIdx.x, lanes = ROWS < SHORT_ROWS && !BY_BLOCK ? WARP : blockDim.x,
        apart = BY_BLOCK ? 1 : blockDim.y;
    int64_t row = int64_t{blockIdx.x} * (ROWS * apart) + (BY_BLOCK ? 0 : threadIdx.y);
    int length, left;

    __device__ MultiRowPartition(int64_t count, int length_in)
        : length(length_in), left(static_cast<int>(min(count - row, int64_t{ROWS} * apart))) {}
    __device__ bool has_row(int r) const { return r * apart < left; }

    // As in RowPartition: index of this thread's vector v, and whether it lies in the row.
    __device__ int at(int v) const { return lane + v * lanes; }
    template <typename T>
    __device__ bool has(int v, int64_t of) const {
        return at(v) * Vec<T>::size < static_cast<int>(of);
    }

    // Address of this thread's vector v of its first row, for rows `step` elements apart. next(): the distance to its next
    // row.
    template <typename T>
    __device__ T* begin(T* rows, int64_t step, int v = 0) const {
        return rows + row * step + at(v) * Vec<std::remove_const_t<T>>::size;
    }
    __device__ int64_t next(int64_t step) const { return apart * step; }

    // Loads this thread's vectors of its rows, `step` elements apart. `fill` stands past a row's end and for missing
    // rows.
    template <typename T, int V>
    __device__ void load(Vec<T> (&tile)[ROWS][V], const T* rows, int64_t step, float fill) const {
        const T* from = begin(rows, step);
#pragma unroll
        for (int r = 0; r < ROWS; ++r, from += next(step)) {
#pragma unroll
            for (int v = 0; v < V; ++v) {
                uint4 word = filled<T>(fill);
                // & instead of &&: after a branch ptxas would use the values loaded so far before it loads the rest.
                if (has_row(r) & has<T>(v, length)) {
                    word = *evict_last(reinterpret_cast<const uint4*>(from + v * lanes * Vec<T>::size));
                }
                reinterpret_cast<uint4&>(tile[r][v]) = word;
            }
        }
    }
    // The same with cp.async into shared memory: vector v of row r goes to stage r · V + v, zeros past the end.
    template <int V, typename T, int THREADS, bool SINGLE_USE>
    __device__ void fetch(const SmemStages<T, THREADS, SINGLE_USE>& stages, const T* rows, int64_t step) const {
        rows += row * step;
#pragma unroll
        for (int r = 0; r < ROWS; ++r, rows += apart * step) {
            stages.template fetch<true, V>(r * V, rows, Rows{}, *this, has_row(r), length);
        }
    }
    // Vector v of a parameter, which all rows share; `absent` where the parameter is null.
    template <typename T>
    __device__ Vec<T> parameter(const T* from, int v, float absent) const {
        uint4 word = filled<T>(absent);
        load_if<false>(word, from + at(v) * Vec<T>::size, from != nullptr && has<T>(v, length));
        return reinterpret_cast<const Vec<T>&>(word);
    }
    // Stores vector v of row r at `to`.
    template <typename T>
    __device__ void store(T* to, int r, int v, const Vec<T>& part) const {
        store_if(to, part, has_row(r) && has<T>(v, length));
    }
};

// Selects between values. Given two array elements, the compiler would select between their addresses, and so keep the
// array in local memory.
__device__ inline float chosen(bool first, float a, float b) { return first ? a : b; }
__device__ inline Pair chosen(bool first, const Pair& a, const Pair& b) {
    return {first ? a.first : b.first, first ? a.second : b.second};
}

// Reduces one value per row over `lanes` neighbouring lanes. Each ROWS-th part of the lanes ends with the result of one
// row, in order. Lanes exchange what they do not keep, so that the data halves at each step. Four rows r0 … r3, 32 lanes:
//
//   lanes              0 … 7    8 … 15    16 … 23    24 … 31
//   each begins with   r0 to r3 everywhere
//   after xor 16       r0, r1   r0, r1    r2, r3     r2, r3       2 exchanges
//   after xor 8        r0       r1        r2         r3           1 exchange
//   after xor 4, 2, 1  the sum over all 32 lanes of that row      3 exchanges; four separate reductions would take 20
template <int ROWS, typename V, typename Op>
__device__ V reduce_rows_over_lanes(const V (&values)[ROWS], Op op, int lanes) {
    V value;
    if constexpr (ROWS == 1) {
        value = values[0];
    } else {
        constexpr int HALF = ROWS / 2;
        const bool upper = (threadIdx.x & lanes / 2) != 0;
        V kept[HALF];
#pragma unroll
        for (int r = 0; r < HALF; ++r) {
            const V low = values[r], high = values[HALF + r];
            kept[r] = op(chosen(upper, high, low), shuffle_xor(chosen(upper, low, high), lanes / 2));
        }
        if constexpr (HALF > 1) return reduce_rows_over_lanes(kept, op, lanes / 2);
        value = kept[0];
        lanes /= 2;
    }
#pragma unroll
    for (int l = WARP / 2; l > 0; l /= 2) {
        if (l < lanes) value = op(value, shuffle_xor(value, l));
    }
    return value;
}

// Reduces each row's value over `lanes` neighbouring lanes, a power of two and at least ROWS. Every lane gets the results
// of all rows.
template <int ROWS, typename V, typename Op>
__device__ void each_over_lanes(V (&values)[ROWS], Op op, int lanes) {
    const V own = reduce_rows_over_lanes(values, op, lanes);
    uint32_t lane;
    asm("mov.u32 %0, %%laneid;" : "=r"(lane));
    const int first = static_cast<int>(lane) & -lanes;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) values[r] = ROWS == 1 ? own : shuffle_from(own, first + r * (lanes / ROWS));
}

// Scratch of each_over_block, which does the same over all threads of a block. Every reduction needs its own.
template <int ROWS, typename V>
struct BlockReduceSmem {
    V partials[ROWS * WARP];  // for the warps of the largest block
};
template <typename V>
struct BlockReduceSmem<0, V> {};
template <int ROWS, typename V, typename Op>
__device__ void each_over_block(V (&values)[ROWS], Op op, V* partials) {
    const int lane = threadIdx.x % WARP, count = ROWS * static_cast<int>(blockDim.x / WARP);
    const V own = reduce_rows_over_lanes(values, op, WARP);
    if (lane % (WARP / ROWS) == 0) partials[threadIdx.x / (WARP / ROWS)] = own;
    __syncthreads();
    V total = Op::none();  // of several rows the first lanes read all, and tell the others
    if constexpr (ROWS == 1) total = of_warp(partials, lane, min(count, WARP), op);
    if (ROWS > 1 && lane < count) total = partials[lane];
    if (lane + WARP < count) total = op(total, partials[lane + WARP]);
#pragma unroll
    for (int l = WARP / 2; l >= ROWS; l /= 2) {
        if (l < count) total = op(total, shuffle_xor(total, l));
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) values[r] = ROWS == 1 ? total : shuffle_from(total, r);
}

template <int ROWS, bool BY_BLOCK, typename V, typename Op, typename S>
__device__ void each_over_rows(V (&values)[ROWS], Op op, const MultiRowPartition<ROWS, BY_BLOCK>& partition, S& smem) {
    if constexpr (BY_BLOCK) each_over_block(values, op, smem.partials);
    if constexpr (!BY_BLOCK) each_over_lanes(values, op, partition.lanes);
}

// ---- host ----------------------------------------------------------------------------------------------------------

// Whether rows of all operands lie evenly apart and, as `whole` tells, consist of whole vectors.
template <typename... R>
bool are_even(bool whole, const R&... operands) {
    return whole && (operands.even() && ...);
}

/// Calls f(shape, grid, block) for `count` rows with the first of the SHAPES that takes their length. Returns whether
/// one did.
template <typename T, typename... SHAPES, typename F>
bool with_block_rows(std::tuple<SHAPES...> shapes, int64_t count, int64_t length, F&& f) {
    const auto run = [&](auto shape) {
        if constexpr (sizeof(T) == 2) {
            if (!shape.takes(length)) return false;
            f(shape, grid_size(ceil_div(count, shape.ROWS)),
              dim3(row_warps(length / Vec<T>::size, shape.VECTORS, shape.THREADS)));
            return true;
        }
        return false;
    };
    return std::apply([&](auto... each) { return (run(each) || ...); }, shapes);
}

/// Calls f(rows of a thread as a constant, grid, block) for `count` short rows. The caller promises that no row is so
/// long that a thread would hold fewer than LEAST_ROWS.
template <typename T, int LEAST_ROWS = 1, typename F>
void with_short_rows(int64_t count, int64_t length, F&& f) {
    const auto run = [&](auto rows) {
        const unsigned lanes = row_threads(length / Vec<T>::size, SHORT_VECTORS<T, rows()>, WARP);
        const unsigned apart = MIN_BLOCK / lanes;
        f(rows, grid_size(ceil_div(count, int64_t{rows()} * apart)), dim3(lanes, apart));
    };
    if (length <= SHORT_LENGTH / SHORT_ROWS) return run(std::integral_constant<int, SHORT_ROWS>{});
    if (LEAST_ROWS == 2 || length <= SHORT_LENGTH / 2) return run(std::integral_constant<int, 2>{});
    if constexpr (LEAST_ROWS == 1) run(std::integral_constant<int, 1>{});
}

/// Calls `by_block` as with_block_rows does, or for short rows that no shape takes `by_rows` as with_short_rows does.
/// Returns whether either has been called. Rows must lie evenly apart.
template <typename T, typename... SHAPES, typename F, typename G>
bool with_even_rows(std::tuple<SHAPES...> shapes, int64_t count, int64_t length, F&& by_block, G&& by_rows) {
    constexpr int HALF = SHORT_LENGTH / 2;
    constexpr bool NO_LONGER = sizeof(T) == 2 && ((SHAPES::takes(HALF + 1) && SHAPES::takes(SHORT_LENGTH)) || ...);
    if (with_block_rows<T>(shapes, count, length, by_block)) return true;
    if (length > SHORT_LENGTH) return false;
    with_short_rows<T, NO_LONGER ? 2 : 1>(count, length, by_rows);
    return true;
}

}  // namespace kl
