// sum: the sum over some dimensions of a tensor, of any strides. No atomics: the order of addition is fixed.
//
// `two_stage` launches the kernels of `coalesced`, twice where a sum is split, once where one wave of blocks is enough.

#include <type_traits>

#include "core/ops.h"
#include "core/pdl.cuh"
#include "reduce/dimensions.cuh"

namespace kl {
namespace {

constexpr int LOADS = 4;  // in flight per thread
// Enough to cover the latency of memory. Without this bound the compiler saves registers, and a thread waits for each
// load before it issues the next.
constexpr int BLOCKS_PER_SM = 4;

/// The type of partial sums: float32 for 16-bit values, added in a tree; float64 for float32, rounded once at the end.
/// An SM gets about two float32 per clock from memory, so that even two float64 units keep up.
template <typename T>
using Accumulator = std::conditional_t<sizeof(T) == 2, float, double>;

template <typename Out, typename Acc>
__device__ Out round_to(Acc x) {
    if constexpr (std::is_same_v<Out, Acc>) {
        return x;
    } else {
        return from_float<Out>(static_cast<float>(x));
    }
}

/// Destination of a kernel's sums: the output, rounded, or the partial sums `parts`, unrounded, where it is not null.
/// A choice at run time, once per sum: an instance of each kernel for both would take seconds to compile.
template <typename In, typename Out>
struct Target {
    Out* output;
    Accumulator<In>* parts;

    /// Stores a sum: at index `part` of the partial sums, or as output number `index`.
    __device__ void put(int64_t part, const Reduction& r, int64_t index, Accumulator<In> sum) const {
        if (parts != nullptr) {
            parts[part] = sum;
        } else {
            output[r.output.offset(index)] = round_to<Out>(sum);
        }
    }
};

template <typename Acc, int N>
__device__ Acc tree_sum(Acc (&x)[N]) {
#pragma unroll
    for (int n = N / 2; n > 0; n /= 2) {
#pragma unroll
        for (int i = 0; i < n; ++i) x[i] += x[i + n];
    }
    return x[0];
}

/// Converts one value, or those of one load, to the type of the partial sums.
template <typename Acc, typename T>
__device__ Acc to_accumulator(T x) {
    if constexpr (sizeof(T) == 2) {
        return to_float(x);
    } else {
        return static_cast<Acc>(x);
    }
}
template <typename Acc, typename T>
__device__ void unpack_as(const T& value, Acc (&x)[1]) {
    x[0] = to_accumulator<Acc>(value);
}
template <typename Acc, typename T>
__device__ void unpack_as(const Vec<T>& vec, Acc (&x)[Vec<T>::size]) {
    if constexpr (std::is_same_v<Acc, float>) {
        unpack(vec, x);
    } else {
#pragma unroll
        for (int e = 0; e < Vec<T>::size; ++e) x[e] = to_accumulator<Acc>(vec[e]);
    }
}

/// Loads units base, base + step, …, and zeros from `end` on. All offsets are computed before the first load, so that no
/// division separates two loads.
template <typename Unit, typename In, typename Offset>
__device__ void load_units(Unit (&tile)[LOADS], const In* first, int64_t base, int64_t step, int64_t end,
                           Offset offset_of) {
    int64_t offset[LOADS];
#pragma unroll
    for (int l = 0; l < LOADS; ++l) offset[l] = offset_of(base + l * step);
#pragma unroll
    for (int l = 0; l < LOADS; ++l) {
        tile[l] = Unit{};
        if (base + l * step < end) tile[l] = *reinterpret_cast<const Unit*>(first + offset[l]);
    }
}

template <typename Acc, typename Unit, typename In>
__device__ Acc sum_of_units(const Unit (&tile)[LOADS], const In*) {
    Acc of_load[LOADS], x[sizeof(Unit) / sizeof(In)];
#pragma unroll
    for (int l = 0; l < LOADS; ++l) {
        unpack_as(tile[l], x);
        of_load[l] = tree_sum(x);
    }
    return tree_sum(of_load);
}

/// Sums over the blockDim.x threads of a row, a power of two, and returns the result to the first of them.
template <typename Acc>
__device__ Acc sum_over_row(Acc value, Acc (&scratch)[THREADS / WARP]) {
    const int threads = static_cast<int>(blockDim.x);
    for (int lane = min(threads, WARP) / 2; lane > 0; lane /= 2) value += __shfl_xor_sync(FULL_MASK, value, lane);
    if (threads <= WARP) return value;
    const int warp = static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x) / WARP;
    if (threadIdx.x % WARP == 0) scratch[warp] = value;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int other = 1; other < threads / WARP; ++other) value += scratch[warp + other];
    }
    return value;
}

