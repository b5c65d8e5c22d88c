// Softmax along one dimension: exp(x − max x) / Σ exp(x − max x).
//
//   variant    the one idea it adds                                         what limits it now
//   naive      one thread a row: maximum, sum, quotient, a pass each        uncoalesced reads, three of them
//   online     one block a row; maximum and sum in one pass (Milakov and    the second read of the input
//              Gimelshein, arXiv:1805.02867), 16-byte loads
//   shared     the row stays in shared memory: one read, one write          short rows: idle lanes, two reductions;
//                                                                           long ones: an SM that holds one row
//   registers  the row stays in registers, shared by as many threads as     rows that fill an SM's registers
//              suit its length: a part of a warp, a warp, a block
//   cluster    a long row is spread over the SMs of a cluster, which meet   memory bandwidth
//              in distributed shared memory; one that outgrows their
//              registers comes from the L2 the second time
//
// Any strides: rows start where the other dimensions put them, and step by the dimension's own stride.

#include <cuda_pipeline.h>

#include "core/common.cuh"
#include "core/ops.h"
#include "reduce/short_rows.cuh"
#include "softmax/tile.cuh"

namespace kl {
namespace {

// A row is shared by blockDim.x threads: one warp (several rows a block), or the whole block.
template <typename Op>
__device__ float row_reduce(float value, Op op, float* scratch) {
    return blockDim.x == WARP ? warp_reduce(value, op) : block_reduce(value, op, scratch);
}

// ---- naive: one thread a row, three passes -------------------------------------------------------------------------

template <typename T>
__global__ void softmax_naive_kernel(T* output, Rows out_rows, const T* input, Rows in_rows, int64_t count,
                                     int64_t length) {
    const int64_t row = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (row >= count) return;
    const T* in = input + in_rows.start(row);
    T* out = output + out_rows.start(row);
    float row_max = Max::identity;
    CompensatedSum row_sum;
    for (int64_t i = 0; i < length; ++i) row_max = Max{}(row_max, to_float(in[i * in_rows.stride]));
    for (int64_t i = 0; i < length; ++i) row_sum.add(fast_exp(to_float(in[i * in_rows.stride]) - row_max));
    for (int64_t i = 0; i < length; ++i) {
        out[i * out_rows.stride] = from_float<T>(fast_exp(to_float(in[i * in_rows.stride]) - row_max) / row_sum.sum);
    }
}

// d input = output · (grad − Σ grad · output)
template <typename T>
__global__ void softmax_backward_naive_kernel(T* grad_input, Rows gi_rows, const T* grad, Rows g_rows, const T* output,
                                              Rows o_rows, int64_t count, int64_t length) {
    const int64_t row = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (row >= count) return;
    const T* g = grad + g_rows.start(row);
    const T* o = output + o_rows.start(row);
    T* gi = grad_input + gi_rows.start(row);
    CompensatedSum dot;
    for (int64_t i = 0; i < length; ++i) dot.add(to_float(g[i * g_rows.stride]) * to_float(o[i * o_rows.stride]));
    for (int64_t i = 0; i < length; ++i) {
        const float y = to_float(o[i * o_rows.stride]);
        gi[i * gi_rows.stride] = from_float<T>(y * (to_float(g[i * g_rows.stride]) - dot.sum));
    }
}

// ---- online: one block a row, maximum and sum in one pass -----------------------------------------------------------

constexpr int ONLINE_THREADS = 512;
constexpr int ONLINE_UNROLL = 2;

template <typename T>
__global__ void __launch_bounds__(ONLINE_THREADS)
    softmax_online_kernel(T* output, Rows out_rows, const T* input, Rows in_rows, int64_t length) {
    __shared__ float scratch[WARP];
    const T* in = input + in_rows.start(blockIdx.x);
    T* out = output + out_rows.start(blockIdx.x);
    constexpr int64_t STEP = int64_t{ONLINE_THREADS} * Vec<T>::size;

    float row_max = Max::identity, row_sum = 0.0f;
    for (int64_t base = threadIdx.x * Vec<T>::size; base < length; base += ONLINE_UNROLL * STEP) {
        Vec<T> v[ONLINE_UNROLL];
        float x[ONLINE_UNROLL][Vec<T>::size];
#pragma unroll
        for (int u = 0; u < ONLINE_UNROLL; ++u) v[u] = load_chunk(in, in_rows, base + u * STEP, length, NEG_INF);
        float new_max = row_max;
#pragma unroll
        for (int u = 0; u < ONLINE_UNROLL; ++u) {
            unpack(v[u], x[u]);
#pragma unroll
            for (int e = 0; e < Vec<T>::size; ++e) new_max = fmaxf(new_max, x[u][e]);
        }
        const float shift = finite_or_zero(new_max);
        row_sum *= fast_exp(row_max - shift);
#pragma unroll
        for (int u = 0; u < ONLINE_UNROLL; ++u) {
#pragma unroll
            for (int e = 0; e < Vec<T>::size; ++e) row_sum += fast_exp(x[u][e] - shift);
        }
        row_max = new_max;
    }
    const float thread_max = row_max;
    row_max = block_reduce(row_max, Max{}, scratch);
    if (thread_max != NEG_INF) row_sum *= fast_exp(thread_max - row_max);  // else it is the sum of nothing, or NaN
    row_sum = block_reduce(row_sum, Sum{}, scratch);

    const float scale = 1.0f / row_sum;
    for (int64_t first = threadIdx.x * Vec<T>::size; first < length; first += STEP) {
        float x[Vec<T>::size];
        unpack(load_chunk(in, in_rows, first, length, NEG_INF), x);
#pragma unroll
        for (int e = 0; e < Vec<T>::size; ++e) x[e] = fast_exp(x[e] - row_max) * scale;
        store_chunk(out, out_rows, pack<T>(x), first, length);
    }
}

template <typename T>
__global__ void __launch_bounds__(ONLINE_THREADS)
    softmax_backward_online_kernel(T* grad_input, Rows gi_rows, const T* grad, Rows g_rows, const T* output,
                                   Rows o_rows, int64_t length) {
    __shared__ float scratch[WARP];
    const T* g_row = grad + g_rows.start(blockIdx.x);
    const T* o_row = output + o_rows.start(blockIdx.x);
    T* gi_row = grad_input + gi_rows.start(blockIdx.x);
    constexpr int64_t STEP = int64_t{ONLINE_THREADS} * Vec<T>::size;

    float dot = 0.0f, g[Vec<T>::size], o[Vec<T>::size];
    for (int64_t first = threadIdx.x * Vec<T>::size; first < length; first += STEP) {
        unpack(load_chunk(g_row, g_rows, first, length, 0.0f), g);
        unpack(load_chunk(o_row, o_rows, first, length, 0.0f), o);
#pragma unroll
        for (int e = 0; e < Vec<T>::size; ++e) dot += g[e] * o[e];
    }
    dot = block_reduce(dot, Sum{}, scratch);
    for (int64_t first = threadIdx.x * Vec<T>::size; first < length; first += STEP) {
        unpack(load_chunk(g_row, g_rows, first, length, 0.0f), g);
        unpack(load_chunk(o_row, o_rows, first, length, 0.0f), o);
#pragma unroll
        for (int e = 0; e < Vec<T>::size; ++e) g[e] = o[e] * (g[e] - dot);
        store_chunk(gi_row, gi_rows, pack<T>(g), first, length);
    }
}

// ---- shared: the row stays on chip ---------------------------------------------------------------------------------

// Brings a row to shared memory. Each thread fetches, and later reads, its own chunks only, so no barrier is needed.
// cp.async leaves every load of the row in flight at once, without a register to wait for it.
template <typename T>
__device__ void fetch_row(Vec<T>* row_on_chip, const T* row, const Rows& rows, int64_t length, float fill) {
    const int chunks = static_cast<int>((length + Vec<T>::size - 1) / Vec<T>::size);
    for (int c = threadIdx.x; c < chunks; c += blockDim.x) {
        const int64_t first = int64_t{c} * Vec<T>::size;
        if (rows.whole && first + Vec<T>::size <= length) {
            __pipeline_memcpy_async(&row_on_chip[c], row + first, 16);
        } else {
            row_on_chip[c] = load_chunk(row, rows, first, length, fill);
        }
    }
}

template <typename T>
__global__ void softmax_shared_kernel(T* output, Rows out_rows, const T* input, Rows in_rows, int64_t count,
                                      int64_t length) {
    extern __shared__ __align__(16) unsigned char shared[];
    __shared__ float scratch[WARP];
    const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
    if (row >= count) return;  // a whole warp: rows are shared by a warp where a block has several
    const int chunks = static_cast<int>((length + Vec<T>::size - 1) / Vec<T>::size);
    Vec<T>* row_on_chip = reinterpret_cast<Vec<T>*>(shared) + threadIdx.y * chunks;
    fetch_row(row_on_chip, input + in_rows.start(row), in_rows, length, NEG_INF);
    __pipeline_commit();
    __pipeline_wait_prior(0);

    float row_max = Max::identity, row_sum = 0.0f, x[Vec<T>::size];
    for (int c = threadIdx.x; c < chunks; c += blockDim.x) {
        unpack(row_on_chip[c], x);
#pragma unroll
        for (int e = 0; e < Vec<T>::size; ++e) row_max = fmaxf(row_max, x[e]);
    }
    row_max = row_reduce(row_max, Max{}, scratch);
    for (int c = threadIdx.x; c < chunks; c += blockDim.x) {
        unpack(row_on_chip[c], x);
#pragma unroll
        for (int e = 0; e < Vec<T>::size; ++e) row_sum += fast_exp(x[e] - row_max);
    }
    const float scale = 1.0f / row_reduce(row_sum, Sum{}, scratch);
    T* out = output + out_rows.start(row);
    for (int c = threadIdx.x; c < chunks; c += blockDim.x) {
        unpack(row_on_chip[c], x);
#pragma unroll
        for (int e = 0; e < Vec<T>::size; ++e) x[e] = fast_exp(x[e] - row_max) * scale;
        store_chunk(out, out_rows, pack<T>(x), int64_t{c} * Vec<T>::size, length);
    }
}

template <typename T>
__global__ void softmax_backward_shared_kernel(T* grad_input, Rows gi_rows, const T* grad, Rows g_rows, const T* output,
                                               Rows o_rows, int64_t count, int64_t length) {
    extern __shared__ __align__(16) unsigned char shared[];
    __shared__ float scratch[WARP];
    const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
    if (row >= count) return;
    const int chunks = static_cast<int>((length + Vec<T>::size - 1) / Vec<T>::size);
    Vec<T>* g_on_chip = reinterpret_cast<Vec<T>*>(shared) + threadIdx.y * 2 * chunks;
    Vec<T>* o_on_chip = g_on_chip + chunks;
    fetch_row(g_on_chip, grad + g_rows.start(row), g_rows, length, 0.0f);
    fetch_row(o_on_chip, output + o_rows.start(row), o_rows, length, 0.0f);
    __pipeline_commit();
    __pipeline_wait_prior(0);

    float dot = 0.0f, g[Vec<T>::size], o[Vec<T>::size];
    for (int c = threadIdx.x; c < chunks; c += blockDim.x) {
        unpack(g_on_chip[c], g);
        unpack(o_on_chip[c], o);
#pragma unroll
        for (int e = 0; e < Vec<T>::size; ++e) dot += g[e] * o[e];
    }
    dot = row_reduce(dot, Sum{}, scratch);
    T* gi = grad_input + gi_rows.start(row);
    for (int c = threadIdx.x; c < chunks; c += blockDim.x) {
        unpack(g_on_chip[c], g);
        unpack(o_on_chip[c], o);
#pragma unroll
        for (int e = 0; e < Vec<T>::size; ++e) g[e] = o[e] * (g[e] - dot);
        store_chunk(gi, gi_rows, pack<T>(g), int64_t{c} * Vec<T>::size, length);
    }
}

// ---- registers: the row stays in the registers of the threads that share it -------------------------------------------

template <typename T, int V, bool WHOLE, bool CLUSTER>
__global__ void __launch_bounds__(ROW_THREADS, BLOCKS_AN_SM<WHOLE>)
    softmax_registers_kernel(T* output, __grid_constant__ const Rows out_rows, const T* input,
                             __grid_constant__ const Rows in_rows, int64_t count, int64_t length) {
    if (!exists_here<CLUSTER>()) return;
    __shared__ Mailbox<CLUSTER, Pair> mailbox;
    const RowShare<CLUSTER> share(vectors_of<T>(length));
    share.open(mailbox);
    if constexpr (!CLUSTER) begin_early();
    const bool live = share.live(count);
    const int64_t row = live ? share.row : 0;
    Vec<T> tile[V];
    load_row<WHOLE>(tile, input + in_rows.start(row), in_rows, share, live, length, NEG_INF);
    share.meet();
    const Pair peak = reduce_over_row(peak_of(tile), Peak{}, mailbox);
    T* const out = output + out_rows.start(row);
    divide_by(tile, peak,
              [&](int v, const Vec<T>& part) { store_part<WHOLE>(out, out_rows, part, v, share, live, length); });
}

// ---- registers, short rows: several a warp ---------------------------------------------------------------------------

// No more than is looked at, all in one place: a launch waits for each line of its arguments.
template <typename T>
struct ShortRows {
    T* output;
    const T* input;
    int64_t out_step, in_step, count;  // elements from row to row; rows
    int length;
};

// Powers of two stay as floats until their sum is known. −max · log2 e is rounded, by the same for all of a row, unless
// it is so far that the power overflows; of a far maximum the differences are taken first.
template <typename T, int ROWS>
__global__ void __launch_bounds__(MIN_BLOCK, SHORT_BLOCKS)
    softmax_registers_short_kernel(__grid_constant__ const ShortRows<T> p) {
    begin_early();
    constexpr int E = Vec<T>::size, V = SHORT_VECTORS<T, ROWS>;
    const ShortShare<ROWS> share(p.count, p.length);
    Vec<T> tile[ROWS][V];
    share.load(tile, p.input, p.in_step, NEG_INF);
    float top[ROWS], sum[ROWS], x[ROWS][V * E];
    bool far = false;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) top[r] = max_of(tile[r]);
    each_over_lanes(top, Max{}, share.lanes);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) far = far || is_far(top[r]);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        sum[r] = 0.0f;
        const float moved = -top[r] * LOG2E;
#pragma unroll
        for (int v = 0; v < V; ++v) {
            float part[E], partial = 0.0f;
            unpack(tile[r][v], part);
#pragma unroll
            for (int e = 0; e < E; ++e) {
                const float y = far ? (part[e] - top[r]) * LOG2E : fmaf(part[e], LOG2E, moved);
                x[r][v * E + e] = exp2_approx(y);
                partial += x[r][v * E + e];
            }
            sum[r] += partial;
        }
    }
    each_over_lanes(sum, Sum{}, share.lanes);
    T* output = share.begin(p.output, p.out_step);
