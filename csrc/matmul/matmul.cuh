// Matrix product, C[m, n] = Σ_k A[m, k] · B[k, n], with the shapes of torch.matmul: what every rung shares.
//
//   rung              the one idea it adds                                   what limits it now
//   naive             one thread per output                                  a warp's loads fall on 32 cache lines
//   coalesced         the threads of a warp run along N                      every operand element comes from L1 or L2
//   tiled             a block shares tiles of A and B in shared memory       two shared loads per multiply-add
//   thread_tile       8×8 outputs per thread                                 load instructions of 4 bytes
//   vectorized        loads of 16 bytes, A transposed in shared memory       latency of the next tile's loads
//   double_buffered   two stages: load the next tile while multiplying       shared loads, tiles of 8 k
//   registers         8×16 outputs per thread, fragments and tiles ahead     the rate of the float32 units
//   mma               tensor cores, fed by a cp.async pipeline and ldmatrix  mma.sync: Hopper's full rate needs wgmma
//   wgmma             Hopper's tensor cores, fed by TMA from shared memory   all warps wait for all, at every stage
//   registers_tma     `registers` with TMA, float32                          the rate of the float32 units
//   warp_specialized  one warp loads, two warpgroups multiply                each block reads from L2 for itself
//   cluster           two blocks share what both read, by TMA multicast      tensor cores idle as a block starts, ends
//   persistent        blocks stay; loads run ahead into the next tile        few tiles leave SMs idle
//   stream_k          the last waves' k-tiles, not tiles, are distributed    blocks that wait for partial sums
//   skinny            at most 16 rows: `other` straight to tensor cores      reading it; few columns leave SMs idle
//   split_k           where tiles are few, a cluster shares the K of one     tiles that do not fill the last wave
//
// All sum in float32 and round once. The three rungs after `tiled` take the plain case only (plain_case.cuh). The
// others read operands where they lie: any strides, batches broadcast by zero strides. From wgmma on the rungs need
// compute capability 9.0 (skinny: 8.0) and share hopper.cuh.
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

// A checked call: the product, and its output, allocated or given.
struct Call {
    Product product;
    Tensor output;
};

// Reads shapes as torch.matmul does: a 1-D `input` is one row, a 1-D `other` one column, and the output lacks that
// dimension; batch dimensions broadcast. Where `transposed`, `other` is a matrix (N, K). Raises unless the operands
// fit, so that no kernel reads out of bounds; the messages name them `other_name` and `input` of `op`.
Call prepare(const Tensor& input, const Tensor& other, bool transposed = false, const char* op = "matmul",
             const char* other_name = "other");

// The same of two matrices and an output that is given, of any dtype: M rows of N columns side by side, and `padding`
// columns more at most, which nobody reads.
Call prepare_into(const Tensor& output, const Tensor& input, const Tensor& other, const char* op, int64_t padding = 0);

// `mma`'s and `registers`'s kernels, and those that add to the output instead of writing it. The output is dense: `mma`
// adds to float16 or bfloat16 operands' sums of float32 or of their own dtype, `registers` to float32 alone.
void multiply_mma(const Call& call, const Tensor& input, const Tensor& other, bool allow_tf32, const char* op);
void add_mma(const Call& call, const Tensor& input, const Tensor& other, bool allow_tf32, const char* op);
void multiply_registers(const Call& call, const Tensor& input, const Tensor& other);
void add_registers(const Call& call, const Tensor& input, const Tensor& other);

}  // namespace kl
