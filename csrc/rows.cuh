// Rows: one dimension of a tensor, taken as a whole by threads that share it. Where rows lie, how a thread reads its part
// of one, and how those that share a row agree on a sum or a maximum: within a warp, a block, or a cluster of blocks.
#pragma once

#include <cooperative_groups.h>

#include "common.cuh"

namespace kl {

// The rows of one operand: where each starts, and how far apart its elements lie.
struct Rows {
    Strided walk;
    int64_t stride;
    bool whole;  // rows are dense and start on 16 bytes: vectors can be loaded and stored whole

    __device__ int64_t start(int64_t row) const { return walk.offset(row); }

    // Whether rows of this length consist of such vectors alone.
    template <typename T>
    bool vectors(int64_t length) const {
        return whole && length % Vec<T>::size == 0;
    }
};

// 16 bytes of a row from element `first` on; `fill` stands past its end.
template <typename T>
__device__ Vec<T> load_chunk(const T* row, const Rows& rows, int64_t first, int64_t length, float fill) {
    if (rows.whole && first + Vec<T>::size <= length) return load_vec(row + first);
    Vec<T> v;
#pragma unroll
    for (int e = 0; e < Vec<T>::size; ++e) {
        v[e] = first + e < length ? row[(first + e) * rows.stride] : from_float<T>(fill);
    }
    return v;
}

template <typename T>
__device__ void store_chunk(T* row, const Rows& rows, const Vec<T>& v, int64_t first, int64_t length) {
    if (rows.whole && first + Vec<T>::size <= length) return store_vec(row + first, v);
#pragma unroll
    for (int e = 0; e < Vec<T>::size; ++e) {
        if (first + e < length) row[(first + e) * rows.stride] = v[e];
    }
}

// ---- a row in registers --------------------------------------------------------------------------------------------

constexpr int PORTABLE_CLUSTER = 8;  // blocks of a cluster that any GPU with clusters runs
constexpr int MAX_CLUSTER = 16;      // that Hopper runs, when asked to

// Which row this thread works on, and which of its vectors: `first`, and from there every `step`-th.
// Without clusters blockDim.x threads share a row and blockDim.y rows a block; blockDim.x may be a part of a warp.
// With clusters a row is shared by all the blocks of one.
template <bool CLUSTER>
struct RowShare {
    int64_t row;
    int first, step;

    __device__ RowShare() {
        row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
        first = threadIdx.x;
        step = blockDim.x;
#if __CUDA_ARCH__ >= 900
        if constexpr (CLUSTER) {
            const auto cluster = cooperative_groups::this_cluster();
            row = blockIdx.x / cluster.num_blocks();
            first += cluster.block_rank() * blockDim.x;
            step *= cluster.num_blocks();
            cluster.barrier_arrive();
        }
#endif
    }

    // To be called before the first reduction: no mailbox is there before its block has started.
    __device__ void meet() const {
#if __CUDA_ARCH__ >= 900
        if constexpr (CLUSTER) cooperative_groups::this_cluster().barrier_wait();
#endif
    }
};

template <typename T>
__device__ uint4 filled(float value) {
    Vec<T> v;
#pragma unroll
    for (int e = 0; e < Vec<T>::size; ++e) v[e] = from_float<T>(value);
    return reinterpret_cast<const uint4&>(v);
}

// This thread's vectors of a row, all of them under way at once. `fill` stands past the row's end, and everywhere for a
// thread without a row. WHOLE: rows consist of whole vectors, each on 16 bytes.
template <bool WHOLE, typename T, int VECTORS, typename Share>
__device__ void load_row(Vec<T> (&tile)[VECTORS], const T* row, const Rows& rows, const Share& share, bool live,
                         int64_t length, float fill) {
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const int64_t first = int64_t{share.first + v * share.step} * Vec<T>::size;
        if constexpr (WHOLE) {
            // As one word of 16 bytes, whose loads ptxas issues one after the other: of a vector's elements it makes
            // choices one by one, and waits for each load in between.
            uint4 word = filled<T>(fill);
            if (live && first < length) word = *reinterpret_cast<const uint4*>(row + first);
            reinterpret_cast<uint4&>(tile[v]) = word;
        } else {
            tile[v] = load_chunk(row, rows, first, live ? length : 0, fill);
        }
    }
}

// Keeps a compiler that has unpacked a tile from holding on to the floats: unpacking anew is cheaper than registers.
template <typename T, int VECTORS>
__device__ void stay_packed(Vec<T> (&tile)[VECTORS]) {
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        uint4& w = reinterpret_cast<uint4&>(tile[v]);
        asm volatile("" : "+r"(w.x), "+r"(w.y), "+r"(w.z), "+r"(w.w));
    }
}

template <bool WHOLE, typename T, int VECTORS, typename Share>
__device__ void store_row(T* row, const Rows& rows, const Vec<T> (&tile)[VECTORS], const Share& share, bool live,
                          int64_t length) {
    if (!live) return;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const int64_t first = int64_t{share.first + v * share.step} * Vec<T>::size;
        if constexpr (WHOLE) {
            if (first < length) store_vec(row + first, tile[v]);
        } else {
            store_chunk(row, rows, tile[v], first, length);
        }
    }
}