#pragma unroll
    for (int r = 0; r < ROWS; ++r, output += share.next(p.out_step)) {
        const float scale = 1.0f / sum[r];
#pragma unroll
        for (int v = 0; v < V; ++v) {
            float part[E];
#pragma unroll
            for (int e = 0; e < E; ++e) part[e] = x[r][v * E + e] * scale;
            share.store(output + v * share.lanes * E, r, v, pack<T>(part));
        }
    }
}

template <typename T, bool WHOLE, bool CLUSTER>
__global__ void __launch_bounds__(ROW_THREADS, BLOCKS_AN_SM<WHOLE>)
    softmax_backward_registers_kernel(T* grad_input, __grid_constant__ const Rows gi_rows, const T* grad,
                                      __grid_constant__ const Rows g_rows, const T* output,
                                      __grid_constant__ const Rows o_rows, int64_t count, int64_t length) {
    if (!exists_here<CLUSTER>()) return;
    __shared__ Mailbox<CLUSTER, float> mailbox;
    const RowShare<CLUSTER> share(vectors_of<T>(length));
    share.open(mailbox);
    if constexpr (!CLUSTER) begin_early();
    const bool live = share.live(count);
    const int64_t row = live ? share.row : 0;
    Vec<T> g_tile[ROW_VECTORS], o_tile[ROW_VECTORS];
    load_row<WHOLE>(g_tile, grad + g_rows.start(row), g_rows, share, live, length, 0.0f);
    load_row<WHOLE>(o_tile, output + o_rows.start(row), o_rows, share, live, length, 0.0f);
    share.meet();
    const float dot = reduce_over_row(dot_of(g_tile, o_tile), Sum{}, mailbox);
    stay_packed(g_tile);
    stay_packed(o_tile);
    gradient_of(g_tile, o_tile, dot);
    store_row<WHOLE>(grad_input + gi_rows.start(row), gi_rows, g_tile, share, live, length);
}

