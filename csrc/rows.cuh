// Rows: one dimension of a tensor, taken as a whole by threads that share it. Where rows lie, how a thread reads its part
// of one, and how those that share a row agree on a sum or a maximum: within a warp, a block, or a cluster of blocks.
#pragma once

#include <numeric>

#include "cluster.cuh"
#include "common.cuh"
#include "resident.cuh"

namespace kl {

// The rows of one operand: where each starts, and how far apart its elements lie.
struct Rows {
    Strided walk;
    int64_t stride;
    bool whole;  // rows are dense and start on 16 bytes: vectors can be loaded and stored whole

    __device__ int64_t start(int64_t row) const { return walk.offset(row); }

    // Whether they lie evenly apart, and how far.
    bool even() const { return walk.dims <= 1; }
    __device__ int64_t step() const { return walk.dims > 0 ? walk.strides[0] : 0; }

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

constexpr int MAX_CLUSTER = 16;    // that Hopper runs, when asked to
constexpr int ROW_THREADS = 512;   // of a block at most: an SM holds several, of which one loads while another stores
constexpr int ROW_VECTORS = 4;     // in flight a thread: 64 bytes, times the threads of an SM, cover memory's latency
constexpr int WIDE_THREADS = 256;  // the same for long rows where a thread holds nothing but one row's vectors: what
constexpr int WIDE_VECTORS = 8;    // it does once a row then weighs half as much

// Threads of a block that takes V vectors a thread, at most.
template <int V>
constexpr int block_of = V == WIDE_VECTORS ? WIDE_THREADS : ROW_THREADS;

// How many of them an SM is to have room for: 1024 threads of 64 registers, or half as many where rows come element by
// element, which takes more.
template <int V, bool WHOLE>
constexpr int blocks_an_sm = 1024 / block_of<V> / (WHOLE ? 1 : 2);

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

// Clusters stay, and go from row to row: to begin one costs its blocks a meeting. Not those of rows element by element:
// the compiler would keep the address of each.
template <bool WHOLE, bool CLUSTER>
constexpr bool STAYS = WHOLE && CLUSTER;

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
        }
#endif
    }

    // Calls f(row, live, turn) for every row of this thread, which is one where it does not STAY. A thread without a row
    // (not `live`) joins in what needs all.
    template <bool STAY, typename F>
    __device__ void each_row(int64_t count, F&& f) const {
        if constexpr (STAY) {
            int turn = 0;
            for (int64_t at = row; at < count; at += rows_at_once, ++turn) f(at, true, turn);
        } else {
            f(row < count ? row : 0, row < count, 0);
        }
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
        const int first = (share.first + v * share.step) * Vec<T>::size;  // a row in registers is not long
        if constexpr (WHOLE) {
            // As one word of 16 bytes, whose loads ptxas issues one after the other: of a vector's elements it makes
            // choices one by one, and waits for each load in between.
            uint4 word = filled<T>(fill);
            if (live && first < static_cast<int>(length)) word = *reinterpret_cast<const uint4*>(row + first);
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
    const int first = (share.first + v * share.step) * Vec<T>::size;  // a row in registers is not long
    if constexpr (WHOLE) {
        if (live && first < static_cast<int>(length)) store_vec(row + first, part);
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

// The result of `op`, associative and commutative, over the values of all threads that share a row; each of them gets
// it. All threads of the block call it. V is a float or a Pair. A mailbox may serve again after a call with another one:
// by then all have read it. `turn` says how often it has served. Of rows that several warps share a block has few, whose
// threads may as well wait for each other.
template <bool CLUSTER, typename V, typename Op>
__device__ V reduce_over_row(V value, Op op, Mailbox<CLUSTER, V>& mailbox, int turn) {
    const int warps = blockDim.x / WARP, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    value = over_lanes(value, op, min(static_cast<int>(blockDim.x), WARP));
    if constexpr (CLUSTER) {
#if __CUDA_ARCH__ >= 900
        // Every warp writes to every block. All numbers are powers of two.
        const uint32_t arrived = shared_address(&mailbox.arrived);
        const int blocks = static_cast<int>(cluster::blocks()), slots = blocks * warps;
        if (threadIdx.x == 0) mbarrier_arrive_expect(arrived, slots * sizeof(V));
        if (lane < blocks) {
            cluster::send(&mailbox.slots[cluster::rank() * warps + warp], value, &mailbox.arrived, lane);
        }
        mbarrier_wait(arrived, turn % 2);
        value = mailbox.slots[lane & (slots - 1)];
        for (int slot = WARP + lane; slot < slots; slot += WARP) value = op(value, mailbox.slots[slot]);
        value = over_lanes(value, op, min(slots, WARP));
#endif
    } else if (warps > 1) {
        V* const slots = mailbox.slots + threadIdx.y * warps;
        if (lane == 0) slots[warp] = value;
        __syncthreads();
        value = over_lanes(slots[lane & (warps - 1)], op, warps);  // a power of two
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

// How a row of `chunks` vectors is shared: threads of a block, rows of a block, blocks of a cluster, vectors of a thread.
// Blocks of a cluster are a power of two: more of those fit in the 16 or 18 SMs that one must lie in.
struct RowLaunch {
    unsigned threads, rows, cluster;
    int vectors = ROW_VECTORS;

    dim3 block() const { return dim3(threads, rows); }
    unsigned grid(int64_t count) const { return grid_size(ceil_div(count, rows) * cluster); }
};

constexpr int MIN_BLOCK = 128;

// Vectors of the longest row that one block, or one cluster, can hold.
constexpr int64_t MAX_BLOCK_CHUNKS = int64_t{ROW_THREADS} * ROW_VECTORS;
constexpr int64_t MAX_CLUSTER_CHUNKS = MAX_BLOCK_CHUNKS * MAX_CLUSTER;
static_assert(WIDE_THREADS * WIDE_VECTORS == ROW_THREADS * ROW_VECTORS);

// Threads that share such a row, `most` at most: a power of two, so that a part of a warp can reduce by shuffles.
inline unsigned row_threads(int64_t chunks, unsigned vectors, unsigned most) {
    unsigned threads = 4;
    while (threads < most && threads * vectors < chunks) threads *= 2;
    return threads;
}

// `wide`: of long rows a thread takes WIDE_VECTORS.
inline RowLaunch row_launch(int64_t chunks, bool clusters, bool wide = false) {
    wide = wide && chunks > MIN_BLOCK * ROW_VECTORS;
    const unsigned vectors = wide ? WIDE_VECTORS : ROW_VECTORS, most = wide ? WIDE_THREADS : ROW_THREADS;
    const unsigned threads = row_threads(chunks, vectors, most);
    if (threads < MIN_BLOCK) return {threads, MIN_BLOCK / threads, 1};
    const int64_t limit = clusters ? MAX_CLUSTER_CHUNKS : MAX_BLOCK_CHUNKS;
    KL_CHECK(chunks <= limit, "a row of ", chunks, " vectors of 16 bytes is longer than fits: ", limit);
    unsigned cluster = 1;
    while (int64_t{cluster} * threads * vectors < chunks) cluster *= 2;
    return {threads, 1, cluster, static_cast<int>(vectors)};
}

// Launches `kernel(arguments…)`, one of those that share rows as `shape` says, on `grid` blocks.
template <typename... Parameters, typename... Arguments>
void launch_rows(void (*kernel)(Parameters...), const RowLaunch& shape, unsigned grid, int shared_bytes,
                 const Launch& launch, Arguments... arguments) {
    if (shape.cluster == 1) {
        kernel<<<grid, shape.block(), shared_bytes, launch.stream>>>(arguments...);
        return;
    }
    ClusterConfig config(kernel, shape.block(), shape.cluster, grid, shared_bytes, launch);
    KL_CUDA_CHECK(cudaLaunchKernelEx(&config.config, kernel, static_cast<Parameters>(arguments)...));
}

// Calls f(vectors, whole, cluster), all three as types of constants, which is what a kernel of rows is compiled for: whole
// vectors FEW or MANY a thread, MANY in clusters. Rows element by element take ROW_VECTORS.
template <int FEW, int MANY, typename F>
void with_row_shape(const RowLaunch& shape, bool whole, F&& f) {
    using Few = std::integral_constant<int, FEW>;
    using Many = std::integral_constant<int, MANY>;
    using Single = std::integral_constant<int, ROW_VECTORS>;
    using Yes = std::true_type;
    using No = std::false_type;
    if (!whole) return shape.cluster > 1 ? f(Single{}, No{}, Yes{}) : f(Single{}, No{}, No{});
    if (shape.cluster > 1) return f(Many{}, Yes{}, Yes{});
    if (shape.vectors > FEW) return f(Many{}, Yes{}, No{});
    f(Few{}, Yes{}, No{});
}

// Launches `KERNEL(arguments…)` for `count` rows, on blocks or clusters that stay or do not.
template <auto* KERNEL, bool STAY, typename... Arguments>
void launch_for_rows(const RowLaunch& shape, int64_t count, int shared_bytes, const Launch& launch,
                     Arguments... arguments) {
    unsigned grid = shape.grid(count);
    if constexpr (STAY) {
        static Resident resident;
        const int64_t clusters = resident.clusters(KERNEL, shape.block(), shape.cluster, shared_bytes, launch);
        grid = grid_size(std::min(count, clusters) * shape.cluster);
    }
    launch_rows(KERNEL, shape, grid, shared_bytes, launch, arguments...);
}

}  // namespace kl
