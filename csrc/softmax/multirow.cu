// softmax, rung 5 of 7: multirow
// Idea      A warp, or a part of one, shares up to four short rows, and each thread holds vectors of all of them. The
//           lanes reduce all rows at once: four rows cost three exchanges where they would cost eight.
// Predicts  2·N·sizeof(T) bytes per row as in `registers`, with fewer instructions per row for addresses and reductions.
// Limit now Rows of at most 1024 elements that lie at one stride and consist of aligned 16-byte vectors.
// Next      `cluster`, for rows at the other end.
//
// Without a backward kernel of its own: it shares the one of `registers`.

#include "reduce/short_rows.cuh"
#include "softmax/row_in_registers.cuh"

namespace kl {
namespace {

/// The kernel's one parameter, kept small: a launch waits for every line of its arguments.
template <typename T>
struct MultirowArguments {
    T* output;
    const T* input;
    int64_t out_step, in_step, count;  // elements from row to row; rows
    int length;
};

// Exponentials stay in registers as floats until their sum is known. −max · log2 e is rounded, but by the same amount for
// the whole row. Far maxima are subtracted first, because their product overflows.
template <typename T, int ROWS>
__global__ void __launch_bounds__(MIN_BLOCK, SHORT_BLOCKS)
    softmax_multirow_kernel(__grid_constant__ const MultirowArguments<T> p) {
    pdl_begin();
    constexpr int E = Vec<T>::size, V = SHORT_VECTORS<T, ROWS>;
    const MultiRowPartition<ROWS> partition(p.count, p.length);
    Vec<T> tile[ROWS][V];
    partition.load(tile, p.input, p.in_step, NEG_INF);
    float top[ROWS], sum[ROWS], x[ROWS][V * E];
    bool far = false;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) top[r] = max_of(tile[r]);
    each_over_lanes(top, Max{}, partition.lanes);
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
    each_over_lanes(sum, Sum{}, partition.lanes);
    T* output = partition.begin(p.output, p.out_step);
#pragma unroll
    for (int r = 0; r < ROWS; ++r, output += partition.next(p.out_step)) {
        const float scale = 1.0f / sum[r];
#pragma unroll
        for (int v = 0; v < V; ++v) {
            float part[E];
#pragma unroll
            for (int e = 0; e < E; ++e) part[e] = x[r][v * E + e] * scale;
            partition.store(output + v * partition.lanes * E, r, v, pack<T>(part));
        }
    }
}

}  // namespace

Tensor softmax_multirow(const Tensor& input, int64_t dim) {
    return softmax_forward(input, dim, [](const auto& call) {
        using T = typename std::decay_t<decltype(call)>::T;
        const int64_t count = call.layout.count, length = call.layout.length;
        KL_CHECK(length <= SHORT_LENGTH, "softmax: multirow takes rows of at most ", SHORT_LENGTH, " elements, got ",
                 length);
        KL_CHECK(are_even(call.vectorized(), call.in_rows, call.out_rows),
                 "softmax: multirow takes rows at one stride that consist of aligned vectors of 16 bytes");
        const MultirowArguments<T> args{call.output,         call.input, call.out_rows.step(),
                                        call.in_rows.step(), count,      static_cast<int>(length)};
        with_short_rows<T>(count, length, [&](auto rows, unsigned grid, dim3 block) {
            launch_pdl(softmax_multirow_kernel<T, rows()>, grid, block, call.launch, args);
        });
    });
}

void softmax_multirow_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype) {
    dispatch(dtype, "softmax", [&](auto zero) {
        using T = decltype(zero);
        attributes.push_back(kernel_attributes<softmax_multirow_kernel<T, SHORT_ROWS>>("softmax.multirow", MIN_BLOCK));
    });
}

}  // namespace kl
