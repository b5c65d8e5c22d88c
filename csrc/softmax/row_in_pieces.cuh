// The online softmax state of a row of any length, which its threads load in pieces of ROW_VECTORS vectors each. Rows may
// begin off 16 bytes.
#pragma once

#include "softmax/row_in_registers.cuh"

namespace kl {

/// The aligned vectors of a DENSE row, which may begin off 16 bytes: `head` elements lie before them, some after. Other
/// rows count vectors from their start.
template <typename T, bool DENSE>
struct RowSpan {
    int head, vectors;

    __device__ RowSpan(const T* row, int64_t length) {
        constexpr int SIZE = Vec<T>::size;
        const auto past = static_cast<int>(reinterpret_cast<uintptr_t>(row) % 16 / sizeof(T));
        head = DENSE ? static_cast<int>(min(length, int64_t{(SIZE - past) % SIZE})) : 0;
        vectors = static_cast<int>(DENSE ? (length - head) / SIZE : ceil_div(length, SIZE));
    }
    /// Elements up to the end of the last vector.
    __device__ int64_t end() const { return head + int64_t{vectors} * Vec<T>::size; }
    __device__ bool has_edges(int64_t length) const { return DENSE && (head > 0 || end() < length); }
    /// Where this thread's vector of the row's edges begins: thread 0 may have the first, thread 1 the last.
    __device__ int64_t edge(int64_t length) const {
        if (threadIdx.x == 0 && head > 0) return head - Vec<T>::size;
        return threadIdx.x == 1 ? end() : length;
    }
};

/// Σ (reference − x) over the elements of a vector that begins at `first`. VECTORIZED: all of them lie in the row.
template <bool VECTORIZED, typename T>
__device__ float sum_below(const Vec<T>& v, float reference, int64_t first, int64_t length) {
    float x[Vec<T>::size], sum = 0.0f;
    unpack(v, x);
#pragma unroll
    for (int e = 0; e < Vec<T>::size; ++e) {
        if (VECTORIZED || (0 <= first + e && first + e < length)) sum += reference - x[e];
    }
    return sum;
}

/// Whether the threads of a row hold all of it at once. They load such a row while its label is on the way, whether it
/// counts or not. Of a longer one they wait for the label: a row that does not count is not read.
template <typename T, bool DENSE>
__device__ bool is_one_piece(int64_t length) {
    return DENSE && length <= int64_t{ROW_VECTORS * Vec<T>::size} * RowPartition<false>::step();
}

/// The state of a thread's elements of a row, of which `tile` holds all where `is_one_piece`. With SMOOTHED also
/// adds Σ (reference − x) · uniform to `below`.
template <bool SMOOTHED, bool DENSE, typename T>
__device__ OnlineSoftmaxState scan_row(Vec<T> (&tile)[ROW_VECTORS], const T* in, const Rows& rows,
                                       RowPartition<false> part, const RowSpan<T, DENSE>& span, int64_t length,
                                       float reference, float uniform, float& below) {
    OnlineSoftmaxState state{NEG_INF, 0.0f};
    const auto add = [&](Vec<T>(&of_piece)[ROW_VECTORS]) {
        state = MergeSoftmax{}(state, softmax_state(of_piece));
        if constexpr (SMOOTHED) {
#pragma unroll
            for (int v = 0; v < ROW_VECTORS; ++v) {
                const int64_t first = int64_t{part.at(v)} * Vec<T>::size;
                if (part.at(v) < span.vectors)
                    below += uniform * sum_below<DENSE>(of_piece[v], reference, first, length);
            }
        }
    };
    if (is_one_piece<T, DENSE>(length)) {
        if (length > 0) add(tile);
    } else {
        const int pieces = static_cast<int>(ceil_div(span.vectors, ROW_VECTORS * part.step()));
#pragma unroll 1
        for (int i = 0; i < pieces; ++i, part.first += ROW_VECTORS * part.step()) {
            Vec<T> piece[ROW_VECTORS];
            load_row<DENSE>(piece, in + span.head, rows, part, true, DENSE ? span.end() - span.head : length, NEG_INF);
            add(piece);
        }
    }
    if (span.has_edges(length)) {
        const int64_t first = span.edge(length);
        Vec<T> edge[1] = {load_vector(in, rows, first, length, NEG_INF)};
        state = MergeSoftmax{}(state, softmax_state(edge));
        if (SMOOTHED) below += uniform * sum_below<false>(edge[0], reference, first, length);
    }
    return state;
}

}  // namespace kl
