// Rows: one dimension of a tensor, taken as a whole by threads that share it. Where rows lie, how a thread reads its part
// of one, and how those that share a row agree on a sum or a maximum: within a warp, a block, or a cluster of blocks.
#pragma once

#include <numeric>

#include "cluster.cuh"
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
constexpr int ROW_THREADS = 512;     // of a block at most: an SM holds several, of which one loads while another stores

// Whether the architecture that is compiled for has clusters, where they are asked for. A kernel that asks without is
// never launched, and need not be compiled.
template <bool CLUSTER>
__device__ constexpr bool exists_here() {
#if __CUDA_ARCH__ >= 900
    return true;
#else
    return !CLUSTER;
#endif
}

// Which row this thread works on, and which of its vectors: `first`, and from there every `step`-th.
// Without clusters blockDim.x threads share a row and blockDim.y rows a block; blockDim.x may be a part of a warp.
// With clusters a row is shared by all the blocks of one.
template <bool CLUSTER>
struct RowShare {
    int64_t row, rows_at_once;  // the whole grid takes so many rows at once: a loop over rows goes on by as many
    int first, step;

    __device__ RowShare() {
        row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
        rows_at_once = int64_t{gridDim.x} * blockDim.y;
        first = threadIdx.x;
        step = blockDim.x;
#if __CUDA_ARCH__ >= 900
        if constexpr (CLUSTER) {
            row = blockIdx.x / cluster::blocks();
            rows_at_once = gridDim.x / cluster::blocks();
            first += cluster::rank() * blockDim.x;
            step *= cluster::blocks();
            cluster::arrive();
        }
#endif
    }

    // To be called once, before the first reduction: no mailbox is there before its block has started. Best with loads
    // under way.
    __device__ void meet() const {
#if __CUDA_ARCH__ >= 900
        if constexpr (CLUSTER) cluster::wait();
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

// One of this thread's vectors, the v-th.
template <bool WHOLE, typename T, typename Share>
__device__ void store_part(T* row, const Rows& rows, const Vec<T>& part, int v, const Share& share, bool live,
                           int64_t length) {
    const int64_t first = int64_t{share.first + v * share.step} * Vec<T>::size;
    if constexpr (WHOLE) {
        if (live && first < length) store_vec(row + first, part);
    } else if (live) {
        store_chunk(row, rows, part, first, length);
    }
}

template <bool WHOLE, typename T, int VECTORS, typename Share>
__device__ void store_row(T* row, const Rows& rows, const Vec<T> (&tile)[VECTORS], const Share& share, bool live,
                          int64_t length) {
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) store_part<WHOLE>(row, rows, tile[v], v, share, live, length);
}

__device__ inline float shuffle_xor(float x, int lane) { return __shfl_xor_sync(FULL_MASK, x, lane); }

// Two sums that travel together.
struct Pair {
    float first, second;
};
struct PairSum {
    __device__ Pair operator()(Pair a, Pair b) const { return {a.first + b.first, a.second + b.second}; }
};
__device__ inline Pair shuffle_xor(Pair x, int lane) {
    return {shuffle_xor(x.first, lane), shuffle_xor(x.second, lane)};
}

// Where the warps that share a row leave their values for each other. In shared memory.
template <bool CLUSTER, typename V>
struct Mailbox {
    V slots[(CLUSTER ? MAX_CLUSTER : 1) * ROW_THREADS / WARP];
};

// The result of `op`, associative and commutative, over the values of all threads that share a row; each of them gets
// it. All threads of the block call it. V is a float or a Pair. A mailbox may serve again after a call with another one:
// by then all have read it.
template <bool CLUSTER, typename V, typename Op>
__device__ V reduce_over_row(V value, Op op, Mailbox<CLUSTER, V>& mailbox) {
    const int lanes = min(static_cast<int>(blockDim.x), WARP), warps = blockDim.x / WARP;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    for (int l = lanes / 2; l > 0; l /= 2) value = op(value, shuffle_xor(value, l));
    if constexpr (CLUSTER) {
#if __CUDA_ARCH__ >= 900
        // Every warp writes to every block, so that the cluster's barrier is the only one.
        const int blocks = cluster::blocks();
        if (lane < blocks) *cluster::in_block(&mailbox.slots[cluster::rank() * warps + warp], lane) = value;
        cluster::sync();
        value = mailbox.slots[lane];  // a cluster has at least as many warps as a warp has lanes, in powers of two
        for (int slot = WARP + lane; slot < blocks * warps; slot += WARP) value = op(value, mailbox.slots[slot]);
        for (int l = WARP / 2; l > 0; l /= 2) value = op(value, shuffle_xor(value, l));
#endif
    } else if (warps > 1) {
        V* const slots = mailbox.slots + threadIdx.y * warps;
        if (lane == 0) slots[warp] = value;
        // Not a barrier of those alone who share the row: its number would be in a register, for which the assembler
        // reserves all 16 of a block, and an SM of Hopper, which has 64, would hold four blocks.
        __syncthreads();
        value = slots[lane & (warps - 1)];  // a power of two
        for (int l = warps / 2; l > 0; l /= 2) value = op(value, shuffle_xor(value, l));
    }
    return value;
}

// ---- host ----------------------------------------------------------------------------------------------------------

template <typename T>
T* pointer(const Tensor& tensor) {
    return static_cast<T*>(tensor.data_ptr());
}

// One layout of rows for every operand: all dimensions but `dim`, in the memory order of the output, or `row_major`,
// where the number of a row matters.
struct RowLayout {
    DenseLike dense;
    int64_t dim, length = 1, count = 1;
    std::vector<int64_t> sizes;

