// Rows of a tensor along one dimension (row_access.cuh): their partition over threads (RowPartition), and loads and stores
// of a thread's vectors. reduce_over_row() reduces over the threads of a row, within a warp, a block, or a cluster.
#pragma once

#include <numeric>

#include "core/common.cuh"
#include "core/occupancy.cuh"
#include "core/pdl.cuh"
#include "reduce/row_access.cuh"
#include "sm90/cluster.cuh"

namespace kl {

// ---- a row in registers --------------------------------------------------------------------------------------------

constexpr int MAX_CLUSTER = 16;   // blocks of the largest cluster on Hopper, which is not portable
constexpr int ROW_THREADS = 512;  // largest block: an SM holds two, so that one loads while the other stores
constexpr int ROW_VECTORS = 4;    // in flight per thread: 64 bytes times the threads of an SM cover memory latency
constexpr int WIDE_VECTORS = 8;   // for long rows: the fixed work per thread and row weighs half as much, and clusters
                                  // have half as many blocks, which exchange their partials sooner

// Largest blocks per SM: 1024 threads of 64 registers, or half as many where rows are loaded element by element.
template <bool VECTORIZED>
constexpr int BLOCKS_AN_SM = VECTORIZED ? 2 : 1;

// Whether the architecture being compiled has what the kernel needs. A cluster kernel of an older one is never
// launched, so its body is left out.
template <bool CLUSTER>
__device__ constexpr bool exists_here() {
#if __CUDA_ARCH__ >= 900
    return true;
#else
    return !CLUSTER;
#endif
}

constexpr int LINE_VECTORS = 8;  // vectors of a line of 128 bytes

#if __CUDA_ARCH__ >= 900
/// Vectors of a row of `vectors` that each block of a cluster has: equal parts of whole lines.
__device__ inline int cluster_part(int vectors) {
    return (((vectors - 1) >> cluster::log2_blocks()) / LINE_VECTORS + 1) * LINE_VECTORS;
}
#endif

/// The row of this thread, and its vectors of that row: `first`, then every `step()`-th up to `end`. A row of vectors
/// v0, v1, …, with step s:
///
///             v0   v1   …   v(s−1) │ v(s)   …        │ …        vector v of thread x is at first + v · s
///   thread    0    1    …   s − 1  │ 0      …  s − 1 │ …
///
/// Without a cluster, blockDim.x threads share a row and a block has blockDim.y rows; blockDim.x may be part of a warp.
/// In a cluster, all blocks share one row in equal parts of whole 128-byte lines. Their blocks have ROW_THREADS threads,
/// so that addresses differ by constants: long rows are bound by instructions. ONE_ROW: the same for one block per row.
template <bool CLUSTER, bool ONE_ROW = CLUSTER>
struct RowPartition {
    static constexpr bool ONE_ROW_PER_CTA = ONE_ROW;
    int64_t row;
    int first, end;

    __device__ static int step() { return ONE_ROW_PER_CTA ? ROW_THREADS : static_cast<int>(blockDim.x); }

    // Partitions rows of so many vectors.
    __device__ explicit RowPartition(int vectors) {
        row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
        first = threadIdx.x;
        end = vectors;
#if __CUDA_ARCH__ >= 900
        if constexpr (CLUSTER) {
            const int part = cluster_part(vectors), begin = static_cast<int>(cluster_rank()) * part;
            row = blockIdx.x >> cluster::log2_blocks();
            first += begin;
            end = min(begin + part, vectors);
        }
#endif
    }

    // This thread's v-th vector.
    __device__ int at(int v) const { return first + v * step(); }

    // Whether this thread has one of `count` rows. The grid has exactly one cluster, or block of ONE_ROW, per row.
    __device__ bool has_row(int64_t count) const { return ONE_ROW_PER_CTA || row < count; }

    // Whether vector v lies in the row, of `length` elements, and in this block's part of it.
    template <typename T>
    __device__ bool has(int v, int64_t length) const {
        return CLUSTER ? v * step() < end - first : at(v) * Vec<T>::size < static_cast<int>(length);
    }