// ---- cluster, rows that outgrow its registers ------------------------------------------------------------------------

// Such a row is read twice, by the largest cluster that there is. An SM has one block, or two where twice as many rows are
// still few enough to come from the L2 the second time. Then they are read backwards, since what was read last is sure to be
// there.
constexpr int MORE_THAN_HALF_AN_SM = 120 * 1024;  // of shared memory that nobody uses: room for one block
constexpr int FOR_REDUCTIONS = 4096;              // bytes of it, more than the kernels below take

// Calls f(share) for each piece of V vectors a thread of this block's part of a row, from its end backwards if so wanted.
template <int V, bool BACKWARDS, typename F>
__device__ void each_piece(const RowShare<true>& share, F&& f) {
    const int step = V * RowShare<true>::step(), begin = share.first - static_cast<int>(threadIdx.x);
    const int pieces = (share.end - begin + step - 1) / step;
#pragma unroll 1
    for (int i = 0; i < pieces; ++i) {
        RowShare<true> piece = share;
        piece.first += (BACKWARDS ? pieces - 1 - i : i) * step;
        f(piece);
    }
}

template <typename T, bool WHOLE>
__global__ void __launch_bounds__(ROW_THREADS, BLOCKS_AN_SM<WHOLE>)
    softmax_registers_long_kernel(T* output, __grid_constant__ const Rows out_rows, const T* input,
                                  __grid_constant__ const Rows in_rows, int64_t length) {
    if (!exists_here<true>()) return;
    __shared__ Mailbox<true, Pair> mailbox;
    const RowShare<true> share(vectors_of<T>(length));
    share.open(mailbox);
    const T* const in = input + in_rows.start(share.row);
    Vec<T> tile[WIDE_VECTORS];
    Pair peak{NEG_INF, 0.0f};
    each_piece<WIDE_VECTORS, false>(share, [&](const RowShare<true>& piece) {
        load_row<WHOLE>(tile, in, in_rows, piece, true, length, NEG_INF);
        peak = Peak{}(peak, peak_of(tile));
    });
    share.meet();
    peak = reduce_over_row(peak, Peak{}, mailbox);
    T* const out = output + out_rows.start(share.row);
    each_piece<WIDE_VECTORS, true>(share, [&](const RowShare<true>& piece) {
        load_row<WHOLE>(tile, in, in_rows, piece, true, length, NEG_INF);
        divide_by(tile, peak,
                  [&](int v, const Vec<T>& part) { store_part<WHOLE>(out, out_rows, part, v, piece, true, length); });
    });
}

