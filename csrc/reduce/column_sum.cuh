// Sums over rows, one a column: the gradient of what is broadcast over rows. In two stages, each in a fixed order, so that
// the result is the same in every run: blocks add up a share of the rows each, then a second kernel adds up the shares.
#pragma once

#include "core/pdl.cuh"

namespace kl {

constexpr int SUM_LANES = 32;  // columns of a block, of the second stage, and threads that share one at most
constexpr int SUM_THREADS = SUM_LANES * SUM_LANES;
constexpr int SUM_AT_ONCE = 4;         // loads of a thread: more would be more instructions, for which 32 warps queue
constexpr int64_t SUM_WAVE = 1 << 17;  // threads that surely run at once

// output[c] = Σ partials[s, c] over shares s, by a grid of blocks_of_columns(columns) blocks of sum_block(columns). Each
// operation has a kernel of its own that does this, so that a profile tells them apart.
template <typename T>
__device__ void sum_shares(T* output, const float* partials, int64_t shares, int64_t columns) {
    __shared__ float sums[SUM_LANES][SUM_LANES + 1];
    const int64_t column = int64_t{blockIdx.x} * SUM_LANES + threadIdx.x;
    float sum = 0.0f;
    if (column < columns) {
        const int lanes = static_cast<int>(blockDim.y);
        const int64_t step = lanes * columns;
        int left = static_cast<int>(shares) - static_cast<int>(threadIdx.y);  // from this one on
        const float* share = partials + threadIdx.y * columns + column;
        for (; left > (SUM_AT_ONCE - 1) * lanes; left -= SUM_AT_ONCE * lanes) {
            float some[SUM_AT_ONCE];
#pragma unroll
            for (int i = 0; i < SUM_AT_ONCE; ++i, share += step) some[i] = *share;
#pragma unroll
            for (int i = 0; i < SUM_AT_ONCE; ++i) sum += some[i];
        }
#pragma unroll 1
        for (; left > 0; left -= lanes, share += step) sum += *share;
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    for (unsigned of_block = threadIdx.y; of_block < SUM_LANES; of_block += blockDim.y) {  // a warp a column
        sum = warp_reduce(threadIdx.x < blockDim.y ? sums[threadIdx.x][of_block] : 0.0f, Sum{});
        const int64_t mine = int64_t{blockIdx.x} * SUM_LANES + of_block;
        if (threadIdx.x == 0 && mine < columns) output[mine] = from_float<T>(sum);
    }
}

// Stage one's end: what a block's threads have summed of their E columns each, over its stripes (threadIdx.y), goes to the
// share's row of the partials. `sums` holds a float for each thread and column.
template <int E>
__device__ void store_share(float* partials, const float (&sum)[E], float* sums, int64_t columns) {
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
// Its blocks: as many threads along the columns as there is work for, up to rows' runs of 4 KiB, which is what memory
// likes; the others go down the rows.
inline dim3 column_block(int64_t chunks, unsigned threads) {
    unsigned lanes = WARP;
    while (lanes < threads && lanes < 256 && lanes < chunks) lanes *= 2;
    return dim3(lanes, threads / lanes);
}

// Of many columns each has fewer threads, so that they all run at once.
inline dim3 sum_block(int64_t columns) {
    unsigned lanes = SUM_LANES;
    while (lanes > 4 && columns * lanes > SUM_WAVE) lanes /= 2;
    return dim3(SUM_LANES, lanes);
}
inline unsigned blocks_of_columns(int64_t columns) { return grid_size(ceil_div(columns, SUM_LANES)); }

// How many shares of the rows keep every multiprocessor busy, at `blocks_per_sm` blocks and `column_blocks` blocks side by
// side: twice what runs at once, so that the last ones do not run alone for long; and no share under `least` rows.
inline int64_t row_shares(int64_t rows, int64_t column_blocks, int blocks_per_sm, int64_t least, int32_t device) {
    const int64_t wanted = int64_t{2} * multiprocessors(device) * blocks_per_sm / column_blocks;
    return std::max<int64_t>(1, std::min(wanted, ceil_div(rows, least)));
}

}  // namespace kl