    // Initialises the mbarriers of `scratch`. Must be called once, before anything else.
    template <typename... Scratch>
    __device__ void open(Scratch&... scratch) const {
#if __CUDA_ARCH__ >= 900
        if constexpr (CLUSTER) {
            if (threadIdx.x == 0) {
                (mbarrier_init(shared_address(&scratch.arrived), 1), ...);
                mbarrier_init_fence();
            }
            cluster::arrive_relaxed();  // relaxed: the fence has published the mbarriers, all that others read
        }
#endif
    }
    // Waits until every block of the cluster has opened its scratch. Must be called once before the first reduction,
    // best with loads in flight.
    __device__ void meet() const {
#if __CUDA_ARCH__ >= 900
        if constexpr (CLUSTER) cluster::wait();
#endif
    }
};

// Number of 16-byte vectors that hold `length` elements. Rows in registers are short enough for an int.
template <typename T>
__device__ int vectors_of(int64_t length) {
    return (static_cast<int>(length) - 1) / Vec<T>::size + 1;
}

template <typename T>
__device__ uint4 filled(float value) {
    Vec<T> v;
#pragma unroll
    for (int e = 0; e < Vec<T>::size; ++e) v[e] = from_float<T>(value);
    return reinterpret_cast<const uint4&>(v);
}

// Loads this thread's vectors of a row, all in flight at once. `fill` stands past the row's end, and everywhere for a
// thread without a row. VECTORIZED: rows consist of whole vectors on 16 bytes.
template <bool VECTORIZED, typename T, int VECTORS, typename Partition>
__device__ void load_row(Vec<T> (&tile)[VECTORS], const T* row, const Rows& rows, const Partition& partition,
                         bool has_row, int64_t length, float fill) {
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const int first = partition.at(v) * Vec<T>::size;
        const bool inside = has_row && partition.template has<T>(v, length);
        if constexpr (VECTORIZED) {
            // As one 16-byte word: ptxas issues such loads back to back. Of single elements it would select one by
            // one and wait for each load in between.
            uint4 word = filled<T>(fill);
            if (inside) word = *evict_last(reinterpret_cast<const uint4*>(row + first));
            reinterpret_cast<uint4&>(tile[v]) = word;
        } else {
            tile[v] = load_chunk(row, rows, first, inside ? length : 0, fill);
        }
    }
}

#define KL_LOAD_IF(LOAD)                                                            \
    asm volatile("{\n.reg .pred inside;\nsetp.ne.u32 inside, %5, 0;\n@inside " LOAD \
                 ".v4.u32 {%0, %1, %2, %3}, [%4];\n}"                               \
                 : "+r"(word.x), "+r"(word.y), "+r"(word.z), "+r"(word.w)           \
                 : "l"(from), "r"(static_cast<uint32_t>(inside)))

// Loads 16 bytes where `inside`. It is predicated, because ptxas moves no later load across a branch. It is volatile,
// because ptxas might otherwise move it across a barrier and hold registers meanwhile. CONSTANT (ld.global.nc): nothing
// writes this memory while the kernel runs, nor while a PDL launch waits. ptxas may then move the load across stores.
template <bool CONSTANT>
__device__ void load_if(uint4& word, const void* from, bool inside) {
    if constexpr (CONSTANT) {
        KL_LOAD_IF("ld.global.nc");
    } else {
        KL_LOAD_IF("ld.global");
    }
}
#undef KL_LOAD_IF

// Makes the compiler forget the unpacked floats of a tile: to unpack them again costs less than to keep them in
// registers.
template <typename T, int VECTORS>
__device__ void stay_packed(Vec<T> (&tile)[VECTORS]) {
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        uint4& w = reinterpret_cast<uint4&>(tile[v]);
        asm volatile("" : "+r"(w.x), "+r"(w.y), "+r"(w.z), "+r"(w.w));
    }
}

