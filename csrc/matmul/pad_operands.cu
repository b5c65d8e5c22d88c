// Copies of operands that TMA cannot address, or reads badly. All rungs on Hopper share them.
//
// pad_operands: TMA reads rows, first elements and batches only at multiples of 16 bytes. Where a product is large
// enough, any other operand is copied first, to rows that begin at multiples of 128 bytes. The rung runs on the copy.
// (PyTorch's Inductor pads such operands at compile time: torch/_inductor/fx_passes/pad_mm.py.) A copy reads and writes
// an element once; the product uses it as often as the other operand is wide. Smaller products, and operands without a
// stride of 1, go to plain_loader.cuh.
//
// transpose_small_a: an A of few rows that lie along M. A TMA box is 64 wide, and costs as much as if it were full. The
// time of `split_k` for few rows is that of reading B, so it copies such an A to lie along K.
//
// Whether a copy pays is decided here, not in kernel_ladder/selection: each rung on Hopper makes the same copies, and the
// call's addresses and strides are at hand. Selection names the rung, and weighs the copies with the same numbers.
//
// chunked_copy: copies take at most 64 MiB at a time; a larger product is computed in parts of its outputs, columns of
// parts one after the other. The parts of a column share one copy of B.

#include "core/pdl.cuh"
#include "matmul/chunked_copy.h"
#include "matmul/hopper.cuh"
#include "matmul/unaligned.cuh"

namespace kl {
namespace {

// A product is worth a copy from this many multiply-adds on, for each element copied and in total. Below, the launch of
// a second kernel costs more than plain loads.
constexpr int64_t WORTH_PER_ELEMENT = 192, WORTH_ALTOGETHER = int64_t{1} << 29;

// Rows to copy: `length` neighbouring elements each, `step` elements apart, `per_batch` of them per batch. The copy's
// rows are `to_step` elements apart.
struct PaddedRows {
    const void* from;
    void* to;
    int64_t count, per_batch, step, batch_step, to_step;
    int length;
};

// One warp per row of `first`, then of `second`; 16 bytes per lane.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    matmul_persistent_pad_kernel(const __grid_constant__ PaddedRows first, const __grid_constant__ PaddedRows second) {
    constexpr int E = 16 / sizeof(T), AT_ONCE = 4;
    int64_t row = (int64_t{blockIdx.x} * THREADS + threadIdx.x) / WARP;
    const bool of_second = row >= first.count;
    if (of_second) row -= first.count;
    const PaddedRows& rows = of_second ? second : first;
    if (row >= rows.count) return;
    const T* from =
        static_cast<const T*>(rows.from) + row / rows.per_batch * rows.batch_step + row % rows.per_batch * rows.step;
    T* to = static_cast<T*>(rows.to) + row * rows.to_step;
    const int length = rows.length;
    for (int x = threadIdx.x % WARP * E; x < length; x += AT_ONCE * WARP * E) {
        UnalignedChunk<T> chunks[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) chunks[i].begin(from + x + i * WARP * E, length - x - i * WARP * E);
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int at = x + i * WARP * E;
            if (at >= length) break;
            uint32_t v[4];
            chunks[i].get(v);
            *reinterpret_cast<uint4*>(to + at) = make_uint4(v[0], v[1], v[2], v[3]);
        }
    }
}

// Each thread copies eight k of one row of an A along M: 16 bytes of a row of the copy, with zeros past its end.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    matmul_split_k_transpose_kernel(T* to, const T* from, int rows, int k, int64_t k_step, int64_t to_step) {
    griddepcontrol_launch_dependents();
    const int index = blockIdx.x * THREADS + threadIdx.x, row = index % rows, first = index / rows * 8;
    if (first >= k) return;
    alignas(16) T values[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        values[i] = first + i < k ? from[(first + i) * k_step + row] : from_float<T>(0.0f);
    }
    *reinterpret_cast<uint4*>(to + row * to_step + first) = *reinterpret_cast<const uint4*>(values);
}

// When transpose_small_a pays: few rows, many stages of B, and so many bytes of B that a microsecond more is little.
// The copy takes at most 64 MiB. kernel_ladder/selection/matmul.py has the same numbers.
constexpr int64_t FEW_ROWS = 32, LONG_K = 4096, LARGE = int64_t{1} << 24, MOST_COPIED = int64_t{1} << 25;

// An operand of X rows (columns), and the major dimension of its copy.
struct Operand {
    const void* data;
    int64_t X, x_step, K, k_step, batches, batch_step;
    Major major;

    int64_t length() const { return major == Major::K ? K : X; }
    int64_t outer() const { return major == Major::K ? X : K; }
    int64_t step() const { return major == Major::K ? x_step : k_step; }
    int64_t elements() const { return batches * outer() * length(); }
    int64_t to_step(int64_t item) const { return ceil_div(length() * item, SWIZZLE_ROW) * SWIZZLE_ROW / item; }
    int64_t room(int64_t item) const { return batches * outer() * to_step(item); }
};

