// The interface between C++ and Rust: no exception crosses it.
//
//   TCH_EXTENSION_API tch_extension::Message my_crate_sum(const at::Tensor* x, double* result) {
//     return tch_extension::guard([&] { *result = x->sum().item<double>(); });
//   }
//
// If there is a message, Rust makes an Err of it and frees it with tch_extension_free_message.
//
// Needs: torch's headers.
#pragma once

#include <c10/util/Exception.h>

#include <cstring>
#include <exception>
#include <string>

#define TCH_EXTENSION_API extern "C" __attribute__((visibility("default")))

namespace tch_extension {

// An owned error message, or null for success. The caller frees it with tch_extension_free_message.
using Message = char*;

// Runs `body`. An exception of any type becomes the message.
template <typename Body>
Message guard(Body&& body) noexcept {
  try {
    body();
    return nullptr;
  } catch (const c10::Error& error) {
    return strdup(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return strdup(error.what());
  } catch (...) {
    return strdup("a C++ exception of unknown type");
  }
}

}  // namespace tch_extension