// ptxas moves no load or store across this. Otherwise it delays the stores of vector after vector until registers run
// out. All threads of a warp must call it.
__device__ inline void keep_order() { __syncwarp(); }

// Sums over this thread's vectors of a row. f(sum, element) returns the sum with the element added.
template <typename T, int VECTORS, typename F>
__device__ float sum_over(const Vec<T> (&tile)[VECTORS], F&& f) {
    float x[Vec<T>::size], sum = -0.0f;  // -0 + x is x, so that the compiler drops the first addition
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        unpack(tile[v], x);
        float partial = -0.0f;
#pragma unroll
        for (int e = 0; e < Vec<T>::size; ++e) partial = f(partial, x[e]);
        sum += partial;
    }
    return sum;
}

// Stores vector v of this thread. STREAMED: through store_evict_first, where VECTORIZED.
template <bool VECTORIZED, bool STREAMED = false, typename T, typename Partition>
__device__ void store_part(T* row, const Rows& rows, const Vec<T>& part, int v, const Partition& partition,
                           bool has_row, int64_t length) {
    if (!has_row || !partition.template has<T>(v, length)) return;
    const int first = partition.at(v) * Vec<T>::size;
    if constexpr (VECTORIZED && STREAMED) {
        store_evict_first(row + first, part);
    } else if constexpr (VECTORIZED) {
        store_vec(row + first, part);
    } else {
        store_chunk(row, rows, part, first, length);
    }
}

template <bool VECTORIZED, typename T, int VECTORS, typename Partition>
__device__ void store_row(T* row, const Rows& rows, const Vec<T> (&tile)[VECTORS], const Partition& partition,
                          bool has_row, int64_t length) {
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) store_part<VECTORIZED>(row, rows, tile[v], v, partition, has_row, length);
}

__device__ inline float shuffle_xor(float x, int lane) { return __shfl_xor_sync(FULL_MASK, x, lane); }

// Two sums that one reduction carries.
struct Pair {
    float first, second;
};
struct PairSum {
    __device__ static Pair none() { return {0.0f, 0.0f}; }
    __device__ Pair operator()(Pair a, Pair b) const { return {a.first + b.first, a.second + b.second}; }
};
__device__ inline Pair shuffle_xor(Pair x, int lane) {
    return {shuffle_xor(x.first, lane), shuffle_xor(x.second, lane)};
}
__device__ inline float shuffle_from(float x, int lane) { return __shfl_sync(FULL_MASK, x, lane); }
__device__ inline Pair shuffle_from(Pair x, int lane) {
    return {shuffle_from(x.first, lane), shuffle_from(x.second, lane)};
}

// Shared-memory scratch of one reduction over a row: one partial per warp of the block, or of the whole cluster.
template <bool CLUSTER, typename V>
struct ReduceSmem {
    V partials[ROW_THREADS / WARP];
};
template <typename V>
struct ReduceSmem<true, V> {
    V partials[MAX_CLUSTER * ROW_THREADS / WARP];
    uint64_t arrived;  // mbarrier that counts the bytes received
};

// Reduces `value` over groups of `lanes` neighbouring lanes, a power of two. Every lane gets the result of its group.
template <typename V, typename Op>
__device__ V over_lanes(V value, Op op, int lanes) {
#pragma unroll
    for (int l = WARP / 2; l > 0; l /= 2) {
        if (l < lanes) value = op(value, shuffle_xor(value, l));
    }
    return value;
}

/// The least power of two that is at least `count`, of one or more.
__device__ inline int power_of_two_from(int count) { return 1 << (WARP - __clz(count - 1)); }

/// What a lane begins with to reduce `count` values, at most one for each lane: one of them, or what changes none.
template <typename V, typename Op>
__device__ V of_warp(const V* partials, int lane, int count, Op) {
    const int i = lane & (power_of_two_from(count) - 1);
    return i < count ? partials[i] : Op::none();
}

struct Nothing {
    __device__ void operator()() const {}
};