// The most that copies of both operands take, in bytes.
constexpr int64_t MOST_BYTES = int64_t{64} << 20;

// Chooses the major dimension of an operand's copy: the one of stride 1, which for tf32 must be k. False where there is
// none.
bool lies_along(ScalarType dtype, Operand* operand) {
    if (operand->K == 1 || operand->k_step == 1) return true;
    operand->major = Major::MN;
    return dtype != ScalarType::Float && (operand->X == 1 || operand->x_step == 1);
}

// Both operands of a call of which at least one is worth a copy.
struct Copies {
    Operand a, b;

    static std::optional<Copies> of(const HopperCall& call, ScalarType dtype) {
        const Product& p = call.product;
        if (call.by_tma() || p.batch_dims > 1) return std::nullopt;
        const int64_t a_batch = p.batch_dims > 0 ? p.a_batch[0] : 0, b_batch = p.batch_dims > 0 ? p.b_batch[0] : 0;
        Operand a{call.a_data, p.M, p.a_m, p.K, p.a_k, a_batch == 0 ? 1 : p.batches, a_batch, Major::K};
        Operand b{call.b_data, p.N, p.b_n, p.K, p.b_k, b_batch == 0 ? 1 : p.batches, b_batch, Major::K};
        const bool can = (call.a_by_tma || lies_along(dtype, &a)) && (call.b_by_tma || lies_along(dtype, &b));
        const int64_t copied = (call.a_by_tma ? 0 : a.elements()) + (call.b_by_tma ? 0 : b.elements());
        const double products = static_cast<double>(p.M) * p.N * p.K * p.batches;
        const bool worth = products >= static_cast<double>(std::max(copied * WORTH_PER_ELEMENT, WORTH_ALTOGETHER));
        return can && (worth || call.part()) ? std::optional<Copies>{{a, b}} : std::nullopt;
    }
    int64_t bytes(const HopperCall& call, int64_t item) const {
        return ((call.a_by_tma ? 0 : a.room(item)) + (call.b_by_tma ? 0 : b.room(item))) * item;
    }
};

// A part of a call. It is worth its copies if the whole is.
HopperCall part_of(const HopperCall& whole, ScalarType dtype, const Part& of, KeptCopies* kept) {
    const int64_t item = whole.output.element_size();
    HopperCall part = whole;
    part.kept = kept;
    Product& p = part.product;
    const int64_t a_batch = p.batch_dims > 0 ? p.a_batch[0] : 0, b_batch = p.batch_dims > 0 ? p.b_batch[0] : 0;
    part.a_data = static_cast<const char*>(whole.a_data) + (of.batch * a_batch + of.m * p.a_m) * item;
    part.b_data = static_cast<const char*>(whole.b_data) + (of.batch * b_batch + of.n * p.b_n) * item;
    part.c = static_cast<char*>(whole.c) + (of.batch * whole.tiled.c_batch + of.m * whole.tiled.c_row + of.n) * item;
    p.M = of.M, p.N = of.N, p.batches = of.batches, p.batch_sizes[0] = of.batches;
    describe(&part, dtype);
    return part;
}

}  // namespace

void chunked_copy(HopperCall& call, ScalarType dtype, const Launch& on, const std::function<void(HopperCall&)>& run) {
    const Product& p = call.product;
    const int64_t item = call.output.element_size();
    const std::optional<Copies> copies = call.copied ? Copies::of(call, dtype) : std::nullopt;
    if (!copies.has_value() || copies->bytes(call, item) <= MOST_BYTES) return run(call);
    const auto copied = [&](const Operand& operand, bool by_tma, int64_t tile) -> CopiedOperand {
        if (by_tma) return {};
        Operand of_tile = operand;
        of_tile.X = tile;
        of_tile.batches = 1;
        return {operand.room(item) * item / operand.batches, of_tile.room(item) * item, operand.batches > 1};
    };
    const std::vector<Part> parts =
        parts_of(p.batches, p.M, p.N, p.K * item, copied(copies->a, call.a_by_tma, PART_TILE_M),
                 copied(copies->b, call.b_by_tma, PART_TILE_N), MOST_BYTES, multiprocessors(on.device));
    if (parts.empty()) {
        call.copied = false;
        return run(call);
    }
    KeptCopies kept;
    for (const Part& of : parts) {
        HopperCall part = part_of(call, dtype, of, &kept);
        run(part);
    }
}

