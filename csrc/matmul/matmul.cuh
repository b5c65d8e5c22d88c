// Matrix product, C[m, n] = Σ_k A[m, k] · B[k, n], with the shapes of torch.matmul: what every step of the climb
// shares.
//
//   variant           the one idea it adds                                   what limits it now
//   naive             one thread per output                                  a warp's loads fall on 32 cache lines
//   coalesced         the threads of a warp run along N                      every operand element comes from L1 or L2
//   tiled             a block shares tiles of A and B through shared memory  two shared loads per multiply-add
//   registers         8×16 outputs per thread, fragments and tiles ahead     the rate of the float32 units
//   mma               tensor cores, fed by a cp.async pipeline and ldmatrix  mma.sync: Hopper's full rate needs wgmma
//   wgmma             Hopper's tensor cores, fed by TMA from shared memory   all warps wait for all, at every stage
//   warp_specialized  one warp loads, two warpgroups multiply                each block reads from L2 for itself
//   cluster           two blocks share what both read, by TMA multicast      idle tensor cores as a block begins, ends
//   persistent        blocks stay; loading runs ahead into the next tile     few tiles leave SMs idle
//   stream_k          the last turns' k-tiles, not tiles, are shared out     parts that wait for each other
//   split_k           where tiles are few, a cluster shares the K of one     tiles that do not fill the last turn
//   skinny            at most 16 rows: `other` straight to tensor cores      reading it; few columns leave SMs idle
//
// All sum in float32 and round once. Operands are read where they lie: any strides, batches broadcast by zero strides.
// From wgmma on the steps need compute capability 9.0, and share hopper.cuh.
#pragma once

#include "core/common.cuh"
#include "core/ops.h"

namespace kl {

// A batched product in terms of memory. Element (m, k) of A lies at a + a_batch + m · a_m + k · a_k, and so on; the
// output is dense. Strides count elements.
struct Product {
    int64_t M, N, K;
    int64_t a_m, a_k;
    int64_t b_k, b_n;
    int64_t batches;
    int batch_dims;  // of those that do not collapse into their neighbour
    int64_t batch_sizes[MAX_DIMS], a_batch[MAX_DIMS], b_batch[MAX_DIMS];

    // Where batch number `index` of A and of B begins.
    __device__ void batch_offsets(int64_t index, int64_t* a, int64_t* b) const {
        *a = *b = 0;
#pragma unroll 1  // as in Strided::offset
        for (int d = batch_dims - 1; d >= 0; --d) {
            const int64_t i = index % batch_sizes[d];
            index /= batch_sizes[d];
            *a += i * a_batch[d];
            *b += i * b_batch[d];
        }
    }
};

// A checked call: the product, and its output, allocated.
struct Call {
    Product product;
    Tensor output;
};

// Reads shapes as torch.matmul does: a 1-D `input` is one row, a 1-D `other` one column, and the output lacks that
// dimension; batch dimensions broadcast. Where `transposed`, `other` is a matrix (N, K). Raises unless the operands fit,
// so that no kernel reads out of bounds; the messages name them `other_name` and `input` of `op`.
Call prepare(const Tensor& input, const Tensor& other, bool transposed = false, const char* op = "matmul",
             const char* other_name = "other");

}  // namespace kl
