// Short rows: a warp holds several, or the whole of one, none of which outgrows it. Instructions bound them, so a row's
// place follows from the one before by an addition: rows lie evenly apart and consist of whole vectors.
#pragma once

#include <type_traits>

#include "slots.cuh"

namespace kl {

constexpr int SHORT_VALUES = 32;                   // a thread holds
constexpr int SHORT_LENGTH = SHORT_VALUES * WARP;  // of the longest row that a warp can hold, in elements
constexpr int SHORT_ROWS = 4;                      // of a thread at most, and where a row may not need a whole warp
constexpr int SHORT_BLOCKS = 1024 / MIN_BLOCK;     // that an SM is to have room for: 1024 threads of 64 registers

// Vectors that a thread holds of each of so many rows.
template <typename T, int ROWS>
constexpr int SHORT_VECTORS = SHORT_VALUES / Vec<T>::size / ROWS;

// Which rows and vectors are this thread's. blockDim.x threads share a row, a whole warp unless a thread has SHORT_ROWS,
// and take every blockDim.y-th row of the block's.
template <int ROWS>
struct ShortShare {
    int lane = threadIdx.x, lanes = ROWS < SHORT_ROWS ? WARP : blockDim.x, apart = blockDim.y;
    int64_t row = int64_t{blockIdx.x} * (ROWS * apart) + threadIdx.y;
    int length, left;

    __device__ ShortShare(int64_t count, int length_in)
        : length(length_in), left(static_cast<int>(min(count - row, int64_t{ROWS} * apart))) {}
    __device__ bool live(int r) const { return r * apart < left; }

    // As a RowShare says it: this thread's v-th vector of a row, and whether it lies in it.
    __device__ int at(int v) const { return lane + v * lanes; }
    template <typename T>
    __device__ bool has(int v, int64_t of) const {
        return at(v) * Vec<T>::size < static_cast<int>(of);
    }

    // This thread's vectors of its rows, `step` elements from row to row. `fill` stands past a row's end, and for a row
    // that is not there.
    template <typename T, int V>
    __device__ void load(Vec<T> (&tile)[ROWS][V], const T* rows, int64_t step, float fill) const {
        rows += row * step;
#pragma unroll
        for (int r = 0; r < ROWS; ++r, rows += apart * step) {
#pragma unroll
            for (int v = 0; v < V; ++v) {
                uint4 word = filled<T>(fill);
                if (live(r) && has<T>(v, length)) {
                    word = *reinterpret_cast<const uint4*>(rows + at(v) * Vec<T>::size);
                }
                reinterpret_cast<uint4&>(tile[r][v]) = word;
            }
        }
    }
    // The same on their way into shared memory, vector v of row r to slot r · V + v, with zeros past the end.
    template <typename T, int THREADS>
    __device__ void fetch(const Slots<T, THREADS>& slots, const T* rows, int64_t step) const {
        constexpr int V = SHORT_VECTORS<T, ROWS>;
        rows += row * step;
#pragma unroll
        for (int r = 0; r < ROWS; ++r, rows += apart * step) {
            slots.template fetch<true, V>(r * V, rows, Rows{}, *this, live(r), length);
        }
    }
    // The v-th vector of what all rows have in common, `absent` where there is none.
    template <typename T>
    __device__ Vec<T> parameter(const T* from, int v, float absent) const {
        uint4 word = filled<T>(absent);
        load_if<false>(word, from + at(v) * Vec<T>::size, from != nullptr && has<T>(v, length));
        return reinterpret_cast<const Vec<T>&>(word);
    }
    // The v-th vector of the r-th row. `first`: where this thread's first row begins.
    template <typename T>
    __device__ void store(T* first, int64_t step, int r, int v, const Vec<T>& part) const {
        if (live(r) && has<T>(v, length)) store_vec(first + r * apart * step + at(v) * Vec<T>::size, part);
    }
};

// The result of `op` over so many neighbouring lanes, a power of two, for each of several rows.
template <int ROWS, typename V, typename Op>
__device__ void each_over_lanes(V (&values)[ROWS], Op op, int lanes) {
#pragma unroll
    for (int l = WARP / 2; l > 0; l /= 2) {
        if (l >= lanes) continue;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) values[r] = op(values[r], shuffle_xor(values[r], l));
    }
}

// ---- host ----------------------------------------------------------------------------------------------------------

// Whether rows of so many elements are short, of operands that lie so. `whole`: of whole vectors, on 16 bytes.
template <typename... R>
bool are_short(int64_t length, bool whole, const R&... operands) {
    return whole && length <= SHORT_LENGTH && (operands.even() && ...);
}

// Calls f(rows of a thread as a constant, grid, block) for `count` short rows.
template <typename T, typename F>
void with_short_rows(int64_t count, int64_t length, F&& f) {
    const auto run = [&](auto rows) {
        const unsigned lanes = row_threads(length / Vec<T>::size, SHORT_VECTORS<T, rows()>, WARP);
        const unsigned apart = MIN_BLOCK / lanes;
        f(rows, grid_size(ceil_div(count, int64_t{rows()} * apart)), dim3(lanes, apart));
    };
    if (length <= SHORT_LENGTH / SHORT_ROWS) return run(std::integral_constant<int, SHORT_ROWS>{});
    if (length <= SHORT_LENGTH / 2) return run(std::integral_constant<int, 2>{});
    run(std::integral_constant<int, 1>{});
}

}  // namespace kl
