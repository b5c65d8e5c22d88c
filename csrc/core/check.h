// Checks of arguments, which raise RuntimeError in Python.
//
// Not STD_TORCH_CHECK: it writes its message through a std::ostringstream, and in a process whose PyTorch brings a C++
// library of its own that ends in a segmentation fault (seen with the PyTorch 2.11 wheels) where an error was meant.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <type_traits>

namespace kl {

// A piece of a message, a string or an integer: laid down only where a check has failed, in few instructions, and made
// into text elsewhere. Hundreds of checks are compiled.
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
