// Short rows: a warp holds several, or the whole of one; or a block is a team, whose threads share a few. Instructions
// bound them, so a row's place follows from the one before by an addition: rows lie evenly apart and consist of whole
// vectors.
#pragma once

#include <tuple>
#include <type_traits>

#include "sm90/smem_stages.cuh"

namespace kl {

constexpr int SHORT_VALUES = 32;                   // a thread holds
constexpr int SHORT_LENGTH = SHORT_VALUES * WARP;  // of the longest row that a warp can hold, in elements
constexpr int SHORT_ROWS = 4;                      // of a thread at most, and where a row may not need a whole warp
constexpr int THREADS_AN_SM = 1024;                // that it is to have room for, of 64 registers
constexpr int SHORT_BLOCKS = THREADS_AN_SM / MIN_BLOCK;

// Vectors that a thread holds of each of so many rows.
template <typename T, int ROWS>
constexpr int SHORT_VECTORS = SHORT_VALUES / Vec<T>::size / ROWS;

// A block that shares rows of more than LONGER_THAN elements and of at most UP_TO, of 16 bits each: a thread holds VECTORS_
// of each of ROWS_, and so reads what they have in common once for all.
template <int ROWS_, int VECTORS_, int LONGER_THAN, int UP_TO>
struct Team {
    static constexpr int ROWS = ROWS_, VECTORS = VECTORS_, THREADS = UP_TO / (VECTORS_ * 8);
    static_assert(LONGER_THAN >= VECTORS * 8 * WARP / 2, "a team is of whole warps");
    static constexpr bool takes(int64_t length) { return LONGER_THAN < length && length <= UP_TO; }
};

// 16 bytes, where `inside`. Made whether they are stored or not, for which no branch is needed; and stored by one instruction,
// where the compiler takes apart into four what it may leave out.
template <typename T>
__device__ void store_if(T* to, const Vec<T>& part, bool inside) {
    uint4 word = reinterpret_cast<const uint4&>(part);
    asm volatile("" : "+r"(word.x), "+r"(word.y), "+r"(word.z), "+r"(word.w));
    if (inside) {
        asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(word.x), "r"(word.y), "r"(word.z),
                     "r"(word.w)
                     : "memory");
    }
}

// Which rows and vectors are this thread's. blockDim.x threads share a row, a whole warp unless a thread has SHORT_ROWS,
// and take every blockDim.y-th row of the block's. In a TEAM all threads share all rows.
template <int ROWS, bool TEAM = false>
struct ShortShare {
    int lane = threadIdx.x, lanes = ROWS < SHORT_ROWS && !TEAM ? WARP : blockDim.x, apart = TEAM ? 1 : blockDim.y;
    int64_t row = int64_t{blockIdx.x} * (ROWS * apart) + (TEAM ? 0 : threadIdx.y);
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

    // Where this thread's v-th vector of its first row lies, of rows `step` elements apart; and how far on that of the next.
    template <typename T>
    __device__ T* begin(T* rows, int64_t step, int v = 0) const {
        return rows + row * step + at(v) * Vec<std::remove_const_t<T>>::size;
    }
    __device__ int64_t next(int64_t step) const { return apart * step; }

    // This thread's vectors of its rows, `step` elements from row to row. `fill` stands past a row's end, and for a row
    // that is not there.
    template <typename T, int V>
    __device__ void load(Vec<T> (&tile)[ROWS][V], const T* rows, int64_t step, float fill) const {
        const T* from = begin(rows, step);
#pragma unroll
        for (int r = 0; r < ROWS; ++r, from += next(step)) {
#pragma unroll
            for (int v = 0; v < V; ++v) {
                uint4 word = filled<T>(fill);
                // Without a branch (&&), on the other side of which ptxas uses what was loaded before it loads the rest.
                if (live(r) & has<T>(v, length)) {
                    word = *once(reinterpret_cast<const uint4*>(from + v * lanes * Vec<T>::size));
                }
                reinterpret_cast<uint4&>(tile[r][v]) = word;
            }
        }
    }
    // The same on their way into shared memory, vector v of row r to slot r · V + v, with zeros past the end.
    template <int V, typename T, int THREADS, bool ONCE>
    __device__ void fetch(const Slots<T, THREADS, ONCE>& slots, const T* rows, int64_t step) const {
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
    // The v-th vector of the r-th row, which lies at `to`.
    template <typename T>
    __device__ void store(T* to, int r, int v, const Vec<T>& part) const {
        store_if(to, part, live(r) && has<T>(v, length));
    }
};

// By selects: a compiler that is left the choice of two of an array's elements chooses between their places.
__device__ inline float chosen(bool first, float a, float b) { return first ? a : b; }
__device__ inline Pair chosen(bool first, const Pair& a, const Pair& b) {
    return {first ? a.first : b.first, first ? a.second : b.second};
}

// Of several rows' values that which is this lane's to finish: of so many neighbouring lanes each ROWS-th part takes a row,
// in order. What is exchanged halves each time, so that four rows cost three exchanges where they would cost eight.
template <int ROWS, typename V, typename Op>
__device__ V own_over_lanes(const V (&values)[ROWS], Op op, int lanes) {
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
        if constexpr (HALF > 1) return own_over_lanes(kept, op, lanes / 2);
        value = kept[0];
        lanes /= 2;
    }
#pragma unroll
    for (int l = WARP / 2; l > 0; l /= 2) {
        if (l < lanes) value = op(value, shuffle_xor(value, l));
    }
    return value;
}