// The result of `op` over the values of all threads that share a row; each of them gets it. `mailbox` is the block's, for
// this one reduction.
template <bool CLUSTER, typename Op>
__device__ float reduce_over_row(float value, Op op, float (&mailbox)[WARP + MAX_CLUSTER]) {
    const int lanes = min(static_cast<int>(blockDim.x), WARP);
    for (int lane = lanes / 2; lane > 0; lane /= 2) value = op(value, __shfl_xor_sync(FULL_MASK, value, lane));
    if (blockDim.x > WARP) {
        const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
        float* const of_row = mailbox + threadIdx.y * warps;
        if (lane == 0) of_row[warp] = value;
        __syncthreads();
        value = warp_reduce(lane < warps ? of_row[lane] : Op::identity, op);
    }
#if __CUDA_ARCH__ >= 900
    if constexpr (CLUSTER) {
        auto cluster = cooperative_groups::this_cluster();
        const int blocks = cluster.num_blocks();
        float* const arrived = mailbox + WARP;
        if (threadIdx.x < blocks) *cluster.map_shared_rank(arrived + cluster.block_rank(), threadIdx.x) = value;
        cluster.sync();
        value = arrived[0];
        for (int block = 1; block < blocks; ++block) value = op(value, arrived[block]);
    }
#endif
    return value;
}

// ---- host ----------------------------------------------------------------------------------------------------------

template <typename T>
T* pointer(const Tensor& tensor) {
    return static_cast<T*>(tensor.data_ptr());
}

// One layout of rows for every operand: all dimensions but `dim`, in the memory order of the output.
struct RowLayout {
    DenseLike dense;
    int64_t dim, length = 1, count = 1;
    std::vector<int64_t> sizes;

    RowLayout(const Tensor& like, int64_t dim_in, const char* op) : dense(like), dim(dim_in) {
        const int64_t dims = std::max<int64_t>(like.dim(), 1);
        KL_CHECK(-dims <= dim && dim < dims, op, ": argument `dim` is out of range");
        if (dim < 0) dim += dims;
        if (like.dim() > 0) length = like.size(dim);
        for (const int64_t d : dense.order) {
            if (d == dim) continue;
            sizes.push_back(like.size(d));
            count *= like.size(d);
        }
    }
    template <typename T>
    int64_t chunks() const {
        return ceil_div(length, Vec<T>::size);
    }
    Rows rows(const Tensor& tensor, const char* op) const {
        std::vector<int64_t> strides;
        for (const int64_t d : dense.order) {
            if (d != dim) strides.push_back(tensor.stride(d));
        }
        Rows rows{collapse(sizes.data(), strides.data(), static_cast<int64_t>(sizes.size()), op),
                  tensor.dim() > 0 ? tensor.stride(dim) : 1, false};
        const int64_t vector = 16 / static_cast<int64_t>(tensor.element_size());
        rows.whole = (rows.stride == 1 || length == 1) && is_aligned16(tensor.data_ptr());
        for (int d = 0; d < rows.walk.dims; ++d) rows.whole = rows.whole && rows.walk.strides[d] % vector == 0;
        return rows;
    }
};

// How a row of `chunks` vectors is shared: threads of a block, rows of a block, blocks of a cluster, vectors a thread.
struct RowLaunch {
    unsigned threads, rows, cluster;
    int vectors;

    dim3 block() const { return dim3(threads, rows); }
    unsigned grid(int64_t count) const { return grid_size(ceil_div(count, rows) * cluster); }
};

constexpr int ROW_VECTORS = 4;       // in flight a thread: 64 bytes, times the threads of an SM, cover memory's latency
constexpr int LONG_ROW_VECTORS = 8;  // where a cluster is as large as it can be
constexpr int ROW_THREADS = 512;     // of a block at most: an SM holds several, of which one loads while another stores
constexpr int MIN_BLOCK = 128;

// Vectors of the longest row that one block, or one cluster, can hold.
constexpr int64_t MAX_BLOCK_CHUNKS = int64_t{ROW_THREADS} * ROW_VECTORS;
constexpr int64_t MAX_CLUSTER_CHUNKS = int64_t{ROW_THREADS} * LONG_ROW_VECTORS * MAX_CLUSTER;

inline RowLaunch row_launch(int64_t chunks, bool clusters) {
    unsigned threads = 4;  // a power of two, so that a part of a warp can reduce by shuffles
    while (threads < ROW_THREADS && threads * ROW_VECTORS < chunks) threads *= 2;
    if (threads < MIN_BLOCK) return {threads, MIN_BLOCK / threads, 1, ROW_VECTORS};
    const int64_t limit = clusters ? MAX_CLUSTER_CHUNKS : MAX_BLOCK_CHUNKS;
    KL_CHECK(chunks <= limit, "a row of ", chunks, " vectors of 16 bytes is longer than fits: ", limit);
    const int vectors = chunks <= MAX_CLUSTER * MAX_BLOCK_CHUNKS ? ROW_VECTORS : LONG_ROW_VECTORS;
    return {threads, 1, static_cast<unsigned>(ceil_div(chunks, int64_t{threads} * vectors)), vectors};
}

// Launches `kernel(arguments…)`, one of those that share rows as `shape` says.
template <typename... Parameters, typename... Arguments>
void launch_rows(void (*kernel)(Parameters...), const RowLaunch& shape, int64_t count, const Launch& launch,
                 Arguments... arguments) {
    if (shape.cluster == 1) {
        kernel<<<shape.grid(count), shape.block(), 0, launch.stream>>>(arguments...);
        return;
    }
    if (shape.cluster > PORTABLE_CLUSTER) {
        KL_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
    }
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {shape.cluster, 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(shape.grid(count));
    config.blockDim = shape.block();
    config.stream = launch.stream;
    config.attrs = &cluster;
    config.numAttrs = 1;
    KL_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...));
}

}  // namespace kl