template <typename T, bool WHOLE>
__global__ void __launch_bounds__(ROW_THREADS, 1)
    softmax_backward_registers_long_kernel(T* grad_input, __grid_constant__ const Rows gi_rows, const T* grad,
                                           __grid_constant__ const Rows g_rows, const T* output,
                                           __grid_constant__ const Rows o_rows, int64_t length) {
    if (!exists_here<true>()) return;
    __shared__ Mailbox<true, float> mailbox;
    const RowShare<true> share(vectors_of<T>(length));
    share.open(mailbox);
    const T* const g = grad + g_rows.start(share.row);
    const T* const o = output + o_rows.start(share.row);
    T* const gi = grad_input + gi_rows.start(share.row);
    Vec<T> g_tile[ROW_VECTORS], o_tile[ROW_VECTORS];
    const auto load = [&](const RowShare<true>& piece) {
        load_row<WHOLE>(g_tile, g, g_rows, piece, true, length, 0.0f);
        load_row<WHOLE>(o_tile, o, o_rows, piece, true, length, 0.0f);
    };
    float dot = 0.0f;
    each_piece<ROW_VECTORS, false>(share, [&](const RowShare<true>& piece) {
        load(piece);
        dot += dot_of(g_tile, o_tile);
    });
    share.meet();
    dot = reduce_over_row(dot, Sum{}, mailbox);
    each_piece<ROW_VECTORS, true>(share, [&](const RowShare<true>& piece) {
        load(piece);
        gradient_of(g_tile, o_tile, dot);
        store_row<WHOLE>(gi, gi_rows, g_tile, piece, true, length);
    });
}