/// Publishes each warp's `value` to all threads that share its row, where several warps do. Returns the number of values, in a
/// cluster a power of two, and points `partials` at them. All threads of the block must call it, once per `reduce_smem`.
///
///   one block     warp w writes partials[w] of the row; __syncthreads
///   a cluster     warp w of block b writes partials[b · warps + w] of every block, by DSMEM: lane l writes to block l.
///                 The mbarrier `arrived` of each block counts the bytes.
///
/// The exchange of a cluster takes longer. Each thread calls `meanwhile()` before it waits, to issue loads for later.
template <bool CLUSTER, typename V, typename F = Nothing>
__device__ int exchange_over_row(const V& value, ReduceSmem<CLUSTER, V>& reduce_smem, const V*& partials,
                                 F&& meanwhile = F{}) {
    const int warps = blockDim.x / WARP, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
#if __CUDA_ARCH__ >= 900
    if constexpr (CLUSTER) {  // every warp writes to every block
        const uint32_t arrived = shared_address(&reduce_smem.arrived);
        const int blocks = static_cast<int>(cluster::blocks()), count = blocks * warps;
        if (threadIdx.x == 0) mbarrier_arrive_expect_tx(arrived, count * sizeof(V));
        if (lane < blocks) {
            cluster::send(&reduce_smem.partials[cluster_rank() * warps + warp], value, &reduce_smem.arrived, lane);
        }
        meanwhile();
        mbarrier_wait(arrived, 0);
        partials = reduce_smem.partials;
        return count;
    }
#endif
    partials = reduce_smem.partials + threadIdx.y * warps;
    if (lane == 0) reduce_smem.partials[threadIdx.y * warps + warp] = value;
    __syncthreads();
    return warps;
}

/// Reduces `value` by `op`, associative and commutative, over the threads that share a row and returns the result to
/// all of them. All threads of the block must call it, once per `reduce_smem`. V is a float or a Pair.
template <bool CLUSTER, typename V, typename Op, typename F = Nothing>
__device__ V reduce_over_row(V value, Op op, ReduceSmem<CLUSTER, V>& reduce_smem, F&& meanwhile = F{}) {
    value = over_lanes(value, op, min(static_cast<int>(blockDim.x), WARP));
    if (!CLUSTER && blockDim.x <= WARP) return value;
    const V* partials;
    const int count = exchange_over_row(value, reduce_smem, partials, meanwhile), lane = threadIdx.x % WARP;
    if constexpr (CLUSTER) {
        value = partials[lane & (count - 1)];
#pragma unroll 1  // two or three times at most
        for (int i = WARP + lane; i < count; i += WARP) value = op(value, partials[i]);
        return over_lanes(value, op, min(count, WARP));
    }
    return over_lanes(of_warp(partials, lane, count, op), op, power_of_two_from(count));
}

// ---- host ----------------------------------------------------------------------------------------------------------

template <typename T>
T* pointer(const Tensor& tensor) {
    return static_cast<T*>(tensor.data_ptr());
}

// The layout of rows, common to all operands: every dimension but `dim`. Rows are numbered in the memory order of the
// output, or in `row_major` order where their numbers matter.
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

// Launch shape for rows of `chunks` vectors: threads per row of a block, rows per block, blocks per cluster, vectors
// per thread. Cluster sizes are powers of two: more of those fit in the 16 or 18 SMs of a GPC.
struct RowLaunch {
    unsigned threads, rows, cluster;
    int vectors = ROW_VECTORS;

    dim3 block() const { return dim3(threads, rows); }
    unsigned grid(int64_t count) const { return grid_size(ceil_div(count, rows) * cluster); }
};

constexpr int MIN_BLOCK = 64;  // smallest block: small blocks free their resources sooner

// Vectors of the longest row that one block, or one cluster, holds at ROW_VECTORS per thread.
constexpr int64_t MAX_BLOCK_CHUNKS = int64_t{ROW_THREADS} * ROW_VECTORS;
constexpr int64_t MAX_CLUSTER_CHUNKS = MAX_BLOCK_CHUNKS * MAX_CLUSTER;