// sum, rung 1 of 4: naive
// Idea      One thread per output. It adds in float64, because a float32 chain of a million additions loses ten bits.
// Predicts  N·sizeof(T) bytes per output, in sectors of which each thread uses one element at a time.
// Limit now Neighbouring threads read rows apart, and few outputs leave most of the GPU idle.
// Next      `block`: a block per output.

template <typename T>
__global__ void sum_naive_kernel(T* output, const T* input, __grid_constant__ const Reduction r) {
    const int64_t o = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (o >= r.count) return;
    const T* const first = input + r.kept.offset(o);
    double sum = 0.0;
    for (int64_t i = 0; i < r.length; ++i) sum += to_float(first[r.reduced.offset(i)]);
    output[r.output.offset(o)] = round_to<T>(sum);
}

// sum, rung 2 of 4: block
// Idea      One block per output: its threads read neighbouring elements and reduce by shuffles.
// Predicts  Coalesced reads along rows: N·sizeof(T) bytes per output.
// Limit now 2-byte loads; columns come in pieces of 2 bytes; few outputs are few blocks.
// Next      `coalesced`: threads follow the layout of memory, 16 bytes each.

template <typename T>
__global__ void __launch_bounds__(THREADS)
    sum_block_kernel(T* output, const T* input, __grid_constant__ const Reduction r) {
    __shared__ double scratch[THREADS / WARP];
    const T* const first = input + r.kept.offset(blockIdx.x);
    double sum = 0.0;
    for (int64_t i = threadIdx.x; i < r.length; i += THREADS) sum += to_float(first[r.reduced.offset(i)]);
    sum = sum_over_row(sum, scratch);
    if (threadIdx.x == 0) output[r.output.offset(blockIdx.x)] = round_to<T>(sum);
}

// sum, rung 3 of 4: coalesced
// Idea      Threads follow the layout of memory, 16 bytes each: along a row, several rows per block where they are short,
//           or across columns.
// Predicts  The bytes of the input, read once in full sectors, in either direction.
// Limit now Few outputs are few blocks.
// Next      `two_stage`: split long sums over blocks.
//
// Block (x, y) of the grid adds part y of the summands of its outputs. blockDim is (threads per row, rows), or (threads
// across columns, threads down a column). The parts of a row's sum are adjacent; those of a column's sum are one row of
// outputs apart.

/// The dense part of a row at any offset: 16-byte loads, save for a few elements at both ends.
template <typename In, typename Out>
__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    sum_coalesced_rows_kernel(Target<In, Out> to, const In* input, __grid_constant__ const Reduction r, int64_t part) {
    pdl_begin();
    using Acc = Accumulator<In>;
    constexpr int N = Vec<In>::size;
    __shared__ Acc scratch[THREADS / WARP];
    const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
    const bool live = row < r.count;
    const int64_t begin = min(blockIdx.y * part, r.length), length = live ? min(part, r.length - begin) : 0;
    const In* const first = input + (live ? r.kept.offset(row) : 0) + begin;
    const int64_t misaligned = reinterpret_cast<uintptr_t>(first) % 16 / sizeof(In);
    const int64_t head = min(length, (N - misaligned) % N), vectors = (length - head) / N;
    const In* const body = first + head;

    Acc sum = 0;
    for (int64_t base = threadIdx.x; base < vectors; base += LOADS * blockDim.x) {
        Vec<In> tile[LOADS];
        load_units(tile, body, base, blockDim.x, vectors, [](int64_t v) { return v * N; });
        sum += sum_of_units<Acc>(tile, body);
    }
    for (int64_t i = threadIdx.x; i < head; i += blockDim.x) sum += to_accumulator<Acc>(first[i]);
    for (int64_t i = head + vectors * N + threadIdx.x; i < length; i += blockDim.x)
        sum += to_accumulator<Acc>(first[i]);

    sum = sum_over_row(sum, scratch);
    if (live && threadIdx.x == 0) to.put(row * gridDim.y + blockIdx.y, r, row, sum);
}