// ---- host ----------------------------------------------------------------------------------------------------------

enum class Step { naive, online, shared, registers, cluster };

// A warp a row where four chunks a thread or fewer hold it, four rows a block; else a block a row.
template <typename T>
dim3 shared_block(int64_t length) {
    const int64_t chunks = ceil_div(length, Vec<T>::size);
    if (chunks <= 4 * WARP) return dim3(WARP, 4);
    return dim3(
        static_cast<unsigned>(std::min<int64_t>(1024, std::max<int64_t>(128, ceil_div(chunks / 4, WARP) * WARP))));
}

template <typename T>
size_t shared_bytes(int64_t length, dim3 block, int rows_kept) {
    return static_cast<size_t>(ceil_div(length, Vec<T>::size)) * 16 * block.y * rows_kept;
}

// Blocks get 48 KB of dynamic shared memory unless a kernel asks for more, which costs two calls to the driver.
template <typename Kernel>
void allow_shared_row(Kernel* kernel, size_t bytes, const char* op) {
    constexpr size_t BY_DEFAULT = 48 * 1024, FOR_REDUCTIONS = 1024;
    if (bytes + FOR_REDUCTIONS <= BY_DEFAULT) return;
    int device = 0;
    KL_CUDA_CHECK(cudaGetDevice(&device));
    const int limit = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    KL_CHECK(bytes + FOR_REDUCTIONS <= static_cast<size_t>(limit), op, ": a row needs ", bytes,
             " bytes of shared memory, a block has ", limit);
    // As much in every call: another thread may launch a longer row meanwhile.
    KL_CUDA_CHECK(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                       cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       limit - static_cast<int>(FOR_REDUCTIONS)));
}

