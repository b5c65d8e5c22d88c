// From PyTorch's tensors to those of the kernels' files, and back; and operators of the latter as PyTorch registers them.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <type_traits>
#include <utility>

#include "core/tensor.h"

namespace kl {

struct TorchTensor {
    static Tensor ours(torch::stable::Tensor theirs);
    static torch::stable::Tensor theirs(const Tensor& ours);
};

// The type that stands in PyTorch's place of a parameter T, and the conversion.
template <typename T>
struct AsTorch {
    using type = T;
    static T ours(T value) { return value; }
};

template <>
struct AsTorch<Tensor> {
    using type = torch::stable::Tensor;
    static Tensor ours(type value) { return TorchTensor::ours(std::move(value)); }
};

template <>
struct AsTorch<std::optional<Tensor>> {
    using type = std::optional<torch::stable::Tensor>;
    static std::optional<Tensor> ours(type value) {
        return value.has_value() ? std::optional(TorchTensor::ours(*std::move(value))) : std::nullopt;
    }
};

// Leaves an operator's results on the stack: one tensor or several, or none where it writes to its arguments.
inline void leave(StableIValue* stack, const Tensor& result) {
    *stack = torch::stable::detail::from(TorchTensor::theirs(result));
}
template <typename... Results>
void leave(StableIValue* stack, const std::tuple<Results...>& results) {
    std::apply([&](const Results&... each) { (leave(stack++, each), ...); }, results);
}
template <typename Result>
constexpr uint64_t RESULTS = 1;
template <>
inline constexpr uint64_t RESULTS<void> = 0;
template <typename... Results>
constexpr uint64_t RESULTS<std::tuple<Results...>> = sizeof...(Results);

// Calls a function with the arguments that PyTorch's dispatcher has laid on the stack, and leaves its results there.
template <typename Result, typename... Parameters, size_t... I>
void call_boxed(Result (*function)(Parameters...), StableIValue* stack, uint64_t arguments, uint64_t results,
                std::index_sequence<I...>) {
    KL_CHECK(arguments == sizeof...(I) && results == RESULTS<Result>, "an operator's schema has ", arguments,
             " arguments and ", results, " results, its function ", sizeof...(I), " and ", RESULTS<Result>);
    std::tuple<std::decay_t<Parameters>...> values{AsTorch<std::decay_t<Parameters>>::ours(
        torch::stable::detail::to<typename AsTorch<std::decay_t<Parameters>>::type>(stack[I]))...};
    if constexpr (std::is_void_v<Result>) {
        std::apply(function, values);
    } else {
        leave(stack, std::apply(function, values));
    }
}
template <typename Result, typename... Parameters>
[[gnu::noinline]] void call_boxed(Result (*function)(Parameters...), StableIValue* stack, uint64_t arguments,
                                  uint64_t results) {
    call_boxed(function, stack, arguments, results, std::index_sequence_for<Parameters...>{});
}

// FUNCTION as PyTorch registers it. TORCH_BOX would compile the conversions anew for every function; here they are
// compiled once for every signature.
template <auto* FUNCTION>
void boxed(StableIValue* stack, uint64_t arguments, uint64_t results) {
    call_boxed(FUNCTION, stack, arguments, results);
}

}  // namespace kl