// The result of `op` over so many neighbouring lanes, a power of two not under ROWS, for each of several rows.
template <int ROWS, typename V, typename Op>
__device__ void each_over_lanes(V (&values)[ROWS], Op op, int lanes) {
    const V own = own_over_lanes(values, op, lanes);
    uint32_t lane;
    asm("mov.u32 %0, %%laneid;" : "=r"(lane));
    const int first = static_cast<int>(lane) & -lanes;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) values[r] = ROWS == 1 ? own : shuffle_from(own, first + r * (lanes / ROWS));
}

// The same over all threads of a team. Every reduction has slots of its own in shared memory.
template <int ROWS, typename V>
struct TeamSlots {
    V slots[ROWS * WARP];  // of as many warps as a block can have
};
template <typename V>
struct TeamSlots<0, V> {};
template <int ROWS, typename V, typename Op>
__device__ void each_over_team(V (&values)[ROWS], Op op, V* slots) {
    const int lane = threadIdx.x % WARP, count = ROWS * static_cast<int>(blockDim.x / WARP);
    const V own = own_over_lanes(values, op, WARP);
    if (lane % (WARP / ROWS) == 0) slots[threadIdx.x / (WARP / ROWS)] = own;
    __syncthreads();
    V total = slots[lane & (count - 1)];
    if (count > WARP) total = op(total, slots[lane + WARP]);
#pragma unroll
    for (int l = WARP / 2; l >= ROWS; l /= 2) {
        if (l < count) total = op(total, shuffle_xor(total, l));
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) values[r] = ROWS == 1 ? total : shuffle_from(total, r);
}

template <int ROWS, bool TEAM, typename V, typename Op, typename S>
__device__ void each_over_rows(V (&values)[ROWS], Op op, const ShortShare<ROWS, TEAM>& share, S& slots) {
    if constexpr (TEAM) each_over_team(values, op, slots.slots);
    if constexpr (!TEAM) each_over_lanes(values, op, share.lanes);
}

// ---- host ----------------------------------------------------------------------------------------------------------

// Whether rows lie as they must, of these operands. `whole`: of whole vectors, on 16 bytes.
template <typename... R>
bool are_even(bool whole, const R&... operands) {
    return whole && (operands.even() && ...);
}

// Calls f(team, grid, block) for `count` rows of elements of type T with the first of the TEAMS that takes their length.
// Returns whether there was one.
template <typename T, typename... TEAMS, typename F>
bool with_team(std::tuple<TEAMS...> teams, int64_t count, int64_t length, F&& f) {
    const auto run = [&](auto team) {
        if constexpr (sizeof(T) == 2) {
            if (!team.takes(length)) return false;
            f(team, grid_size(ceil_div(count, team.ROWS)),
              dim3(row_threads(length / Vec<T>::size, team.VECTORS, team.THREADS)));
            return true;
        }
        return false;
    };
    return std::apply([&](auto... each) { return (run(each) || ...); }, teams);
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

// Of rows that lie evenly: calls `by_team` as with_team does, or for short ones that no team takes `by_rows` as
// with_short_rows does. Returns whether either has been called.
template <typename T, typename TEAMS, typename F, typename G>
bool with_even_rows(TEAMS teams, int64_t count, int64_t length, F&& by_team, G&& by_rows) {
    if (with_team<T>(teams, count, length, by_team)) return true;
    if (length > SHORT_LENGTH) return false;
    with_short_rows<T>(count, length, by_rows);
    return true;
}

}  // namespace kl