constexpr int NAIVE_THREADS = 128;

// Bytes of a row are those that it has to find again.
template <auto* KERNEL, typename... Arguments>
void launch_long_rows(const RowLayout& layout, int64_t row_bytes, const Launch& launch, Arguments... arguments) {
    KL_CHECK(layout.length <= 1 << 30, "a row of ", layout.length, " elements is longer than ", 1 << 30);
    static DeviceSet asked;
    // An SM of a GPU whose blocks may have less than that has less.
    const int alone = std::min(MORE_THAN_HALF_AN_SM, shared_limit(launch.device) - FOR_REDUCTIONS);
    allow_shared(KERNEL, alone, launch.device, asked);
    const RowLaunch shape{ROW_THREADS, 1, MAX_CLUSTER};
    const int64_t rows = 2 * multiprocessors(launch.device) / MAX_CLUSTER;
    const bool two = rows * row_bytes < int64_t{2} * device_attribute(cudaDevAttrL2CacheSize, launch.device) / 3;
    launch_rows(KERNEL, shape, shape.grid(layout.count), two ? 0 : alone, launch, arguments..., layout.length);
}

Tensor softmax(const Tensor& input, int64_t dim, Step step) {
    check_cuda(input, "softmax", "input");
    const Launch launch(input);
    const RowLayout layout(input, dim, "softmax");
    Tensor output = layout.dense.allocate(input);
    if (input.numel() == 0) return output;
    const Rows in = layout.rows(input, "softmax"), out = layout.rows(output, "softmax");
    dispatch(input.scalar_type(), "softmax", [&](auto zero) {
        using T = decltype(zero);
        if (step == Step::naive) {
            const auto grid = grid_size(ceil_div(layout.count, NAIVE_THREADS));
            softmax_naive_kernel<T><<<grid, NAIVE_THREADS, 0, launch.stream>>>(
                pointer<T>(output), out, pointer<T>(input), in, layout.count, layout.length);
        } else if (step == Step::online) {
            softmax_online_kernel<T><<<grid_size(layout.count), ONLINE_THREADS, 0, launch.stream>>>(
                pointer<T>(output), out, pointer<T>(input), in, layout.length);
        } else if (step == Step::registers || step == Step::cluster) {
            const bool whole = in.vectors<T>(layout.length) && out.vectors<T>(layout.length);
            if (layout.length <= SHORT_LENGTH && are_even(whole, in, out)) {
                const ShortRows<T> args{pointer<T>(output), pointer<T>(input), out.step(),
                                        in.step(),          layout.count,      static_cast<int>(layout.length)};
                return with_short_rows<T>(layout.count, layout.length, [&](auto rows, unsigned grid, dim3 block) {
                    launch_early(softmax_registers_short_kernel<T, rows()>, grid, block, launch, args);
                });
            }
            if (step == Step::cluster && layout.chunks<T>() > MAX_CLUSTER_CHUNKS) {
                return with_constant(whole, [&](auto w) {
                    launch_long_rows<softmax_registers_long_kernel<T, decltype(w)::value>>(
                        layout, layout.length * sizeof(T), launch, pointer<T>(output), out, pointer<T>(input), in);
                });
            }
            const RowLaunch shape =
                row_launch(layout.chunks<T>(), step == Step::cluster, whole ? WIDE_VECTORS : ROW_VECTORS);
            with_row_shape<ROW_VECTORS, WIDE_VECTORS>(shape, whole, [&](auto v, auto w, auto c) {
                launch_rows(softmax_registers_kernel<T, v(), w(), c()>, shape, shape.grid(layout.count), 0, launch,
                            pointer<T>(output), out, pointer<T>(input), in, layout.count, layout.length);
            });
        } else {
            const dim3 block = shared_block<T>(layout.length);
            const size_t bytes = shared_bytes<T>(layout.length, block, 1);
            allow_shared_row(softmax_shared_kernel<T>, bytes, "softmax");
            softmax_shared_kernel<T><<<grid_size(ceil_div(layout.count, block.y)), block, bytes, launch.stream>>>(
                pointer<T>(output), out, pointer<T>(input), in, layout.count, layout.length);
        }
    });
    KL_LAUNCH_CHECK();
    return output;
}

