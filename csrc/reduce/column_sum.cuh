// Column sums: the gradient of an operand that is broadcast over rows. Two stages of fixed order make the result the
// same in every run. Each block sums a group of rows, then a second kernel sums these partials.
//
//             columns →                stage one                     stage two
//   rows      ┌───────────┐
//    ↓        │ group 0   │   ──►   partials[0, columns]  ┐
//             ├───────────┤                               │
//             │ group 1   │   ──►   partials[1, columns]  ├──►   output[columns]
//             ├───────────┤                               │
//             │ …         │   ──►   …                     ┘
//             └───────────┘
#pragma once

#include "core/pdl.cuh"

namespace kl {

constexpr int SUM_LANES = 32;  // stage two: columns of a block, and most threads that share a column
constexpr int SUM_THREADS = SUM_LANES * SUM_LANES;
constexpr int SUM_AT_ONCE = 4;         // loads in flight per thread: with 32 warps, more only adds instructions
constexpr int64_t SUM_WAVE = 1 << 17;  // threads that any GPU runs at once

/// output[c] = Σ partials[g, c] over groups g of rows, on a grid of blocks_of_columns(columns) blocks of sum_block(columns).
/// Each operation has its own kernel around this function, so that a profile tells them apart.
template <typename T>
__device__ void sum_partials(T* output, const float* partials, int64_t groups, int64_t columns) {
    __shared__ float sums[SUM_LANES][SUM_LANES + 1];
    const int64_t column = int64_t{blockIdx.x} * SUM_LANES + threadIdx.x;
    float sum = 0.0f;
    if (column < columns) {
        const int lanes = static_cast<int>(blockDim.y);
        const int64_t step = lanes * columns;
        int left = static_cast<int>(groups) - static_cast<int>(threadIdx.y);  // groups from here on
        const float* partial = partials + threadIdx.y * columns + column;
        for (; left > (SUM_AT_ONCE - 1) * lanes; left -= SUM_AT_ONCE * lanes) {
            float some[SUM_AT_ONCE];
#pragma unroll
            for (int i = 0; i < SUM_AT_ONCE; ++i, partial += step) some[i] = *partial;
#pragma unroll
            for (int i = 0; i < SUM_AT_ONCE; ++i) sum += some[i];
        }
#pragma unroll 1
        for (; left > 0; left -= lanes, partial += step) sum += *partial;
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    for (unsigned of_block = threadIdx.y; of_block < SUM_LANES; of_block += blockDim.y) {  // a warp a column
        sum = warp_reduce(threadIdx.x < blockDim.y ? sums[threadIdx.x][of_block] : 0.0f, Sum{});
        const int64_t mine = int64_t{blockIdx.x} * SUM_LANES + of_block;
        if (threadIdx.x == 0 && mine < columns) output[mine] = from_float<T>(sum);
    }
}

/// End of stage one: sums the E columns of each thread over threadIdx.y and stores them as the group's row of the
/// partials. `sums` is shared memory for one float per thread and column.
template <int E>
__device__ void store_partial(float* partials, const float (&sum)[E], float* sums, int64_t columns) {
    const int width = static_cast<int>(blockDim.x) * E, threads = static_cast<int>(blockDim.x * blockDim.y);
#pragma unroll
    for (int e = 0; e < E; ++e) sums[threadIdx.y * width + threadIdx.x * E + e] = sum[e];
    __syncthreads();
    for (int place = threadIdx.y * blockDim.x + threadIdx.x; place < width; place += threads) {
        const int64_t column = int64_t{blockIdx.x} * width + place;
        if (column >= columns) return;
        float total = 0.0f;
        for (unsigned stripe = 0; stripe < blockDim.y; ++stripe) total += sums[stripe * width + place];
        partials[column] = total;
    }
}

// Blocks of stage one. Up to 256 threads lie along the columns: their loads cover 4 KiB of a row. The other threads take
// further rows.
inline dim3 column_block(int64_t chunks, unsigned threads) {
    unsigned lanes = WARP;
    while (lanes < threads && lanes < 256 && lanes < chunks) lanes *= 2;
    return dim3(lanes, threads / lanes);
}

// Blocks of stage two: many columns get fewer threads each, so that all of them run at once.
inline dim3 sum_block(int64_t columns) {
    unsigned lanes = SUM_LANES;
    while (lanes > 4 && columns * lanes > SUM_WAVE) lanes /= 2;
    return dim3(SUM_LANES, lanes);
}
inline unsigned blocks_of_columns(int64_t columns) { return grid_size(ceil_div(columns, SUM_LANES)); }

// Groups of rows that keep every SM busy with `column_blocks` blocks each: two waves, so that the tail is short. A group
// has at least `least` rows.
inline int64_t row_groups(int64_t rows, int64_t column_blocks, int blocks_per_sm, int64_t least, int32_t device) {
    const int64_t wanted = int64_t{2} * multiprocessors(device) * blocks_per_sm / column_blocks;
    return std::max<int64_t>(1, std::min(wanted, ceil_div(rows, least)));
}

}  // namespace kl
