// The host side that every variant of matmul shares; the table of the climb stands in matmul.cuh.

#include "matmul/matmul.cuh"

namespace kl {

namespace {

// `prepare`, with the output where it is given, else with one of its own.
Call described(const Tensor& input, const Tensor& other, bool transposed, const char* op, const char* other_name,
               const Tensor* given) {
    check_cuda(input, op, "input");
    check_like(other, input, op, other_name);
    // Each accessor is a call into PyTorch: sizes and strides are fetched once.
    const int64_t a_dim = input.dim(), b_dim = other.dim();
    const int64_t *a_sizes = input.sizes().data(), *a_strides = input.strides().data();
    const int64_t *b_sizes = other.sizes().data(), *b_strides = other.strides().data();
    KL_CHECK(a_dim > 0 && b_dim > 0, op, ": arguments `input` and `", other_name, "` must have at least 1 dimension");
    KL_CHECK(!transposed || b_dim == 2, op, ": argument `", other_name, "` must have 2 dimensions");
    const int64_t row = transposed || b_dim == 1 ? b_dim - 1 : b_dim - 2;  // the dimension of `other` that is K
    const int64_t column = transposed ? 0 : b_dim - 1;

    Product p{};
    p.M = a_dim > 1 ? a_sizes[a_dim - 2] : 1;
    p.K = a_sizes[a_dim - 1];
    p.N = b_dim > 1 ? b_sizes[column] : 1;
    p.a_m = a_dim > 1 ? a_strides[a_dim - 2] : 0;
    p.a_k = a_strides[a_dim - 1];
    p.b_k = b_strides[row];
    p.b_n = b_dim > 1 ? b_strides[column] : 0;
    KL_CHECK(p.K == b_sizes[row], op, ": the last dimension of `input` must equal the inner dimension of `", other_name,
             "`, got ", p.K, " and ", b_sizes[row]);

    const int64_t a_batches = std::max<int64_t>(a_dim - 2, 0), b_batches = std::max<int64_t>(b_dim - 2, 0);
    const int64_t batch_dims = std::max(a_batches, b_batches);
    // The output's sizes, then its strides; on the heap only where there are unusually many.
    constexpr int64_t FEW_DIMS = 8;
    int64_t few[2 * FEW_DIMS];
    std::vector<int64_t> many;
    if (batch_dims + 2 > FEW_DIMS) many.resize(2 * (batch_dims + 2));
    int64_t* shape = many.empty() ? few : many.data();
    p.batches = 1;
    for (int64_t d = 0; d < batch_dims; ++d) {
        const int64_t a_d = d - (batch_dims - a_batches), b_d = d - (batch_dims - b_batches);
        const int64_t a_size = a_d >= 0 ? a_sizes[a_d] : 1, b_size = b_d >= 0 ? b_sizes[b_d] : 1;
        KL_CHECK(a_size == b_size || a_size == 1 || b_size == 1, op, ": the batch dimensions of `input` and `",
                 other_name, "` must broadcast, got ", a_size, " and ", b_size);
        const int64_t size = a_size == 1 ? b_size : a_size;
        shape[d] = size;
        p.batches *= size;
        if (size == 1) continue;
        const int64_t a_stride = a_size == 1 ? 0 : a_strides[a_d], b_stride = b_size == 1 ? 0 : b_strides[b_d];
        const int last = p.batch_dims - 1;
        if (last >= 0 && p.a_batch[last] == size * a_stride && p.b_batch[last] == size * b_stride) {
            p.batch_sizes[last] *= size;  // both operands walk this dimension and the one before as one
            p.a_batch[last] = a_stride;
            p.b_batch[last] = b_stride;
            continue;
        }
        KL_CHECK(p.batch_dims < MAX_DIMS, op, ": batch strides need more than ", MAX_DIMS, " dimensions");
        p.batch_sizes[p.batch_dims] = size;
        p.a_batch[p.batch_dims] = a_stride;
        p.b_batch[p.batch_dims++] = b_stride;
    }
    if (given != nullptr) return {p, *given};
    int64_t dim = batch_dims;
    const int64_t rows = p.M;
    if (a_dim > 1) shape[dim++] = rows;
    if (b_dim > 1) shape[dim++] = p.N;
    // The rows of batches that multiply the same matrix are rows of one, where their strides fit: fuller tiles.
    const int last = p.batch_dims - 1;
    if (last >= 0 && p.b_batch[last] == 0 && (rows == 1 || p.a_batch[last] == rows * p.a_m)) {
        if (rows == 1) p.a_m = p.a_batch[last];
        p.M *= p.batch_sizes[last];
        p.batches /= std::max<int64_t>(p.batch_sizes[last], 1);
        p.batch_dims = last;
    }
    int64_t* strides = shape + dim;
    int64_t stride = 1;
    for (int64_t d = dim; d-- > 0;) {
        strides[d] = stride;
        stride *= std::max<int64_t>(shape[d], 1);
    }
    return {p, empty_strided(input, input.scalar_type(), shape, strides, dim)};
}

}  // namespace

Call prepare(const Tensor& input, const Tensor& other, bool transposed, const char* op, const char* other_name) {
    return described(input, other, transposed, op, other_name, nullptr);
}

Call prepare_into(const Tensor& output, const Tensor& input, const Tensor& other, const char* op, int64_t padding) {
    KL_CHECK(input.dim() == 2 && other.dim() == 2 && output.dim() == 2, op, ": every operand must be a matrix");
    const Call call = described(input, other, false, op, "other", &output);
    const auto& [p, c] = call;
    KL_CHECK(c.is_cuda() && c.get_device_index() == input.get_device_index(), op,
             ": argument `output` must be on the device of `input`");
    KL_CHECK(c.size(0) == p.M && c.size(1) >= p.N && c.size(1) <= p.N + padding, op, ": argument `output` must have ",
             p.M, " rows and ", p.N, " columns, got ", c.size(0), " and ", c.size(1));
    KL_CHECK((c.size(1) == 1 || c.stride(1) == 1) && (p.M == 1 || c.stride(0) >= c.size(1)), op,
             ": argument `output` must have columns side by side");
    return call;
}

}  // namespace kl
