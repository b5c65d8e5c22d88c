#include "core/check.h"

#include <stdexcept>

namespace kl {

void raise(std::initializer_list<MessagePart> message) {
    std::string whole;
    for (const MessagePart& part : message) whole += part.text != nullptr ? part.text : std::to_string(part.number);
    throw std::runtime_error(whole);
}

}  // namespace kl