Tensor pad_operands(HopperCall* call, ScalarType dtype, const Launch& on) {
    const std::optional<Copies> copies = call->copied ? Copies::of(*call, dtype) : std::nullopt;
    if (!copies.has_value()) return {};
    call->a_copied = !call->a_by_tma;
    const int64_t item = call->output.element_size();
    const auto& [a, b] = *copies;

    const int64_t a_room = call->a_by_tma ? 0 : a.room(item), b_room = call->b_by_tma ? 0 : b.room(item);
    Tensor memory;
    if (!call->part()) memory = empty(call->output, dtype, {a_room + b_room});
    // Moves an operand to its copy, `before` elements behind the start of `memory`; a part's copy stands alone, and may
    // be that of the part before.
    const auto move = [&](const Operand& from, KeptCopy* kept, int64_t before, const void** data, TmaTensor* tensor,
                          Major* major) {
        const int64_t step = from.to_step(item), outer = from.outer(), room = from.room(item);
        bool has = false;
        if (kept != nullptr) {
            has = kept->of == from.data && kept->X == from.X && kept->batches == from.batches;
            if (room > kept->room) {
                kept->memory = Tensor();
                kept->memory = empty(call->output, dtype, {room});
                kept->room = room;
            }
            kept->of = from.data, kept->X = from.X, kept->batches = from.batches;
        }
        char* const to = static_cast<char*>((kept != nullptr ? kept->memory : memory).data_ptr()) + before * item;
        const bool along_k = from.major == Major::K;
        const bool can = readable(dtype, to, from.X, along_k ? step : 1, from.K, along_k ? 1 : step, from.batches,
                                  from.batches > 1 ? outer * step : 0, tensor, major);
        KL_CHECK(can, "matmul: a copy of an operand cannot be described");
        *data = to;
        if (has) return PaddedRows{};
        return PaddedRows{from.data,       to,   from.batches * outer,           outer, from.step(),
                          from.batch_step, step, static_cast<int>(from.length())};
    };
    PaddedRows a_rows{}, b_rows{};
    KeptCopies* const kept = call->kept;
    if (!call->a_by_tma) {
        a_rows = move(a, kept != nullptr ? &kept->a : nullptr, 0, &call->a_data, &call->a, &call->a_major);
    }
    if (!call->b_by_tma) {
        const int64_t before = kept != nullptr ? 0 : a_room;
        b_rows = move(b, kept != nullptr ? &kept->b : nullptr, before, &call->b_data, &call->b, &call->b_major);
    }
    call->a_by_tma = call->b_by_tma = true;

    if (a_rows.count + b_rows.count == 0) return memory;  // both are those of the part before
    const unsigned int blocks = grid_size(ceil_div(a_rows.count + b_rows.count, THREADS / WARP));
    dispatch(dtype, "matmul", [&](auto zero) {
        matmul_persistent_pad_kernel<decltype(zero)><<<blocks, THREADS, 0, on.stream>>>(a_rows, b_rows);
    });
    KL_LAUNCH_CHECK();
    return memory;
}

std::optional<Tensor> transpose_small_a(HopperCall* call, ScalarType dtype, const Launch& on) {
    const Product& p = call->product;
    const bool few =
        p.M <= FEW_ROWS && p.batches == 1 && p.K >= LONG_K && p.K * p.N >= LARGE && p.K * p.M <= MOST_COPIED;
    if (!few || call->a_major == Major::K || call->a_copied) return std::nullopt;
    const int64_t step = Operand{call->a_data, p.M, p.a_m, p.K, p.a_k, 1, 0, Major::K}.to_step(sizeof(half));
    const Tensor memory = empty(call->output, dtype, {p.M, step});
    dispatch(dtype, "matmul", [&](auto zero) {
        using T = decltype(zero);
        if constexpr (sizeof(T) == 2) {  // else A lies along k
            const unsigned int blocks = grid_size(ceil_div(ceil_div(p.K, 8) * p.M, THREADS));
            // Not by launch_pdl: `split_k`, which is, loads B without waiting.
            matmul_split_k_transpose_kernel<<<blocks, THREADS, 0, on.stream>>>(
                static_cast<T*>(memory.data_ptr()), static_cast<const T*>(call->a_data), static_cast<int>(p.M),
                static_cast<int>(p.K), p.a_k, step);
        }
    });
    KL_LAUNCH_CHECK();
    call->a_data = memory.data_ptr();
    const bool can = readable(dtype, call->a_data, p.M, step, p.K, 1, 1, 0, &call->a, &call->a_major);
    KL_CHECK(can, "matmul: a copy of `input` cannot be described");
    return memory;
}

void pad_operands_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    dispatch(dtype, "matmul", [&](auto zero) {
        using T = decltype(zero);
        attributes.push_back(kernel_attributes<matmul_persistent_pad_kernel<T>>("matmul.persistent pad", THREADS));
        if constexpr (sizeof(T) == 2) {
            attributes.push_back(
                kernel_attributes<matmul_split_k_transpose_kernel<T>>("matmul.split_k transpose", THREADS));
        }
    });
}

}  // namespace kl