// Threads that share a row of `chunks` vectors, at most `most`: a power of two, so that part of a warp can shuffle.
inline unsigned row_threads(int64_t chunks, int vectors, int64_t most) {
    unsigned threads = 4;
    while (threads < most && int64_t{threads} * vectors < chunks) threads *= 2;
    return threads;
}

// The same in whole warps where one is not enough. Of a power of two, up to a half would have no vector.
inline unsigned row_warps(int64_t chunks, int vectors, int64_t most) {
    const int64_t warps = ceil_div(chunks, int64_t{vectors} * WARP);
    return warps <= 1 ? row_threads(chunks, vectors, WARP) : static_cast<unsigned>(std::min(warps * WARP, most));
}

// Blocks that share a row of `chunks` vectors where each holds `of_block` of them.
inline unsigned cluster_blocks(int64_t chunks, int64_t of_block) {
    unsigned blocks = 1;
    while (int64_t{blocks} * of_block < chunks) blocks *= 2;
    return blocks;
}

// Rows of more than `narrow` vectors take `wide` vectors per thread, others ROW_VECTORS.
inline RowLaunch row_launch(int64_t chunks, bool clusters, int wide = ROW_VECTORS, int64_t narrow = 512,
                            bool whole_warps = false) {
    const int64_t limit = clusters ? MAX_CLUSTER_CHUNKS : MAX_BLOCK_CHUNKS;
    KL_CHECK(chunks <= limit, "a row of ", chunks, " vectors of 16 bytes is longer than fits: ", limit);
    if (chunks <= int64_t{ROW_THREADS} * wide) {
        const int vectors = chunks > narrow ? wide : ROW_VECTORS;
        const unsigned threads =
            whole_warps ? row_warps(chunks, vectors, ROW_THREADS) : row_threads(chunks, vectors, ROW_THREADS);
        return {threads, threads < MIN_BLOCK ? MIN_BLOCK / threads : 1, 1, vectors};
    }
    return {ROW_THREADS, 1, cluster_blocks(chunks, int64_t{ROW_THREADS} * wide), wide};
}

// Launches `kernel(arguments…)` of a launch shape on `grid` blocks. With PDL (core/pdl.cuh) unless a row takes a
// cluster: there a microsecond does not show, and without PDL the parameters may be read as CONSTANT.
template <typename... Parameters, typename... Arguments>
void launch_rows(void (*kernel)(Parameters...), const RowLaunch& shape, unsigned grid, int shared_bytes,
                 const Launch& launch, Arguments... arguments) {
    allow_clusters(kernel, shape.cluster);
    KL_CHECK(shape.cluster == 1 || has_hopper_code(kernel, launch.device), NO_CLUSTERS);
    LaunchConfig(dim3(grid), shape.block(), shared_bytes, launch)
        .clusters_of(shape.cluster)
        .pdl(shape.cluster == 1 && has_hopper_code(kernel, launch.device))
        .run(kernel, arguments...);
}

// Calls f(vectors per thread, vectorized, cluster), each an integral_constant, with the instance that suits `shape`:
// FEW vectors per thread or the first of MORE that is enough, the last in clusters. Rows by elements take ROW_VECTORS.
template <int FEW, int... MORE, typename F>
void with_row_shape(const RowLaunch& shape, bool whole, F&& f) {
    using Few = std::integral_constant<int, FEW>;
    using Single = std::integral_constant<int, ROW_VECTORS>;
    using Yes = std::true_type;
    using No = std::false_type;
    if (!whole) return shape.cluster > 1 ? f(Single{}, No{}, Yes{}) : f(Single{}, No{}, No{});
    if constexpr (sizeof...(MORE) == 0) {
        shape.cluster > 1 ? f(Few{}, Yes{}, Yes{}) : f(Few{}, Yes{}, No{});
    } else {
        if (shape.cluster > 1 || shape.vectors > FEW) return with_row_shape<MORE...>(shape, whole, f);
        f(Few{}, Yes{}, No{});
    }
}

}  // namespace kl
