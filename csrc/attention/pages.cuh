// Keys and values that lie in pages: where those of a sequence are, and how a warp copies a tile of them.
#pragma once

#include "attention/tile.cuh"
#include "core/divisor.cuh"

namespace kl {

/// Keys or values: element (page, row of the page, head, column). Strides count elements.
template <typename T>
struct Cache {
    const T* data;
    int64_t page, row, head, column;
    bool whole;  // rows consist of aligned vectors of 16 bytes
};

/// The pages of every sequence. Numbers that are outside the cache, and lengths that the table cannot hold, are clamped.
struct Pages {
    const int32_t *table, *lengths;
    int64_t sequence, column, length;  // strides
    int count, capacity;               // pages of the cache; keys that a row of the table holds
    Divisor by_size;

    __device__ int of(int64_t batch, int key) const {
        return min(max(table[batch * sequence + by_size.quotient(key) * column], 0), count - 1);
    }
};

template <typename T>
Cache<T> make_cache(const Tensor& tensor) {
    const auto strides = tensor.strides();
    Cache<T> cache{static_cast<const T*>(tensor.data_ptr()), strides[0], strides[1], strides[2], strides[3], false};
    cache.whole = cache.column == 1 && tensor.size(3) % Vec<T>::size == 0 && is_aligned16(cache.data);
    // A dimension of one element may have any stride.
    for (int d = 0; d < 3; ++d) cache.whole = cache.whole && (tensor.size(d) == 1 || strides[d] % Vec<T>::size == 0);
    return cache;
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

/// Copies the keys `key0` … of one head to a tile. Lane r of the warp knows the page of row r. All lanes call it.
template <int ROWS, int HEAD_DIM, typename T>
__device__ void load_paged_tile(uint32_t shared, const Cache<T>& cache, const T* head, const Divisor& by_size, int page,
                                int key0, int rows_left, int columns) {
    constexpr int CHUNKS = HEAD_DIM / 8, STEP = WARP / CHUNKS;  // rows per iteration
    const int lane = threadIdx.x % WARP, chunk = lane % CHUNKS;
    const auto source = [&](int row) {
        return head + __shfl_sync(FULL_MASK, page, row) * cache.page + by_size.remainder(key0 + row) * cache.row;
    };
    if (cache.whole) {
#pragma unroll
        for (int i = 0; i < ROWS / STEP; ++i) {
            const int row = lane / CHUNKS + i * STEP;
            const T* p = source(row) + chunk * 8;
            cp_async16_if(shared + tile_offset<HEAD_DIM>(row, chunk), p, row < rows_left && chunk * 8 < columns);
        }
        return;
    }
#pragma unroll 1
    for (int i = 0; i < ROWS / STEP; ++i) {
        const int row = lane / CHUNKS + i * STEP;
        const T* p = source(row);
        Vec<T> v;
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            const int column = chunk * 8 + e;
            v[e] = row < rows_left && column < columns ? p[column * cache.column] : from_float<T>(0.0f);
        }
        store_shared16(shared + tile_offset<HEAD_DIM>(row, chunk), *reinterpret_cast<const uint4*>(&v));
    }
}

#endif

}  // namespace kl