/// Rows of any strides. Unit is the type of one load: a vector, or an element where the strides allow no vector. `r`
/// counts summands in units.
template <typename In, typename Out, typename Unit>
__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    sum_coalesced_strided_rows_kernel(Target<In, Out> to, const In* input, __grid_constant__ const Reduction r,
                                      int64_t part) {
    pdl_begin();
    using Acc = Accumulator<In>;
    __shared__ Acc scratch[THREADS / WARP];
    const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
    const bool live = row < r.count;
    const int64_t begin = min(blockIdx.y * part, r.length), end = live ? min(begin + part, r.length) : begin;
    const In* const first = input + (live ? r.kept.offset(row) : 0);

    Acc sum = 0;
    for (int64_t base = begin + threadIdx.x; base < end; base += LOADS * blockDim.x) {
        Unit tile[LOADS];
        load_units(tile, first, base, blockDim.x, end, [&](int64_t i) { return r.reduced.offset(i); });
        sum += sum_of_units<Acc>(tile, first);
    }
    sum = sum_over_row(sum, scratch);
    if (live && threadIdx.x == 0) to.put(row * gridDim.y + blockIdx.y, r, row, sum);
}

/// Columns: a thread adds those of one Unit, and the threads of a column reduce in shared memory.
template <typename In, typename Out, typename Unit>
__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    sum_coalesced_columns_kernel(Target<In, Out> to, const In* input, __grid_constant__ const Reduction r,
                                 int64_t part) {
    pdl_begin();
    using Acc = Accumulator<In>;
    constexpr int N = sizeof(Unit) / sizeof(In);
    __shared__ Acc scratch[N][THREADS];
    const int64_t column = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * N;
    const bool live = column < r.count;
    const int64_t begin = min(blockIdx.y * part, r.length), end = live ? min(begin + part, r.length) : begin;
    const In* const first = input + (live ? r.kept.offset(column) : 0);

    Acc sum[N] = {};
    for (int64_t base = begin + threadIdx.y; base < end; base += LOADS * blockDim.y) {
        Unit tile[LOADS];
        Acc x[LOADS][N];
        load_units(tile, first, base, blockDim.y, end, [&](int64_t i) { return r.reduced.offset(i); });
#pragma unroll
        for (int l = 0; l < LOADS; ++l) unpack_as(tile[l], x[l]);
#pragma unroll
        for (int e = 0; e < N; ++e) sum[e] += (x[0][e] + x[1][e]) + (x[2][e] + x[3][e]);
    }

    const int thread = static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x);
#pragma unroll
    for (int e = 0; e < N; ++e) scratch[e][thread] = sum[e];
    for (unsigned half = blockDim.y / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.y >= half) continue;
#pragma unroll
        for (int e = 0; e < N; ++e) scratch[e][thread] += scratch[e][thread + half * blockDim.x];
    }
    if (!live || threadIdx.y > 0) return;
#pragma unroll
    for (int e = 0; e < N; ++e) {
        to.put(blockIdx.y * r.count + column + e, r, column + e, scratch[e][thread]);
    }
}

// ---- host ----------------------------------------------------------------------------------------------------------

struct Shape {
    dim3 grid, block;
    int64_t part;  // summands, or vectors of them, that a block adds for each of its outputs
};

// Blocks that a sum is split into: constants, so that every GPU adds in the same order.
constexpr int64_t ENOUGH_ALONG = 1024;
constexpr int64_t ENOUGH_ACROSS = 528;  // one wave of an H200: more parts of a column are more to write and read again
constexpr int64_t WORTHWHILE = 4;       // iterations of a thread's loop that make a part worth a second stage

