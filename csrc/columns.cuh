// Sums over rows, one a column: the gradient of what is broadcast over rows. In two stages, each in a fixed order, so that
// the result is the same in every run: blocks add up a share of the rows each, then a second kernel adds up the shares.
#pragma once

#include "common.cuh"

namespace kl {

constexpr int SUM_LANES = 32;  // columns of a block, of the second stage, and threads that share one
constexpr int SUM_THREADS = SUM_LANES * SUM_LANES;

// output[c] = Σ partials[s, c] over shares s, by a grid of blocks_of_columns(columns) blocks of sum_block(). Each
// operation has a kernel of its own that does this, so that a profile tells them apart.
template <typename T>
__device__ void sum_shares(T* output, const float* partials, int64_t shares, int64_t columns) {
    __shared__ float sums[SUM_LANES][SUM_LANES + 1];
    const int64_t column = int64_t{blockIdx.x} * SUM_LANES + threadIdx.x;
    float sum = 0.0f;
    if (column < columns) {
        for (int64_t s = threadIdx.y; s < shares; s += SUM_LANES) sum += partials[s * columns + column];
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    sum = warp_reduce(sums[threadIdx.x][threadIdx.y], Sum{});  // a warp a column
    const int64_t mine = int64_t{blockIdx.x} * SUM_LANES + threadIdx.y;
    if (threadIdx.x == 0 && mine < columns) output[mine] = from_float<T>(sum);
}

inline dim3 sum_block() { return dim3(SUM_LANES, SUM_LANES); }
inline unsigned blocks_of_columns(int64_t columns) { return grid_size(ceil_div(columns, SUM_LANES)); }

// How many shares of the rows keep every multiprocessor busy, at `blocks_per_sm` blocks and `column_blocks` blocks side by
// side: twice what runs at once, so that the last ones do not run alone for long; and no share under `least` rows.
inline int64_t row_shares(int64_t rows, int64_t column_blocks, int blocks_per_sm, int64_t least, int32_t device) {
    const int64_t wanted = int64_t{2} * multiprocessors(device) * blocks_per_sm / column_blocks;
    return std::max<int64_t>(1, std::min(wanted, ceil_div(rows, least)));
}

}  // namespace kl
