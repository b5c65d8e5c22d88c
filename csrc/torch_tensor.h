// From PyTorch's tensors to those of the kernels' files, and back; and operators of the latter as PyTorch registers them.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <type_traits>
#include <utility>

#include "tensor.h"

namespace kl {

struct TorchTensor {
    static Tensor ours(torch::stable::Tensor theirs);
    static torch::stable::Tensor theirs(const Tensor& ours);
};

// The type that stands in PyTorch's place of T, and the conversions: of tensors, alone, optional or several of them.
template <typename T>
struct AsTorch {
    using type = T;
    static T ours(T value) { return value; }
};

template <>
struct AsTorch<Tensor> {
    using type = torch::stable::Tensor;
    static Tensor ours(type value) { return TorchTensor::ours(std::move(value)); }
    static type theirs(const Tensor& value) { return TorchTensor::theirs(value); }
};

template <>
struct AsTorch<std::optional<Tensor>> {
    using type = std::optional<torch::stable::Tensor>;
    static std::optional<Tensor> ours(type value) {
        return value.has_value() ? std::optional(TorchTensor::ours(*std::move(value))) : std::nullopt;
    }
    static type theirs(const std::optional<Tensor>& value) {
        return value.has_value() ? type(TorchTensor::theirs(*value)) : std::nullopt;
    }
};

template <typename... T>
struct AsTorch<std::tuple<T...>> {
    using type = std::tuple<typename AsTorch<T>::type...>;
    static type theirs(const std::tuple<T...>& values) {
        return std::apply([](const T&... value) { return type(AsTorch<T>::theirs(value)...); }, values);
    }
};

// FUNCTION with PyTorch's types, for TORCH_BOX.
template <auto* FUNCTION>
struct Adapted;
template <typename Result, typename... Parameters, Result (*FUNCTION)(Parameters...)>
struct Adapted<FUNCTION> {
    template <typename T>
    using As = AsTorch<std::remove_cv_t<std::remove_reference_t<T>>>;

    static typename As<Result>::type call(typename As<Parameters>::type... values) {
        return As<Result>::theirs(FUNCTION(As<Parameters>::ours(std::move(values))...));
    }
};

}  // namespace kl
