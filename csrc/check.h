// Checks of arguments, which raise RuntimeError in Python.
//
// Not STD_TORCH_CHECK: it writes its message through a std::ostringstream, and in a process whose PyTorch brings a C++
// library of its own that ends in a segmentation fault (seen with the PyTorch 2.11 wheels) where an error was meant.
#pragma once

#include <stdexcept>
#include <string>
#include <type_traits>

namespace kl {

inline std::string text(const std::string& value) { return value; }
template <typename T, std::enable_if_t<std::is_integral_v<T>, int> = 0>
std::string text(T value) {
    return std::to_string(value);
}

template <typename... Parts>
[[noreturn]] void raise(const Parts&... parts) {
    throw std::runtime_error((text(parts) + ...));
}

}  // namespace kl

// KL_CHECK(length <= limit, "a row of ", length, " elements is too long"): strings and integers.
#define KL_CHECK(condition, ...)                    \
    do {                                            \
        if (!(condition)) ::kl::raise(__VA_ARGS__); \
    } while (0)
