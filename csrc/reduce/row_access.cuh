// Rows of a tensor along one dimension, and loads and stores of 16 bytes of a row. Rows may begin anywhere: the accesses
// that memory sees are aligned vectors of 16 bytes even so, except at a row's ends.
//
//   memory, vectors of 16 bytes  │0              │8              │16             │
//   a row that begins at 3             │first = 0      │first = 8      │
//   load_chunk(first = 8)                        ├─ aligned load ├─ aligned load ┤ joined()
#pragma once

#include "core/common.cuh"

namespace kl {

// The rows of one operand: the start of each, and the stride of its elements.
struct Rows {
    Strided walk;
    int64_t stride;
    bool whole;  // rows are dense and start on 16 bytes, so that 16-byte loads and stores are allowed

    __device__ int64_t start(int64_t row) const { return walk.offset(row); }

    // Whether one stride leads from each row to the next, and that stride in elements.
    bool even() const { return walk.dims <= 1; }
    __host__ __device__ int64_t step() const { return walk.dims > 0 ? walk.strides[0] : 0; }

    // Whether rows of this length consist of whole 16-byte vectors.
    template <typename T>
    bool vectors(int64_t length) const {
        return whole && length % Vec<T>::size == 0;
    }
};

// The 16 bytes that begin `bytes` after the first of two adjacent vectors.
__device__ inline uint4 joined(uint4 low, uint4 high, unsigned bytes) {
    uint32_t w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 6; ++i) w[i] = bytes & 8 ? w[i + 2] : w[i];
#pragma unroll
    for (int i = 0; i < 5; ++i) w[i] = bytes & 4 ? w[i + 1] : w[i];
    const unsigned bits = bytes % 4 * 8;
    return {__funnelshift_r(w[0], w[1], bits), __funnelshift_r(w[1], w[2], bits), __funnelshift_r(w[2], w[3], bits),
            __funnelshift_r(w[3], w[4], bits)};
}

// Elements between `row` and the multiple of 16 bytes before it, or 0 if `other` has another number of them. Vectors that
// are counted from that address are aligned in both rows. The first one may begin before the row does.
template <typename T>
__device__ int past_vector(const T* row, const T* other) {
    const auto of_row = reinterpret_cast<uintptr_t>(row) % 16, of_other = reinterpret_cast<uintptr_t>(other) % 16;
    return of_row == of_other ? static_cast<int>(of_row / sizeof(T)) : 0;
}

// Whether 16 bytes from element `first` on are an aligned vector of the row.
template <typename T>
__device__ bool is_vector(const T* row, const Rows& rows, int64_t first, int64_t length) {
    if (first + Vec<T>::size > length) return false;
    return rows.whole || (rows.stride == 1 && first >= 0 && reinterpret_cast<uintptr_t>(row + first) % 16 == 0);
}

// Loads 16 bytes of a row from element `first` on: an aligned vector, or its elements. Those before the row's start and
// past its end are `fill`.
template <typename T>
__device__ Vec<T> load_vector(const T* row, const Rows& rows, int64_t first, int64_t length, float fill) {
    if (is_vector(row, rows, first, length)) return load_vec(row + first);
    Vec<T> v;
#pragma unroll
    for (int e = 0; e < Vec<T>::size; ++e) {
        const int64_t i = first + e;
        v[e] = 0 <= i && i < length ? row[i * rows.stride] : from_float<T>(fill);
    }
    return v;
}

template <typename T>
__device__ void store_vector(T* row, const Rows& rows, const Vec<T>& v, int64_t first, int64_t length) {
    if (is_vector(row, rows, first, length)) return store_vec(row + first, v);
#pragma unroll
    for (int e = 0; e < Vec<T>::size; ++e) {
        const int64_t i = first + e;
        if (0 <= i && i < length) row[i * rows.stride] = v[e];
    }
}

// The same where vectors are counted from the row's start, wherever that is. A dense row that begins off 16 bytes is read by
// two aligned loads per vector. Its ends are read element by element, so that no other row is touched.
template <typename T>
__device__ Vec<T> load_chunk(const T* row, const Rows& rows, int64_t first, int64_t length, float fill) {
    constexpr int SIZE = Vec<T>::size;
    if (rows.whole || rows.stride != 1 || first < SIZE || first + 2 * SIZE > length) {
        return load_vector(row, rows, first, length, fill);
    }
    const auto address = reinterpret_cast<uintptr_t>(row + first);
    const auto* aligned = reinterpret_cast<const uint4*>(address & ~uintptr_t{15});
    Vec<T> v;
    reinterpret_cast<uint4&>(v) = joined(aligned[0], aligned[1], address % 16);
    return v;
}

// Stores 16 bytes of a dense row that begins anywhere. The next lane holds the 16 bytes after this lane's own. This lane
// stores one aligned vector: the end of its own 16 bytes, then the start of the next lane's. Elements without such a
// neighbour are stored one by one.
template <typename T>
__device__ void store_beside_neighbours(T* row, const Vec<T>& v, int64_t first, int64_t length) {
    constexpr int SIZE = Vec<T>::size;
    const unsigned active = __activemask(), lane = threadIdx.x % WARP;
    const auto address = reinterpret_cast<uintptr_t>(row + first);
    const uint4 mine = reinterpret_cast<const uint4&>(v);
    const uint4 next{__shfl_down_sync(active, mine.x, 1), __shfl_down_sync(active, mine.y, 1),
                     __shfl_down_sync(active, mine.z, 1), __shfl_down_sync(active, mine.w, 1)};
    const auto next_address = __shfl_down_sync(active, static_cast<unsigned long long>(address), 1);
    const int start = static_cast<int>(-address % 16 / sizeof(T));  // elements before the first aligned one
    const bool with_next = lane + 1 < WARP && (active >> (lane + 1)) % 2 == 1 && next_address == address + 16 &&
                           first + SIZE + start <= length;
    const bool previous = __shfl_up_sync(active, with_next, 1);
    const bool with_previous = lane > 0 && (active >> (lane - 1)) % 2 == 1 && previous;
    if (with_next) {
        const unsigned bytes = start * sizeof(T);
        *reinterpret_cast<uint4*>(address + bytes) = joined(mine, next, bytes);
    }
#pragma unroll
    for (int e = 0; e < SIZE; ++e) {
        if ((e < start ? !with_previous : !with_next) && first + e < length) row[first + e] = v[e];
    }
}

template <typename T>
__device__ void store_chunk(T* row, const Rows& rows, const Vec<T>& v, int64_t first, int64_t length) {
    if (rows.whole || rows.stride != 1) return store_vector(row, rows, v, first, length);
    store_beside_neighbours(row, v, first, length);
}

}  // namespace kl
