// What stands between the kernels' files and PyTorch's stable ABI.
#include <algorithm>

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

#include "core/torch_tensor.h"

// The one symbol of libtorch_cuda that is needed. Weak, so that the extension links and imports without that library.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                                                   void** ret_stream);

namespace kl {

namespace {

using Torch = torch::headeronly::ScalarType;

template <Torch THEIRS, ScalarType OURS>
constexpr bool SAME = static_cast<int32_t>(THEIRS) == static_cast<int32_t>(OURS);
static_assert(SAME<Torch::Byte, ScalarType::Byte> && SAME<Torch::Int, ScalarType::Int> &&
              SAME<Torch::Long, ScalarType::Long> && SAME<Torch::Half, ScalarType::Half> &&
              SAME<Torch::Float, ScalarType::Float> && SAME<Torch::Double, ScalarType::Double> &&
              SAME<Torch::Bool, ScalarType::Bool> && SAME<Torch::BFloat16, ScalarType::BFloat16> &&
              SAME<Torch::Float8_e4m3fn, ScalarType::Float8>);

void check(AOTITorchError status, const char* what) { KL_CHECK(status == AOTI_TORCH_SUCCESS, "could not ", what); }

}  // namespace

Tensor TorchTensor::ours(torch::stable::Tensor theirs) {
    Tensor tensor;
    const AtenTensorHandle handle = theirs.get();
    int64_t *sizes = nullptr, *strides = nullptr;
    int32_t dtype = 0, device_type = 0;
    check(aoti_torch_get_data_ptr(handle, &tensor.data), "read a tensor's address");
    check(aoti_torch_get_dim(handle, &tensor.dims), "read a tensor's dimensions");
    check(aoti_torch_get_numel(handle, &tensor.elements), "read a tensor's number of elements");
    check(aoti_torch_get_sizes(handle, &sizes), "read a tensor's sizes");
    check(aoti_torch_get_strides(handle, &strides), "read a tensor's strides");
    check(aoti_torch_get_dtype(handle, &dtype), "read a tensor's dtype");
    check(aoti_torch_get_device_type(handle, &device_type), "read a tensor's device");
    check(aoti_torch_get_device_index(handle, &tensor.device), "read a tensor's device");
    check(aoti_torch_is_contiguous(handle, &tensor.contiguous), "read a tensor's layout");
    tensor.size_of = sizes;
    tensor.stride_of = strides;
    tensor.dtype = static_cast<ScalarType>(dtype);
    tensor.on_cuda = device_type == aoti_torch_device_type_cuda();
    tensor.owner = std::make_shared<torch::stable::Tensor>(std::move(theirs));
    return tensor;
}

torch::stable::Tensor TorchTensor::theirs(const Tensor& ours) {
    return *static_cast<const torch::stable::Tensor*>(ours.owner.get());
}

int64_t Tensor::element_size() const {
    switch (dtype) {
        case ScalarType::Byte:
        case ScalarType::Bool:
        case ScalarType::Float8:
            return 1;
        case ScalarType::Half:
        case ScalarType::BFloat16:
            return 2;
        case ScalarType::Int:
        case ScalarType::Float:
            return 4;
        case ScalarType::Long:
        case ScalarType::Double:
            return 8;
    }
    raise({"no kernel knows dtype number ", static_cast<int32_t>(dtype)});
}

// Straight to the allocator: a dispatched call costs microseconds.
Tensor empty_strided(const Tensor& like, ScalarType dtype, const int64_t* sizes, const int64_t* strides, int64_t dim) {
    AtenTensorHandle handle = nullptr;
    check(aoti_torch_empty_strided(dim, sizes, strides, static_cast<int32_t>(dtype), aoti_torch_device_type_cuda(),
                                   like.get_device_index(), &handle),
          "allocate the output");
    return TorchTensor::ours(torch::stable::Tensor(handle));
}

Tensor empty(const Tensor& like, ScalarType dtype, const std::vector<int64_t>& sizes) {
    std::vector<int64_t> strides(sizes.size());
    int64_t stride = 1;
    for (size_t d = sizes.size(); d-- > 0;) {
        strides[d] = stride;
        stride *= std::max<int64_t>(sizes[d], 1);
    }
    return empty_strided(like, dtype, sizes.data(), strides.data(), static_cast<int64_t>(sizes.size()));
}

Launch::Launch(const Tensor& tensor)
    : device(tensor.get_device_index()),
      guard(std::make_shared<torch::stable::accelerator::DeviceGuard>(tensor.get_device_index())) {
    KL_CHECK(aoti_torch_get_current_cuda_stream != nullptr, "this PyTorch was built without CUDA");
    void* current = nullptr;
    check(aoti_torch_get_current_cuda_stream(device, &current), "get the current CUDA stream");
    stream = static_cast<cudaStream_t>(current);
}

}  // namespace kl
