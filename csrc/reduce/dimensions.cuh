// A sum over some dimensions of a tensor, in terms of memory: where the outputs and their summands lie.
#pragma once

#include "core/common.cuh"

namespace kl {

/// Offsets of the outputs and of their summands. Summand s of output o is at kept(o) + reduced(s); its sum goes to
/// output(o).
struct Reduction {
    Strided kept;     // index of an output -> offset of its first summand
    Strided output;   // index of an output -> its own offset
    Strided reduced;  // index of a summand -> offset from the first
    int64_t count, length;
};

/// Sort key of a dimension: its stride. A dimension that repeats an element (stride 0) sorts as the outermost.
inline int64_t distance(int64_t stride) { return stride == 0 ? std::numeric_limits<int64_t>::max() : stride; }

/// The summands of each output, of an input of any strides, in the order of memory.
struct ReductionLayout {
    Reduction r;
    std::vector<int64_t> output_sizes;
    bool columns;  // adjacent elements belong to neighbouring outputs

    ReductionLayout(const Tensor& input, const std::vector<int64_t>& dims, bool keepdim) {
        std::vector<bool> summed(input.dim(), false);
        for (const int64_t d : dims) {
            KL_CHECK(0 <= d && d < input.dim() && !summed[d], "sum: argument `dim` must hold each dimension once,",
                     " counted from the first of ", input.dim(), ", got ", d);
            summed[d] = true;
        }
        std::vector<int64_t> order[2], stride(input.dim());  // of the output
        r.count = r.length = 1;
        int64_t next = 1;
        for (int64_t d = input.dim(); d-- > 0;) {
            order[summed[d]].insert(order[summed[d]].begin(), d);
            (summed[d] ? r.length : r.count) *= input.size(d);
            stride[d] = next;
            if (!summed[d]) next *= std::max<int64_t>(input.size(d), 1);
        }
        for (int64_t d = 0; d < input.dim(); ++d) {
            if (!summed[d] || keepdim) output_sizes.push_back(summed[d] ? 1 : input.size(d));
        }
        // In the order of memory, so that as many dimensions collapse as can, and the innermost is the closest.
        for (auto& dims_of : order) {
            std::stable_sort(dims_of.begin(), dims_of.end(), [&](int64_t a, int64_t b) {
                return distance(input.stride(a)) > distance(input.stride(b));
            });
        }
        const auto walk = [&](const std::vector<int64_t>& of, auto&& stride_of) {
            std::vector<int64_t> sizes, strides;
            for (const int64_t d : of) {
                sizes.push_back(input.size(d));
                strides.push_back(stride_of(d));
            }
            return collapse(sizes.data(), strides.data(), static_cast<int64_t>(of.size()), "sum");
        };
        r.kept = walk(order[0], [&](int64_t d) { return input.stride(d); });
        r.output = walk(order[0], [&](int64_t d) { return stride[d]; });
        r.reduced = walk(order[1], [&](int64_t d) { return input.stride(d); });
        columns = innermost(r.kept) < innermost(r.reduced);
    }

    static int64_t innermost(const Strided& walk) {
        return walk.dims == 0 ? std::numeric_limits<int64_t>::max() : distance(walk.strides[walk.dims - 1]);
    }
};

inline bool steps_by(const Strided& walk, int64_t multiple, int dims) {
    bool all = true;
    for (int d = 0; d < dims; ++d) all = all && walk.strides[d] % multiple == 0;
    return all;
}

/// Whether `inner`'s last dimension consists of aligned vectors of 16 bytes, from every offset of `outer`.
template <typename In>
bool in_vectors(const In* input, const Strided& inner, const Strided& outer) {
    constexpr int64_t N = Vec<In>::size;
    const int last = inner.dims - 1;
    return last >= 0 && inner.strides[last] == 1 && inner.sizes[last] % N == 0 && steps_by(inner, N, last) &&
           steps_by(outer, N, outer.dims) && is_aligned16(input);
}

}  // namespace kl