    RowLayout(const Tensor& like, int64_t dim_in, const char* op, bool row_major = false) : dense(like), dim(dim_in) {
        if (row_major) std::iota(dense.order.begin(), dense.order.end(), 0);
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

// How a row of `chunks` vectors is shared: threads of a block, rows of a block, blocks of a cluster.
// Blocks of a cluster are a power of two: more of those fit in the 16 or 18 SMs that one must lie in.
struct RowLaunch {
    unsigned threads, rows, cluster;

    dim3 block() const { return dim3(threads, rows); }
    unsigned grid(int64_t count) const { return grid_size(ceil_div(count, rows) * cluster); }
};

constexpr int ROW_VECTORS = 4;  // in flight a thread: 64 bytes, times the threads of an SM, cover memory's latency
constexpr int MIN_BLOCK = 128;

// Vectors of the longest row that one block, or one cluster, can hold.
constexpr int64_t MAX_BLOCK_CHUNKS = int64_t{ROW_THREADS} * ROW_VECTORS;
constexpr int64_t MAX_CLUSTER_CHUNKS = MAX_BLOCK_CHUNKS * MAX_CLUSTER;

inline RowLaunch row_launch(int64_t chunks, bool clusters) {
    unsigned threads = 4;  // a power of two, so that a part of a warp can reduce by shuffles
    while (threads < ROW_THREADS && threads * ROW_VECTORS < chunks) threads *= 2;
    if (threads < MIN_BLOCK) return {threads, MIN_BLOCK / threads, 1};
    const int64_t limit = clusters ? MAX_CLUSTER_CHUNKS : MAX_BLOCK_CHUNKS;
    KL_CHECK(chunks <= limit, "a row of ", chunks, " vectors of 16 bytes is longer than fits: ", limit);
    unsigned cluster = 1;
    while (int64_t{cluster} * threads * ROW_VECTORS < chunks) cluster *= 2;
    return {threads, 1, cluster};
}

// What launches `grid` blocks in clusters.
struct ClusterConfig {
    cudaLaunchAttribute cluster{};
    cudaLaunchConfig_t config{};

    template <typename Kernel>
    ClusterConfig(Kernel* kernel, const RowLaunch& shape, unsigned grid, int shared_bytes, const Launch& launch) {
        if (shape.cluster > PORTABLE_CLUSTER) {
            KL_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
        }
        cluster.id = cudaLaunchAttributeClusterDimension;
        cluster.val.clusterDim = {shape.cluster, 1, 1};
        config.gridDim = dim3(grid);
        config.blockDim = shape.block();
        config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
        config.stream = launch.stream;
        config.attrs = &cluster;
        config.numAttrs = 1;
    }
    ClusterConfig(const ClusterConfig&) = delete;  // it points into itself
};

// Launches `kernel(arguments…)`, one of those that share rows as `shape` says, on `grid` blocks.
template <typename... Parameters, typename... Arguments>
void launch_rows(void (*kernel)(Parameters...), const RowLaunch& shape, unsigned grid, int shared_bytes,
                 const Launch& launch, Arguments... arguments) {
    if (shape.cluster == 1) {
        kernel<<<grid, shape.block(), shared_bytes, launch.stream>>>(arguments...);
        return;
    }
    ClusterConfig config(kernel, shape, grid, shared_bytes, launch);
    KL_CUDA_CHECK(cudaLaunchKernelEx(&config.config, kernel, static_cast<Parameters>(arguments)...));
}

// How many clusters of a kernel (or blocks, where rows need no cluster) the GPU holds at once. The driver is asked once
// for each device and size of cluster. Every kernel has its own.
struct Resident {
    static constexpr int DEVICES = 16, SIZES = 5;
    std::atomic<int> known[DEVICES][SIZES]{};

    template <typename Kernel>
    int clusters(Kernel* kernel, const RowLaunch& shape, int shared_bytes, const Launch& launch) {
        int size = 0, found = 0;
        while (1u << size < shape.cluster) ++size;
        std::atomic<int>* const slot = launch.device < DEVICES ? &known[launch.device][size] : nullptr;
        if (slot != nullptr && (found = slot->load(std::memory_order_relaxed)) > 0) return found;
        if (shape.cluster == 1) {
            int blocks = 0;
            KL_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
                &blocks, kernel, static_cast<int>(shape.threads * shape.rows), shared_bytes));
            found = blocks * multiprocessors(launch.device);
        } else {
            ClusterConfig config(kernel, shape, shape.cluster, shared_bytes, launch);
            KL_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&found, kernel, &config.config));
        }
        KL_CHECK(found > 0, "a cluster of ", shape.cluster, " blocks does not fit on this GPU");
        if (slot != nullptr) slot->store(found, std::memory_order_relaxed);
        return found;
    }
};

}  // namespace kl
