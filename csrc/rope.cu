// rope: rotary position embedding (Su et al., arXiv:2104.09864).
//
//   (y1, y2) = (x1 · cos − x2 · sin, x2 · cos + x1 · sin)
//
// A pair is elements i and i + R / 2 of a row, or 2i and 2i + 1 if interleaved. Elements from R on are copied. The
// backward pass is the same kernel with the opposite angle. Rows are counted in row-major order, so that the position
// varies fastest, or where heads lie closer together than positions, so that the head does: neighbouring threads then read
// neighbouring rows. `table` is (positions, R / 2, 2) float32: cosine and sine of each position and pair. Sequences may
// have offsets of their own, which are added to the position of their rows. Kernels for these are separate instantiations.

#include "core/elementwise.cuh"
#include "core/ops.h"

namespace kl {
namespace {

constexpr float NOT_A_NUMBER = std::numeric_limits<float>::quiet_NaN();

enum { ROPE_OUTPUT, ROPE_INPUT, ROPE_OPERANDS };

/// What both kernels know of a call. `at` walks over rows, whose elements lie `out_step` and `in_step` apart.
struct Rope {
    Operands<ROPE_OPERANDS> at;
    int64_t rows, positions, out_step, in_step;
    int64_t heads_inside;  // rows of a position that follow each other
    int32_t width, pairs;  // elements of a row, and its rotated pairs
    float sign;            // of the sine: 1, or −1 backward
};

/// The same of a batch whose sequences have offsets of their own.
struct RopeOfSequences : Rope {
    const int32_t* offsets;
    int64_t offset, table_rows, sequence_rows;  // `offset` is added to each; rows of the table, and of a sequence
};

/// Cosines and sines in the table from a row's pair on, and whether they are its own: a position outside has none.
struct Angles {
    const float* at;
    bool known;
};

__device__ inline int64_t position_of(const Rope& rope, int64_t row) {
    return (rope.heads_inside == 1 ? row : row / rope.heads_inside) % rope.positions;
}

__device__ inline Angles angles_of(const Rope& rope, const float* table, int64_t row, int pair = 0) {
    return {table + 2 * (position_of(rope, row) * rope.pairs + pair), true};
}

__device__ inline Angles angles_of(const RopeOfSequences& rope, const float* table, int64_t row, int pair = 0) {
    const int64_t first = rope.offset + rope.offsets[row / rope.sequence_rows];
    const int64_t position = first + position_of(rope, row);
    const bool known = position >= 0 && position < rope.table_rows;
    const int64_t at = known ? position : 0;  // where there are rows, the table has one
    return {table + 2 * (at * rope.pairs + pair), known};
}

/// y1 = a · cos − b · sin, y2 = b · cos + a · sin.
__device__ inline void rotate(float& a, float& b, float cosine, float sine) {
    const float x = a;
    a = x * cosine - b * sine;
    b = b * cosine + x * sine;
}

// rope, rung 1 of 2: naive
// Idea      One fused kernel, one pair per thread.
// Predicts  2·sizeof(T) bytes per element either pass; the table stays in L2.
// Limit now 2-byte loads leave too few bytes in flight.
// Next      `vectorized`: 16-byte loads and stores.

template <typename T, bool INTERLEAVED, typename Call>
__global__ void __launch_bounds__(THREADS)
    rope_naive_kernel(T* output, const T* input, const float* table, __grid_constant__ const Call rope) {
    const int64_t index = int64_t{blockIdx.x} * THREADS + threadIdx.x;
    const int64_t pairs_a_row = (rope.width + 1) / 2;
    const int64_t row = index / pairs_a_row;
    const int pair = static_cast<int>(index % pairs_a_row);
    if (row >= rope.rows) return;
    const bool rotates = pair < rope.pairs;
    const int first = rotates && !INTERLEAVED ? pair : 2 * pair;
    const int second = rotates && !INTERLEAVED ? pair + rope.pairs : 2 * pair + 1;
    const T* x = input + rope.at.offset(ROPE_INPUT, row);
    T* y = output + rope.at.offset(ROPE_OUTPUT, row);
    float a = to_float(x[first * rope.in_step]);
    float b = second < rope.width ? to_float(x[second * rope.in_step]) : 0.0f;
    if (rotates) {
        const Angles angles = angles_of(rope, table, row, pair);
        rotate(a, b, angles.known ? angles.at[0] : NOT_A_NUMBER,
               angles.known ? rope.sign * angles.at[1] : NOT_A_NUMBER);
    }
    y[first * rope.out_step] = from_float<T>(a);
    if (second < rope.width) y[second * rope.out_step] = from_float<T>(b);
}

// rope, rung 2 of 2: vectorized
// Idea      16-byte loads and stores; launched with programmatic dependent launch (PDL). A thread has a vector of each
//           half, or one of interleaved pairs, and the 16-byte vectors of the table that belong to it.
// Predicts  The same bytes with an eighth of the load instructions in 16 bits, a quarter in float32.
// Limit now Memory bandwidth.
// Next      –

/// Cosine and sine of COUNT neighbouring pairs, the first of which is number `pair`.
template <int COUNT>
__device__ inline void load_angles(Angles angles, int pair, float (&cosine)[COUNT], float (&sine)[COUNT], float sign) {
#pragma unroll
    for (int e = 0; e < COUNT; e += 2) {
        const float4 both = reinterpret_cast<const float4*>(angles.at + 2 * pair)[e / 2];
        cosine[e] = both.x, sine[e] = sign * both.y;
        cosine[e + 1] = both.z, sine[e + 1] = sign * both.w;
    }
    if (angles.known) return;
#pragma unroll
    for (int e = 0; e < COUNT; ++e) cosine[e] = sine[e] = NOT_A_NUMBER;
}

template <typename T, bool INTERLEAVED, typename Call>
__global__ void __launch_bounds__(THREADS)
    rope_vectorized_kernel(T* output, const T* input, const float* table, __grid_constant__ const Call rope) {
    pdl_begin();
    constexpr int SIZE = Vec<T>::size;
    const int rotated = 2 * rope.pairs, items_rotated = rotated / (INTERLEAVED ? SIZE : 2 * SIZE);
    const int64_t items = items_rotated + (rope.width - rotated) / SIZE;
    const int64_t index = int64_t{blockIdx.x} * THREADS + threadIdx.x;
    const int64_t row = index / items;
    const int item = static_cast<int>(index % items);
    if (row >= rope.rows) return;
    const T* x = input + rope.at.offset(ROPE_INPUT, row);
    T* y = output + rope.at.offset(ROPE_OUTPUT, row);
    if (item >= items_rotated) {
        const int column = rotated + (item - items_rotated) * SIZE;
        store_vec(y + column, load_vec(x + column));
        return;
    }
    const Angles angles = angles_of(rope, table, row);
    const int column = item * SIZE;
    float a[SIZE];
    unpack(load_vec(x + column), a);
    if constexpr (INTERLEAVED) {
        float cosine[SIZE / 2], sine[SIZE / 2];
        load_angles(angles, column / 2, cosine, sine, rope.sign);
#pragma unroll
        for (int e = 0; e < SIZE / 2; ++e) rotate(a[2 * e], a[2 * e + 1], cosine[e], sine[e]);
    } else {
        float b[SIZE], cosine[SIZE], sine[SIZE];
        unpack(load_vec(x + rope.pairs + column), b);
        load_angles(angles, column, cosine, sine, rope.sign);
#pragma unroll
        for (int e = 0; e < SIZE; ++e) rotate(a[e], b[e], cosine[e], sine[e]);
        store_vec(y + rope.pairs + column, pack<T>(b));
    }
    store_vec(y + column, pack<T>(a));
}

// ---- host ----------------------------------------------------------------------------------------------------------

/// Raises unless every vector of the rows and of the table starts on 16 bytes.
template <typename T>
void check_vectors(const Tensor& output, const Tensor& input, const Tensor& table, const Rope& rope, bool interleaved) {
    constexpr int SIZE = Vec<T>::size;
    const int32_t run = interleaved ? 2 * rope.pairs : rope.pairs;
    bool whole = run % SIZE == 0 && rope.width % SIZE == 0 && rope.in_step == 1 && rope.out_step == 1;
    for (int d = 0; d < rope.at.dims; ++d) {
        whole = whole && rope.at.strides[ROPE_INPUT][d] % SIZE == 0 && rope.at.strides[ROPE_OUTPUT][d] % SIZE == 0;
    }
    whole = whole && is_aligned16(input.data_ptr()) && is_aligned16(output.data_ptr());
    KL_CHECK(whole && is_aligned16(table.data_ptr()),
             "rope.vectorized: rows and table must consist of 16-byte vectors");
}

/// Launches a kernel of the rung on a call that is checked.
template <typename T, typename Call>
void launch_rope(const Launch& launch, Tensor& output, const Tensor& input, const Tensor& table, const Call& rope,
                 bool interleaved, bool vectorized) {
    auto* y = static_cast<T*>(output.data_ptr());
    const auto* x = static_cast<const T*>(input.data_ptr());
    const auto* angles = static_cast<const float*>(table.data_ptr());
    if (!vectorized) {
        const auto grid = grid_size(ceil_div(rope.rows * ((rope.width + 1) / 2), THREADS));
        auto* const kernel = interleaved ? rope_naive_kernel<T, true, Call> : rope_naive_kernel<T, false, Call>;
        kernel<<<grid, THREADS, 0, launch.stream>>>(y, x, angles, rope);
        return;
    }
    check_vectors<T>(output, input, table, rope, interleaved);
    constexpr int SIZE = Vec<T>::size;
    const int64_t rotated = 2 * rope.pairs;
    const int64_t items = rotated / (interleaved ? SIZE : 2 * SIZE) + (rope.width - rotated) / SIZE;
    const auto grid = grid_size(ceil_div(rope.rows * items, THREADS));
    auto* const kernel = interleaved ? rope_vectorized_kernel<T, true, Call> : rope_vectorized_kernel<T, false, Call>;
    launch_pdl(kernel, grid, THREADS, launch, y, x, angles, rope);
}

/// Raises unless `offsets` has an int32 for each sequence of `input`.
void check_offsets(const Tensor& input, const Tensor& offsets) {
    KL_CHECK(input.dim() >= 3, "rope: argument `input` must have at least three dimensions, got ", input.dim());
    KL_CHECK(offsets.scalar_type() == ScalarType::Int && offsets.is_contiguous() && offsets.dim() == 1 &&
                 offsets.size(0) == input.size(0),
             "rope: argument `offsets` must be a contiguous int32 tensor of ", input.size(0), " elements");
    KL_CHECK(offsets.is_cuda() && offsets.get_device_index() == input.get_device_index(),
             "rope: arguments `input` and `offsets` must be on the same device");
}

Tensor rope(const Tensor& input, const Tensor& table, bool interleaved, bool backward,
            const std::optional<Tensor>& offsets, int64_t offset, bool vectorized) {
    check_cuda(input, "rope", "input");
    KL_CHECK(input.dim() >= 2, "rope: argument `input` must have at least two dimensions, got ", input.dim());
    KL_CHECK(
        table.scalar_type() == ScalarType::Float && table.is_contiguous() && table.dim() == 3 && table.size(2) == 2,
        "rope: argument `table` must be a contiguous float32 tensor (positions, pairs, 2)");
    KL_CHECK(table.is_cuda() && table.get_device_index() == input.get_device_index(),
             "rope: arguments `input` and `table` must be on the same device");
    KL_CHECK(2 * table.size(1) <= input.size(-1), "rope: argument `table` must rotate at most ", input.size(-1),
             " elements, got ", table.size(1), " pairs");
    KL_CHECK(table.size(0) >= input.size(-2), "rope: argument `table` must have ", input.size(-2), " positions, got ",
             table.size(0));
    KL_CHECK(input.size(-1) < int64_t{1} << 30, "rope: rows of ", input.size(-1), " elements are too long");
    if (offsets.has_value()) check_offsets(input, *offsets);
    const Launch launch(input);
    Tensor output = DenseLike(input).allocate(input);
    if (input.numel() == 0) return output;
    std::vector<int64_t> order;
    for (int64_t d = 0; d + 1 < input.dim(); ++d) order.push_back(d);
    // The first dimension is that of the sequences, whose offsets rows find by their number.
    const bool heads_inside = input.dim() >= 4 && heads_lie_inside(input);
    if (heads_inside) std::swap(order[order.size() - 2], order.back());
    const Rope rope{Operands<ROPE_OPERANDS>(order, {&output, &input}, "rope"),
                    input.numel() / input.size(-1),
                    input.size(-2),
                    output.stride(-1),
                    input.stride(-1),
                    heads_inside ? input.size(-3) : 1,
                    static_cast<int32_t>(input.size(-1)),
                    static_cast<int32_t>(table.size(1)),
                    backward ? -1.0f : 1.0f};
    dispatch(input.scalar_type(), "rope", [&](auto zero) {
        using T = decltype(zero);
        if (!offsets.has_value()) {
            launch_rope<T>(launch, output, input, table, rope, interleaved, vectorized);
            return;
        }
        const auto* of_sequences = static_cast<const int32_t*>(offsets->data_ptr());
        const RopeOfSequences call{rope, of_sequences, offset, table.size(0), rope.rows / input.size(0)};
        launch_rope<T>(launch, output, input, table, call, interleaved, vectorized);
    });
    KL_LAUNCH_CHECK();
    return output;
}

}  // namespace

Tensor rope_naive(const Tensor& input, const Tensor& table, bool interleaved, bool backward,
                  const std::optional<Tensor>& offsets, int64_t offset) {
    return rope(input, table, interleaved, backward, offsets, offset, false);
}

Tensor rope_vectorized(const Tensor& input, const Tensor& table, bool interleaved, bool backward,
                       const std::optional<Tensor>& offsets, int64_t offset) {
    return rope(input, table, interleaved, backward, offsets, offset, true);
}

void rope_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    dispatch(dtype, "rope", [&](auto zero) {
        using T = decltype(zero);
        attributes.push_back(kernel_attributes<rope_naive_kernel<T, false, Rope>>("rope.naive", THREADS));
        attributes.push_back(kernel_attributes<rope_vectorized_kernel<T, false, Rope>>("rope.vectorized", THREADS));
    });
}

}  // namespace kl
