#include "core/layout.h"

#include <algorithm>

namespace kl {

Strided collapse(const int64_t* sizes, const int64_t* strides, int64_t dim, const char* op) {
    Strided out;
    for (int64_t d = 0; d < dim; ++d) {
        if (sizes[d] == 1) continue;
        if (out.dims > 0 && out.strides[out.dims - 1] == sizes[d] * strides[d]) {
            out.sizes[out.dims - 1] *= sizes[d];
            out.strides[out.dims - 1] = strides[d];
            continue;
        }
        KL_CHECK(out.dims < MAX_DIMS, op, ": strides need more than ", MAX_DIMS, " dimensions");
        out.sizes[out.dims] = sizes[d];
        out.strides[out.dims++] = strides[d];
    }
    return out;
}

std::vector<int64_t> dense_strides(const std::vector<int64_t>& sizes, const std::vector<int64_t>& order) {
    std::vector<int64_t> strides(sizes.size());
    int64_t stride = 1;
    for (size_t i = order.size(); i-- > 0;) {
        strides[order[i]] = stride;
        stride *= std::max<int64_t>(sizes[order[i]], 1);
    }
    return strides;
}

bool heads_lie_inside(const Tensor& x) { return x.size(-3) > 1 && x.size(-2) > 1 && x.stride(-3) < x.stride(-2); }

DenseLike::DenseLike(const Tensor& input) {
    const int64_t dim = input.dim();
    for (int64_t d = 0; d < dim; ++d) order.push_back(d);
    if (!input.is_contiguous()) {
        auto by_stride = order;
        std::stable_sort(by_stride.begin(), by_stride.end(),
                         [&](int64_t a, int64_t b) { return input.stride(a) > input.stride(b); });
        const bool expanded = std::any_of(order.begin(), order.end(),
                                          [&](int64_t d) { return input.size(d) > 1 && input.stride(d) == 0; });
        if (!expanded) order = by_stride;
    }
    const auto shape = input.sizes();
    strides = dense_strides(std::vector<int64_t>(shape.begin(), shape.end()), order);
    for (const int64_t d : order) sizes.push_back(input.size(d));
}

Tensor DenseLike::allocate(const Tensor& input) const {
    const auto shape = input.sizes();
    return empty_strided(input, input.scalar_type(), shape.data(), strides.data(), input.dim());
}

Strided DenseLike::walk(const Tensor& tensor, const char* op) const {
    std::vector<int64_t> ordered;
    for (const int64_t d : order) ordered.push_back(tensor.stride(d));
    return collapse(sizes.data(), ordered.data(), static_cast<int64_t>(sizes.size()), op);
}

}  // namespace kl