Tensor softmax_backward(const Tensor& grad, const Tensor& output, int64_t dim, Step step) {
    check_cuda(grad, "softmax_backward", "grad");
    check_like(output, grad, "softmax_backward", "output");
    check_same_shape(output, grad, "softmax_backward", "output");
    const Launch launch(output);
    const RowLayout layout(output, dim, "softmax_backward");
    Tensor grad_input = layout.dense.allocate(output);
    if (output.numel() == 0) return grad_input;
    const Rows g = layout.rows(grad, "softmax_backward"), o = layout.rows(output, "softmax_backward");
    const Rows gi = layout.rows(grad_input, "softmax_backward");
    dispatch(output.scalar_type(), "softmax_backward", [&](auto zero) {
        using T = decltype(zero);
        if (step == Step::naive) {
            const auto grid = grid_size(ceil_div(layout.count, NAIVE_THREADS));
            softmax_backward_naive_kernel<T><<<grid, NAIVE_THREADS, 0, launch.stream>>>(
                pointer<T>(grad_input), gi, pointer<T>(grad), g, pointer<T>(output), o, layout.count, layout.length);
        } else if (step == Step::online) {
            softmax_backward_online_kernel<T><<<grid_size(layout.count), ONLINE_THREADS, 0, launch.stream>>>(
                pointer<T>(grad_input), gi, pointer<T>(grad), g, pointer<T>(output), o, layout.length);
        } else if (step == Step::registers || step == Step::cluster) {
            const bool whole =
                g.vectors<T>(layout.length) && o.vectors<T>(layout.length) && gi.vectors<T>(layout.length);
            if (step == Step::cluster && layout.chunks<T>() > MAX_CLUSTER_CHUNKS) {
                return with_constant(whole, [&](auto w) {
                    launch_long_rows<softmax_backward_registers_long_kernel<T, decltype(w)::value>>(
                        layout, 2 * layout.length * sizeof(T), launch, pointer<T>(grad_input), gi, pointer<T>(grad), g,
                        pointer<T>(output), o);
                });
            }
            const RowLaunch shape = row_launch(layout.chunks<T>(), step == Step::cluster);
            with_constant(whole, [&](auto w) {
                constexpr bool WHOLE = decltype(w)::value;
                with_constant(shape.cluster > 1, [&](auto c) {
                    launch_rows(softmax_backward_registers_kernel<T, WHOLE, c()>, shape, shape.grid(layout.count), 0,
                                launch, pointer<T>(grad_input), gi, pointer<T>(grad), g, pointer<T>(output), o,
                                layout.count, layout.length);
                });
            });
        } else {
            const dim3 block = shared_block<T>(layout.length);
            const size_t bytes = shared_bytes<T>(layout.length, block, 2);
            allow_shared_row(softmax_backward_shared_kernel<T>, bytes, "softmax_backward");
            const auto grid = grid_size(ceil_div(layout.count, block.y));
            softmax_backward_shared_kernel<T><<<grid, block, bytes, launch.stream>>>(
                pointer<T>(grad_input), gi, pointer<T>(grad), g, pointer<T>(output), o, layout.count, layout.length);
        }
    });
    KL_LAUNCH_CHECK();
    return grad_input;
}

}  // namespace

