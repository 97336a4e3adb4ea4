// How an exception passes through Rust and stays the same exception.
//
// Rust calls C++ through `guard`, which makes a text of an exception, and Rust makes an error of
// the text. If that error then leaves Rust for C++ again, the caller must see the exception itself:
// it may be one of Python's, which torch.utils.checkpoint or torch.export tells by its type.
//
// So each function through which libtorch calls Rust makes a RustCall first. While it lives,
// `guard` keeps the exceptions of this thread beside their texts. If Rust fails with one of these
// texts, `fail` throws that exception again. If Rust fails with any other text, because it handled
// the exception and then found another reason, or put a context around the text, `fail` throws
// that. What is kept ends with the RustCall, so no exception can come back later.
//
//   RustCall call;
//   if (kernel(…, &error) != 0) call.fail("my_ops::muladd", error);
#pragma once

#include <exception>
#include <string>
#include <string_view>
#include <vector>

#include "python_error.h"

namespace tch_extension {

class RustCall;

namespace detail {
// The newest RustCall of this thread, or null.
extern __thread RustCall* innermost_call;
}  // namespace detail

class RustCall {
 public:
  RustCall() noexcept : outer_(detail::innermost_call) { detail::innermost_call = this; }
  RustCall(const RustCall&) = delete;
  RustCall& operator=(const RustCall&) = delete;
  ~RustCall() { detail::innermost_call = outer_; }

  // Throws what Rust's error stands for: the exception with this text, or else a runtime_error with
  // the text after the operator's name.
  [[noreturn]] void fail(std::string_view name, std::string_view text);

  // The newest call of this thread, or null if libtorch has not called Rust.
  static RustCall* innermost() { return detail::innermost_call; }

  struct Kept {
    std::exception_ptr exception;
    PythonError python;
    std::vector<std::string> texts;  // the first is the one that Rust got
  };

  void keep(Kept kept);
  // The newest exception with this text, or null.
  Kept* find(std::string_view text);
  const Kept* newest() const { return kept_.empty() ? nullptr : &kept_.back(); }

 private:
  RustCall* outer_;
  std::vector<Kept> kept_;
};

// `name: text`, or the text alone if there is no name. If the text begins with the name already,
// perhaps without its namespace, the name is not repeated.
std::string named(std::string_view name, std::string_view text);

}  // namespace tch_extension
