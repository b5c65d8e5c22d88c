// Where the sequences of a call lie: batches of one length (attention), or sequences of several lengths, packed in one
// batch (attention_varlen). Kernels of `flash` with sequences as a template parameter serve both.
#pragma once

#include "attention/attention.cuh"
#include "core/philox.cuh"

namespace kl {

/// The batches of a call.
struct Batched {
    static constexpr bool PACKED = false;
};

/// A sequence inside a batch: `a` has its own lengths and band.
struct PackedSequence {
    Attention a;
    int query_row, key_row;  // first rows in memory
    int total_q;             // queries of all sequences

    template <typename T>
    __device__ T* queries(const View<T>& view, int head) const {
        return view.at(0, head) + query_row * view.row;
    }
    template <typename T>
    __device__ T* keys(const View<T>& view, int head) const {
        return view.at(0, head) + key_row * view.row;
    }
    /// Index of the first query's log-sum-exp.
    __device__ int64_t first_row(int head) const { return int64_t{head} * total_q + query_row; }
};

/// Sequences packed one after the other. Their offsets lie in device memory, so that the host does not know the lengths. A
/// grid has tiles for the longest sequence, and blocks past the end of theirs exit.
///
///   cu_seqlens   0           5        9  10                       sequence s has rows cu_seqlens[s] … cu_seqlens[s + 1] − 1
///   rows         │ 0 0 0 0 0 │ 1 1 1 1 │ 2 │
struct Packed {
    static constexpr bool PACKED = true;
    const int32_t *cu_seqlens_q, *cu_seqlens_k;
    int64_t sequences;
    int most_q, most_k;  // of a sequence, 1 or more
    int left, right;     // of the band around the diagonal that ends at the lower right

    __host__ __device__ int64_t count(const Attention&) const { return sequences; }
    __host__ __device__ int longest_q(const Attention&) const { return most_q; }
    __host__ __device__ int longest_k(const Attention&) const { return most_k; }
    /// Clamps the offsets: a sequence lies inside the tensors and has at least zero rows, whatever they say.
    __device__ PackedSequence at(const Attention& all, int sequence) const {
        PackedSequence found{all, min(max(cu_seqlens_q[sequence], 0), all.S_q),
                             min(max(cu_seqlens_k[sequence], 0), all.S_k), all.S_q};
        Attention& a = found.a;
        a.S_q = min(max(cu_seqlens_q[sequence + 1], found.query_row), all.S_q) - found.query_row;
        a.S_k = min(max(cu_seqlens_k[sequence + 1], found.key_row), all.S_k) - found.key_row;
        a.first = max(a.S_k - a.S_q - left, -a.S_q);
        a.last = min(a.S_k - a.S_q + right, a.S_k);
        return found;
    }
    __host__ bool hides_left() const { return left < MAX_LENGTH; }
};

/// A sequence of either kind.
struct GeneralSequence : PackedSequence {
    int batch;

    template <typename T>
    __device__ T* queries(const View<T>& view, int head) const {
        return view.at(batch, head) + query_row * view.row;
    }
    template <typename T>
    __device__ T* keys(const View<T>& view, int head) const {
        return view.at(batch, head) + key_row * view.row;
    }
    __device__ int64_t first_row(int head) const { return (int64_t{batch} * a.heads + head) * total_q + query_row; }
    __device__ int64_t mask(const Mask& mask, int head) const { return mask.at(batch, head); }
};

/// Batches or packed sequences, told apart at run time: one instance of a kernel for both.
struct Any {
    static constexpr bool GENERAL = false;
    Packed packed{};  // without offsets where the sequences are batches

    explicit Any(const Batched&) {}
    explicit Any(const Packed& packed) : packed(packed) {}

    __host__ __device__ bool is_packed() const { return packed.cu_seqlens_q != nullptr; }
    __host__ __device__ int64_t count(const Attention& all) const {
        return is_packed() ? packed.sequences : all.batches;
    }
    __host__ __device__ int longest_q(const Attention& all) const { return is_packed() ? packed.most_q : all.S_q; }
    __host__ __device__ int longest_k(const Attention& all) const { return is_packed() ? packed.most_k : all.S_k; }
    __device__ GeneralSequence at(const Attention& all, int index) const {
        if (is_packed()) return {packed.at(all, index), 0};
        return {{all, 0, 0, all.S_q}, index};
    }
};

/// The same for the instances that test every score, where weights may be dropped
/// (kernel_ladder/semantics/weight_dropout.py).
struct General : Any {
    static constexpr bool GENERAL = true;
    bool drops;
    DropoutMask dropout;

    template <typename Sequences>
    General(const Sequences& sequences, const std::optional<DropoutMask>& mask)
        : Any(sequences), drops(mask.has_value()), dropout(mask.value_or(DropoutMask(0, 1.0, 0, "attention"))) {}
};

/// Checks the offsets of packed operands (1, H, T, D). A negative side of the window hides nothing.
inline Packed make_packed(const Tensor& query, const Attention& a, const Tensor& cu_seqlens_q,
                          const Tensor& cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k, int64_t left,
                          int64_t right) {
    const auto check = [&](const Tensor& offsets, const char* name) {
        KL_CHECK(offsets.is_cuda() && offsets.get_device_index() == query.get_device_index() &&
                     offsets.scalar_type() == ScalarType::Int && offsets.dim() == 1 && offsets.is_contiguous(),
                 "attention_varlen: argument `", name, "` must be a dense vector of int32 on the device of `query`");
    };
    check(cu_seqlens_q, "cu_seqlens_q");
    check(cu_seqlens_k, "cu_seqlens_k");
    const int64_t sequences = cu_seqlens_q.numel() - 1;
    KL_CHECK(sequences > 0 && cu_seqlens_k.numel() == sequences + 1,
             "attention_varlen: arguments `cu_seqlens_q` and `cu_seqlens_k` must hold as many offsets, two or more");
    KL_CHECK(query.dim() == 4 && a.batches == 1, "attention_varlen: sequences are packed in one batch, got ",
             a.batches);
    const auto most = [](int64_t length, int total) {
        return static_cast<int>(std::max<int64_t>(std::min<int64_t>(length, total), 1));
    };
    const auto reach = [](int64_t side) {
        return static_cast<int>(side < 0 ? MAX_LENGTH : std::min<int64_t>(side, MAX_LENGTH));
    };
    return {static_cast<const int32_t*>(cu_seqlens_q.data_ptr()),
            static_cast<const int32_t*>(cu_seqlens_k.data_ptr()),
            sequences,
            most(max_seqlen_q, a.S_q),
            most(max_seqlen_k, a.S_k),
            reach(left),
            reach(right)};
}

/// View of a dense (T, H, D) tensor as one batch.
template <typename T>
View<T> packed_view(const Tensor& tensor) {
    View<T> view = make_view<T>(tensor);
    std::swap(view.head, view.row);
    return view;
}

}  // namespace kl
