// The tensor type of the kernel files. They do not include PyTorch, whose headers would dominate their compile time.
// tensor.cpp converts between the two; torch_tensor.h registers operators with these types.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "core/check.h"

namespace kl {

// PyTorch's dtypes, by its own numbers.
enum class ScalarType : int32_t {
    Byte = 0,
    Int = 3,
    Long = 4,
    Half = 5,
    Float = 6,
    Double = 7,
    Bool = 11,
    BFloat16 = 15,
    Float8 = 24  // e4m3
};

// Sizes or strides, borrowed from the tensor.
class Extents {
    const int64_t* first;
    int64_t count;

  public:
    Extents(const int64_t* first, int64_t count) : first(first), count(count) {}
    const int64_t* data() const { return first; }
    const int64_t* begin() const { return first; }
    const int64_t* end() const { return first + count; }
    size_t size() const { return static_cast<size_t>(count); }
    int64_t operator[](int64_t d) const { return first[d]; }
};

/// Shares ownership of a PyTorch tensor and caches its metadata.
class Tensor {
    std::shared_ptr<void> owner;  // PyTorch's own
    void* data = nullptr;
    const int64_t *size_of = nullptr, *stride_of = nullptr;
    int64_t dims = 0, elements = 0;
    ScalarType dtype = ScalarType::Float;
    int32_t device = -1;
    bool on_cuda = false, contiguous = true;

    friend struct TorchTensor;

    // Dimensions count from the end too, as in Python.
    int64_t place(int64_t d) const {
        const int64_t place = d < 0 ? d + dims : d;
        KL_CHECK(0 <= place && place < dims, "a tensor of ", dims, " dimensions has none of number ", d);
        return place;
    }

  public:
    void* data_ptr() const { return data; }
    int64_t dim() const { return dims; }
    int64_t numel() const { return elements; }
    Extents sizes() const { return {size_of, dims}; }
    Extents strides() const { return {stride_of, dims}; }
    int64_t size(int64_t d) const { return size_of[place(d)]; }
    int64_t stride(int64_t d) const { return stride_of[place(d)]; }
    ScalarType scalar_type() const { return dtype; }
    int64_t element_size() const;
    bool is_contiguous() const { return contiguous; }
    bool is_cuda() const { return on_cuda; }
    int32_t get_device_index() const { return device; }
};

// An uninitialised tensor on the device of `like`.
Tensor empty_strided(const Tensor& like, ScalarType dtype, const int64_t* sizes, const int64_t* strides, int64_t dim);
Tensor empty(const Tensor& like, ScalarType dtype, const std::vector<int64_t>& sizes);

/// Makes the tensor's device current during its lifetime, and holds the stream to launch on.
struct Launch {
    int32_t device;
    cudaStream_t stream;

    explicit Launch(const Tensor& tensor);

  private:
    std::shared_ptr<void> guard;
};

}  // namespace kl