/// Divides `length` summands among `threads` per row (or column) and, if `split`, among parts: as many as bring `blocks`
/// blocks to `enough`.
Shape shape_of(int64_t blocks, int64_t enough, dim3 block, int64_t threads, int64_t length, bool split) {
    const int64_t most = length / (threads * LOADS * WORTHWHILE);
    const int64_t parts = split ? std::max<int64_t>(1, std::min(enough / std::max<int64_t>(blocks, 1), most)) : 1;
    const int64_t part = std::max<int64_t>(1, ceil_div(length, parts));
    const auto rows_of_grid = static_cast<unsigned>(std::max<int64_t>(1, ceil_div(length, part)));
    return {dim3(grid_size(blocks), rows_of_grid), block, part};
}

/// Twice the threads only where they fill three quarters of their loads: half-empty loads of 513 vectors cost as much as
/// those of 1024, and an SM holds half as many rows.
Shape shape_of_rows(int64_t count, int64_t length, bool split) {
    unsigned threads = 1;
    while (threads < THREADS && 3 * threads * LOADS < 2 * length) threads *= 2;
    const unsigned rows = THREADS / threads;
    return shape_of(ceil_div(count, rows), ENOUGH_ALONG, dim3(threads, rows), threads, length, split);
}

/// `down`: the most threads per column while there are enough columns. Few, so that reads are wide; many in the second
/// stage, where columns may be few and L2 holds them.
Shape shape_of_columns(int64_t units, int64_t length, unsigned down, bool split) {
    unsigned rows = 1;
    while (rows < down && rows * LOADS < length) rows *= 2;
    while (rows < THREADS && THREADS / rows / 2 >= units) rows *= 2;
    const unsigned across = THREADS / rows;
    return shape_of(ceil_div(units, across), ENOUGH_ACROSS, dim3(across, rows), rows, length, split);
}

constexpr unsigned DOWN = 16, DOWN_PARTS = 32;

/// One launch: the kernel for this layout, its grid and its operands. The layout of memory decides whether threads follow rows,
/// columns or strided rows. That is the idea of `coalesced`, so the choice stays with the rung.
template <typename In, typename Out>
struct Stage {
    Shape shape;
    void (*kernel)(Target<In, Out>, const In*, Reduction, int64_t);
    Reduction r;

    Stage(const In* input, const Reduction& reduction, bool columns, unsigned down, bool split) : r(reduction) {
        constexpr int64_t N = Vec<In>::size;
        constexpr bool OF_PARTS = sizeof(In) > sizeof(Out);  // whose rows are dense
        const bool dense_row = OF_PARTS || r.reduced.dims == 0 || (r.reduced.dims == 1 && r.reduced.strides[0] == 1);
        if (columns) {
            const bool vectors = in_vectors(input, r.kept, r.reduced);
            shape = shape_of_columns(vectors ? r.count / N : r.count, r.length, down, split);
            kernel =
                vectors ? sum_coalesced_columns_kernel<In, Out, Vec<In>> : sum_coalesced_columns_kernel<In, Out, In>;
        } else if (dense_row) {
            shape = shape_of_rows(r.count, ceil_div(r.length, N), split);
            shape.part *= N;
            kernel = sum_coalesced_rows_kernel<In, Out>;
        } else if constexpr (!OF_PARTS) {
            const bool vectors = in_vectors(input, r.reduced, r.kept);
            if (vectors) {
                r.length /= N;
                r.reduced.sizes[r.reduced.dims - 1] /= N;
                r.reduced.strides[r.reduced.dims - 1] *= N;
            }
            shape = shape_of_rows(r.count, r.length, split);
            kernel = vectors ? sum_coalesced_strided_rows_kernel<In, Out, Vec<In>>
                             : sum_coalesced_strided_rows_kernel<In, Out, In>;
        }
    }
    void run(const Target<In, Out>& to, const In* input, const Launch& launch) const {
        launch_pdl(kernel, shape.grid, shape.block, launch, to, input, r, shape.part);
    }
};

Strided walk_of(int64_t size, int64_t stride) { return collapse(&size, &stride, 1, "sum"); }

// sum, rung 4 of 4: two_stage
// Idea      Long sums are split over blocks; a second launch adds their parts.
// Predicts  Full memory bandwidth at few outputs, for 2·parts·sizeof(accumulator) more bytes per output.
// Limit now Memory bandwidth.
// Next      –

