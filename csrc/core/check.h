// Argument checks, which raise RuntimeError in Python.
//
// STD_TORCH_CHECK writes its message through a std::ostringstream. That ends in a segmentation fault instead of an error
// where PyTorch brings its own C++ library (seen with the PyTorch 2.11 wheels).
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <type_traits>

namespace kl {

/// A part of a message: a string or an integer. It is built only where a check has failed, in few instructions, and
/// formatted elsewhere, because hundreds of checks are compiled.
struct MessagePart {
    const char* text;  // null where it is the number
    int64_t number = 0;

    MessagePart(const char* text) : text(text) {}
    MessagePart(const std::string& text) : text(text.c_str()) {}
    template <typename T, std::enable_if_t<std::is_integral_v<T>, int> = 0>
    MessagePart(T number) : text(nullptr), number(static_cast<int64_t>(number)) {}
};

[[noreturn]] void raise(std::initializer_list<MessagePart> message);

}  // namespace kl

// KL_CHECK(length <= limit, "a row of ", length, " elements is too long"): strings and integers.
#define KL_CHECK(condition, ...)                      \
    do {                                              \
        if (!(condition)) ::kl::raise({__VA_ARGS__}); \
    } while (0)
