// Rows: one dimension of a tensor, taken as a whole by threads that share it. Where rows lie, how a thread reads its part
// of one, and how those that share a row agree on a sum or a maximum: within a warp, a block, or a cluster of blocks.
#pragma once

#include <numeric>

#include "core/common.cuh"
#include "core/occupancy.cuh"
#include "core/pdl.cuh"
#include "sm90/cluster.cuh"

namespace kl {

// The rows of one operand: where each starts, and how far apart its elements lie.
struct Rows {
    Strided walk;
    int64_t stride;
    bool whole;  // rows are dense and start on 16 bytes: vectors can be loaded and stored whole

    __device__ int64_t start(int64_t row) const { return walk.offset(row); }

    // Whether they lie evenly apart, and how far.
    bool even() const { return walk.dims <= 1; }
    __host__ __device__ int64_t step() const { return walk.dims > 0 ? walk.strides[0] : 0; }

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

constexpr int MAX_CLUSTER = 16;   // that Hopper runs, when asked to
constexpr int ROW_THREADS = 512;  // of a block at most: an SM holds two, of which one loads while the other stores
constexpr int ROW_VECTORS = 4;    // in flight a thread: 64 bytes, times the threads of an SM, cover memory's latency
constexpr int WIDE_VECTORS = 8;   // the same of long rows, for which what a thread does once a row then weighs half as
                                  // much, and clusters are the smaller, and the sooner meet

// How many of the largest blocks an SM is to have room for: 1024 threads of 64 registers, or half as many where rows come
// element by element, which takes more.
template <bool WHOLE>
constexpr int BLOCKS_AN_SM = WHOLE ? 2 : 1;

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

constexpr int LINE_VECTORS = 8;  // vectors of a line of 128 bytes

// Which row this thread works on, and which of its vectors: `first`, and from there every `step()`-th up to `end`.
// Without clusters blockDim.x threads share a row and blockDim.y rows a block; blockDim.x may be a part of a warp.
// With clusters a row is shared by all the blocks of one, in equal parts of whole lines. Their blocks are all of
// ROW_THREADS, so that addresses follow from one another by constants: long rows are bound by instructions.
// ALONE: so are they without a cluster, where a row has a block to itself.
template <bool CLUSTER, bool ALONE = CLUSTER>
struct RowShare {
    static constexpr bool LONE = ALONE;
    int64_t row;
    int first, end;

    __device__ static int step() { return ALONE ? ROW_THREADS : static_cast<int>(blockDim.x); }

    // Of a row of so many vectors.
    __device__ explicit RowShare(int vectors) {
        row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
        first = threadIdx.x;
        end = vectors;
#if __CUDA_ARCH__ >= 900
        if constexpr (CLUSTER) {
            const int log2 = cluster::log2_blocks();
            const int part = (((vectors - 1) >> log2) / LINE_VECTORS + 1) * LINE_VECTORS;
            const int begin = static_cast<int>(cluster::rank()) * part;
            row = blockIdx.x >> log2;
            first += begin;
            end = min(begin + part, vectors);
        }
#endif
    }

    // This thread's v-th vector.
    __device__ int at(int v) const { return first + v * step(); }

    // Whether there is a row for this thread, of so many. Every cluster has one.
    __device__ bool live(int64_t count) const { return ALONE || row < count; }

    // Whether it lies in the row, of so many elements, and in this block's part of it.
    template <typename T>
    __device__ bool has(int v, int64_t length) const {
        return CLUSTER ? v * step() < end - first : at(v) * Vec<T>::size < static_cast<int>(length);
    }