/// Launches `coalesced` (`split` false) or `two_stage`.
template <typename T>
void launch_coalesced(T* output, const T* input, const ReductionLayout& layout, bool split, const Tensor& like,
                      const Launch& launch) {
    using Part = Accumulator<T>;
    const bool columns = layout.columns;
    const Stage<T, T> first(input, layout.r, columns, DOWN, split);
    const int64_t parts = first.shape.grid.y;
    if (parts == 1) return first.run({output, nullptr}, input, launch);

    const Tensor partial =
        empty(like, std::is_same_v<Part, float> ? ScalarType::Float : ScalarType::Double, {parts * layout.r.count});
    auto* const part_sums = static_cast<Part*>(partial.data_ptr());
    first.run({nullptr, part_sums}, input, launch);
    Reduction second = layout.r;
    second.length = parts;
    second.kept = walk_of(second.count, columns ? 1 : parts);
    second.reduced = walk_of(parts, columns ? second.count : 1);
    Stage<Part, T>(part_sums, second, columns, DOWN_PARTS, false).run({output, nullptr}, part_sums, launch);
}

enum class SumRung { naive, block, coalesced, two_stage };

Tensor sum(const Tensor& input, const std::vector<int64_t>& dim, bool keepdim, SumRung rung) {
    check_cuda(input, "sum", "input");
    const Launch launch(input);
    const ReductionLayout layout(input, dim, keepdim);
    const Reduction& r = layout.r;
    Tensor output = empty(input, input.scalar_type(), layout.output_sizes);
    if (r.count == 0) return output;
    dispatch(input.scalar_type(), "sum", [&](auto zero) {
        using T = decltype(zero);
        auto* const out = static_cast<T*>(output.data_ptr());
        const auto* const in = static_cast<const T*>(input.data_ptr());
        if (rung == SumRung::naive) {
            sum_naive_kernel<<<grid_size(ceil_div(r.count, THREADS)), THREADS, 0, launch.stream>>>(out, in, r);
        } else if (rung == SumRung::block) {
            sum_block_kernel<<<grid_size(r.count), THREADS, 0, launch.stream>>>(out, in, r);
        } else {
            launch_coalesced(out, in, layout, rung == SumRung::two_stage, input, launch);
        }
    });
    KL_LAUNCH_CHECK();
    return output;
}

}  // namespace

Tensor sum_naive(const Tensor& input, const std::vector<int64_t>& dim, bool keepdim) {
    return sum(input, dim, keepdim, SumRung::naive);
}
Tensor sum_block(const Tensor& input, const std::vector<int64_t>& dim, bool keepdim) {
    return sum(input, dim, keepdim, SumRung::block);
}
Tensor sum_coalesced(const Tensor& input, const std::vector<int64_t>& dim, bool keepdim) {
    return sum(input, dim, keepdim, SumRung::coalesced);
}
Tensor sum_two_stage(const Tensor& input, const std::vector<int64_t>& dim, bool keepdim) {
    return sum(input, dim, keepdim, SumRung::two_stage);
}

void sum_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    dispatch(dtype, "sum", [&](auto zero) {
        using T = decltype(zero);
        using Part = Accumulator<T>;
        attributes.push_back(kernel_attributes<sum_naive_kernel<T>>("sum.naive", THREADS));
        attributes.push_back(kernel_attributes<sum_block_kernel<T>>("sum.block", THREADS));
        attributes.push_back(kernel_attributes<sum_coalesced_rows_kernel<T, T>>("sum.coalesced, rows", THREADS));
        attributes.push_back(
            kernel_attributes<sum_coalesced_rows_kernel<Part, T>>("sum.two_stage, rows of parts", THREADS));
        attributes.push_back(
            kernel_attributes<sum_coalesced_strided_rows_kernel<T, T, Vec<T>>>("sum.coalesced, strided rows", THREADS));
        attributes.push_back(
            kernel_attributes<sum_coalesced_columns_kernel<T, T, Vec<T>>>("sum.coalesced, columns", THREADS));
        attributes.push_back(kernel_attributes<sum_coalesced_columns_kernel<Part, T, Vec<Part>>>(
            "sum.two_stage, columns of parts", THREADS));
    });
}

}  // namespace kl