Tensor softmax_naive(const Tensor& input, int64_t dim) { return softmax(input, dim, Step::naive); }
Tensor softmax_online(const Tensor& input, int64_t dim) { return softmax(input, dim, Step::online); }
Tensor softmax_shared(const Tensor& input, int64_t dim) { return softmax(input, dim, Step::shared); }
Tensor softmax_registers(const Tensor& input, int64_t dim) { return softmax(input, dim, Step::registers); }
Tensor softmax_cluster(const Tensor& input, int64_t dim) { return softmax(input, dim, Step::cluster); }
Tensor softmax_backward_naive(const Tensor& grad, const Tensor& output, int64_t dim) {
    return softmax_backward(grad, output, dim, Step::naive);
}
Tensor softmax_backward_online(const Tensor& grad, const Tensor& output, int64_t dim) {
    return softmax_backward(grad, output, dim, Step::online);
}
Tensor softmax_backward_shared(const Tensor& grad, const Tensor& output, int64_t dim) {
    return softmax_backward(grad, output, dim, Step::shared);
}
Tensor softmax_backward_registers(const Tensor& grad, const Tensor& output, int64_t dim) {
    return softmax_backward(grad, output, dim, Step::registers);
}
Tensor softmax_backward_cluster(const Tensor& grad, const Tensor& output, int64_t dim) {
    return softmax_backward(grad, output, dim, Step::cluster);
}

void softmax_kernel_facts(std::vector<KernelFacts>& facts, ScalarType dtype) {
    dispatch(dtype, "softmax", [&](auto zero) {
        using T = decltype(zero);
        facts.push_back(kernel_facts<softmax_naive_kernel<T>>("softmax.naive", NAIVE_THREADS));
        facts.push_back(kernel_facts<softmax_online_kernel<T>>("softmax.online", ONLINE_THREADS));
        // Shared memory grows with the row; these are the facts for rows of 4096.
        const dim3 block = shared_block<T>(4096);
        const auto bytes = static_cast<int64_t>(shared_bytes<T>(4096, block, 1));
        const int threads = static_cast<int>(block.x * block.y);
        facts.push_back(kernel_facts<softmax_shared_kernel<T>>("softmax.shared", threads, bytes));
        facts.push_back(kernel_facts<softmax_backward_naive_kernel<T>>("softmax_backward.naive", NAIVE_THREADS));
        facts.push_back(kernel_facts<softmax_backward_online_kernel<T>>("softmax_backward.online", ONLINE_THREADS));
        facts.push_back(kernel_facts<softmax_backward_shared_kernel<T>>("softmax_backward.shared", threads, 2 * bytes));
        facts.push_back(
            kernel_facts<softmax_registers_kernel<T, ROW_VECTORS, true, false>>("softmax.registers", MIN_BLOCK));
        facts.push_back(
            kernel_facts<softmax_registers_short_kernel<T, SHORT_ROWS>>("softmax.registers (short rows)", MIN_BLOCK));
        facts.push_back(
            kernel_facts<softmax_registers_kernel<T, WIDE_VECTORS, true, true>>("softmax.cluster", ROW_THREADS));
        facts.push_back(kernel_facts<softmax_registers_long_kernel<T, true>>("softmax.cluster (long rows)", ROW_THREADS,
                                                                             MORE_THAN_HALF_AN_SM));
        facts.push_back(
            kernel_facts<softmax_backward_registers_kernel<T, true, false>>("softmax_backward.registers", MIN_BLOCK));
        facts.push_back(
            kernel_facts<softmax_backward_registers_kernel<T, true, true>>("softmax_backward.cluster", ROW_THREADS));
        facts.push_back(kernel_facts<softmax_backward_registers_long_kernel<T, true>>(
            "softmax_backward.cluster (long rows)", ROW_THREADS, MORE_THAN_HALF_AN_SM));
    });
}

}  // namespace kl