    // To be called once, before all else: makes the mailboxes that will serve ready for what other blocks send.
    template <typename... Mailboxes>
    __device__ void open(Mailboxes&... mailboxes) const {
#if __CUDA_ARCH__ >= 900
        if constexpr (CLUSTER) {
            if (threadIdx.x == 0) {
                (mbarrier_init(shared_address(&mailboxes.arrived), 1), ...);
                mbarrier_init_fence();
            }
            cluster::arrive_relaxed();  // the fence has made the mailboxes known, and there is nothing else to see
        }
#endif
    }
    // To be called once, before the first reduction: no mailbox is open before its block has started. Best with loads
    // under way.
    __device__ void meet() const {
#if __CUDA_ARCH__ >= 900
        if constexpr (CLUSTER) cluster::wait();
#endif
    }
};

// Vectors of 16 bytes that hold so many elements. A row in registers is not long.
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

// This thread's vectors of a row, all of them under way at once. `fill` stands past the row's end, and everywhere for a
// thread without a row. WHOLE: rows consist of whole vectors, each on 16 bytes.
template <bool WHOLE, typename T, int VECTORS, typename Share>
__device__ void load_row(Vec<T> (&tile)[VECTORS], const T* row, const Rows& rows, const Share& share, bool live,
                         int64_t length, float fill) {
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const int first = share.at(v) * Vec<T>::size;
        const bool inside = live && share.template has<T>(v, length);
        if constexpr (WHOLE) {
            // As one word of 16 bytes, whose loads ptxas issues one after the other: of a vector's elements it makes
            // choices one by one, and waits for each load in between.
            uint4 word = filled<T>(fill);
            if (inside) word = *once(reinterpret_cast<const uint4*>(row + first));
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

// 16 bytes, where `inside`. Without a branch, over which no load that follows would be moved; volatile, lest it be moved
// over a barrier, to wait in registers. CONSTANT is what nothing writes to while the kernel runs, nor while it waits to
// begin, if it is launched early: ptxas may move such loads over stores, and others not.
template <bool CONSTANT>
__device__ void load_if(uint4& word, const void* from, bool inside) {
    if constexpr (CONSTANT) {
        KL_LOAD_IF("ld.global.nc");
    } else {
        KL_LOAD_IF("ld.global");
    }
}
#undef KL_LOAD_IF

// Keeps a compiler that has unpacked a tile from holding on to the floats: unpacking anew is cheaper than registers.
template <typename T, int VECTORS>
__device__ void stay_packed(Vec<T> (&tile)[VECTORS]) {
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        uint4& w = reinterpret_cast<uint4&>(tile[v]);
        asm volatile("" : "+r"(w.x), "+r"(w.y), "+r"(w.z), "+r"(w.w));
    }
}

// ptxas moves no load or store over this. Left alone it puts off stores, one vector after another, until it runs out of
// registers. All threads of a warp come here.
__device__ inline void keep_order() { __syncwarp(); }

// A sum over what this thread has of a row, vector by vector: f(sum so far, element) takes an element in.
template <typename T, int VECTORS, typename F>
__device__ float sum_over(const Vec<T> (&tile)[VECTORS], F&& f) {
    float x[Vec<T>::size], sum = -0.0f;  // to which a first value is added for nothing
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

// One of this thread's vectors, the v-th. STREAMED: by store_streamed, if whole.
template <bool WHOLE, bool STREAMED = false, typename T, typename Share>
__device__ void store_part(T* row, const Rows& rows, const Vec<T>& part, int v, const Share& share, bool live,
                           int64_t length) {
    if (!live || !share.template has<T>(v, length)) return;
    const int first = share.at(v) * Vec<T>::size;
    if constexpr (WHOLE && STREAMED) {
        store_streamed(row + first, part);
    } else if constexpr (WHOLE) {
        store_vec(row + first, part);
    } else {
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
__device__ inline float shuffle_from(float x, int lane) { return __shfl_sync(FULL_MASK, x, lane); }
__device__ inline Pair shuffle_from(Pair x, int lane) {
    return {shuffle_from(x.first, lane), shuffle_from(x.second, lane)};
}

// Where the warps that share a row leave their values for each other. In shared memory.
template <bool CLUSTER, typename V>
struct Mailbox {
    V slots[ROW_THREADS / WARP];
};
template <typename V>
struct Mailbox<true, V> {
    V slots[MAX_CLUSTER * ROW_THREADS / WARP];
    uint64_t arrived;  // an mbarrier, which counts what has come
};

// The result of `op` over so many neighbouring lanes, a power of two.
template <typename V, typename Op>
__device__ V over_lanes(V value, Op op, int lanes) {
#pragma unroll
    for (int l = WARP / 2; l > 0; l /= 2) {
        if (l < lanes) value = op(value, shuffle_xor(value, l));
    }
    return value;
}

struct Nothing {
    __device__ void operator()() const {}
};

// Leaves the `value` of each warp for all threads that share a row, where several warps do, and returns how many there
// then are, a power of two, at `slots`. All threads of the block call it, once a mailbox. Of rows that several warps
// share a block has few, whose threads may as well wait for each other. In a cluster, where they wait for longer, each
// calls `meanwhile()` first: for loads that would else come later.
template <bool CLUSTER, typename V, typename F = Nothing>
__device__ int leave_for_row(const V& value, Mailbox<CLUSTER, V>& mailbox, const V*& slots, F&& meanwhile = F{}) {
    const int warps = blockDim.x / WARP, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
#if __CUDA_ARCH__ >= 900
    if constexpr (CLUSTER) {  // every warp writes to every block
        const uint32_t arrived = shared_address(&mailbox.arrived);
        const int blocks = static_cast<int>(cluster::blocks()), count = blocks * warps;
        if (threadIdx.x == 0) mbarrier_arrive_expect(arrived, count * sizeof(V));
        if (lane < blocks) {
            cluster::send(&mailbox.slots[cluster::rank() * warps + warp], value, &mailbox.arrived, lane);
        }
        meanwhile();
        mbarrier_wait(arrived, 0);
        slots = mailbox.slots;
        return count;
    }
#endif
    slots = mailbox.slots + threadIdx.y * warps;
    if (lane == 0) mailbox.slots[threadIdx.y * warps + warp] = value;
    __syncthreads();
    return warps;
}

// The result of `op`, associative and commutative, over the values of all threads that share a row; each of them gets
// it. All threads of the block call it, once a mailbox. V is a float or a Pair.
template <bool CLUSTER, typename V, typename Op, typename F = Nothing>
__device__ V reduce_over_row(V value, Op op, Mailbox<CLUSTER, V>& mailbox, F&& meanwhile = F{}) {
    value = over_lanes(value, op, min(static_cast<int>(blockDim.x), WARP));
    if (!CLUSTER && blockDim.x <= WARP) return value;
    const V* slots;
    const int count = leave_for_row(value, mailbox, slots, meanwhile), lane = threadIdx.x % WARP;
    value = slots[lane & (count - 1)];
#pragma unroll 1  // two or three times at most
    for (int slot = WARP + lane; slot < count; slot += WARP) value = op(value, slots[slot]);
    return over_lanes(value, op, min(count, WARP));
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

// How a row of `chunks` vectors is shared: threads of a block, rows of a block, blocks of a cluster, vectors of a thread.
// Blocks of a cluster are a power of two: more of those fit in the 16 or 18 SMs that one must lie in.
struct RowLaunch {
    unsigned threads, rows, cluster;
    int vectors = ROW_VECTORS;

    dim3 block() const { return dim3(threads, rows); }
    unsigned grid(int64_t count) const { return grid_size(ceil_div(count, rows) * cluster); }
};

constexpr int MIN_BLOCK = 64;  // the smaller, the sooner what one leaves is taken again

// Vectors of the longest row that one block, or one cluster, can hold.
constexpr int64_t MAX_BLOCK_CHUNKS = int64_t{ROW_THREADS} * ROW_VECTORS;
constexpr int64_t MAX_CLUSTER_CHUNKS = MAX_BLOCK_CHUNKS * MAX_CLUSTER;

// Threads that share such a row, `most` at most: a power of two, so that a part of a warp can reduce by shuffles.
inline unsigned row_threads(int64_t chunks, int vectors, int64_t most) {
    unsigned threads = 4;
    while (threads < most && int64_t{threads} * vectors < chunks) threads *= 2;
    return threads;
}

// Blocks that share such a row, of which each can hold so many of its vectors.
inline unsigned cluster_blocks(int64_t chunks, int64_t of_block) {
    unsigned blocks = 1;
    while (int64_t{blocks} * of_block < chunks) blocks *= 2;
    return blocks;
}

// Of rows of more vectors than `narrow` a thread takes `wide`, of others ROW_VECTORS.
inline RowLaunch row_launch(int64_t chunks, bool clusters, int wide = ROW_VECTORS, int64_t narrow = 512) {
    const int64_t limit = clusters ? MAX_CLUSTER_CHUNKS : MAX_BLOCK_CHUNKS;
    KL_CHECK(chunks <= limit, "a row of ", chunks, " vectors of 16 bytes is longer than fits: ", limit);
    if (chunks <= int64_t{ROW_THREADS} * wide) {
        const int vectors = chunks > narrow ? wide : ROW_VECTORS;
        const unsigned threads = row_threads(chunks, vectors, ROW_THREADS);
        return {threads, threads < MIN_BLOCK ? MIN_BLOCK / threads : 1, 1, vectors};
    }
    return {ROW_THREADS, 1, cluster_blocks(chunks, int64_t{ROW_THREADS} * wide), wide};
}

// Launches `kernel(arguments…)`, one of those that share rows as `shape` says, on `grid` blocks. Early (core/pdl.cuh),
// unless a row takes a cluster: in what that takes a microsecond does not show, and its parameters may then be CONSTANT.
template <typename... Parameters, typename... Arguments>
void launch_rows(void (*kernel)(Parameters...), const RowLaunch& shape, unsigned grid, int shared_bytes,
                 const Launch& launch, Arguments... arguments) {
    allow_clusters(kernel, shape.cluster);
    KL_CHECK(shape.cluster == 1 || has_hopper_code(kernel, launch.device), NO_CLUSTERS);
    LaunchConfig(dim3(grid), shape.block(), shared_bytes, launch)
        .clusters_of(shape.cluster)
        .early(shape.cluster == 1 && has_hopper_code(kernel, launch.device))
        .run(kernel, arguments...);
}

// Calls f(vectors, whole, cluster), all three as types of constants, which is what a kernel of rows is compiled for: whole
// vectors FEW a thread or the next of MORE that is enough, in clusters the last. Rows element by element take ROW_VECTORS.
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
