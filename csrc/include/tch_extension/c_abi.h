// The interface between C++ and Rust: no exception crosses it.
//
//   TCH_EXTENSION_API tch_extension::Message my_crate_sum(const at::Tensor* x, double* result) {
//     return tch_extension::guard([&] { *result = x->sum().item<double>(); });
//   }
//
// If there is a message, Rust makes an Err of it and frees it with tch_extension_free_message.
//
// While libtorch calls Rust, the exception itself is kept beside its message: if Rust fails with
// the very same message, libtorch sees the exception, with its type.
//
// Needs: torch's headers.
#pragma once

#include <c10/util/Exception.h>

#include <cstring>
#include <exception>
#include <string>

#define TCH_EXTENSION_API extern "C" __attribute__((visibility("default")))

// Keeps the exception that is being handled, and returns a copy of `text` or, if it is empty, a
// better text. The Rust library defines it. A library that is compiled while the program runs does
// not see that definition; there it is null, and exceptions become texts.
extern "C" __attribute__((weak, visibility("default"))) char* tch_extension_keep_exception(
    const char* text);

namespace tch_extension {

// An owned error message, or null for success. The caller frees it with tch_extension_free_message.
using Message = char*;

// The message of the exception that is being handled.
inline Message caught(const char* text) noexcept {
  return tch_extension_keep_exception == nullptr ? strdup(text)
                                                 : tch_extension_keep_exception(text);
}

// Runs `body`. An exception of any type becomes the message.
template <typename Body>
Message guard(Body&& body) noexcept {
  try {
    body();
    return nullptr;
  } catch (const c10::Error& error) {
    return caught(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return caught(error.what());
  } catch (...) {
    return caught("a C++ exception of unknown type");
  }
}

}  // namespace tch_extension
