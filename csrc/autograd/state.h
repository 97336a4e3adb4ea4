// The Rust value that a graph node or a hook owns.
#pragma once

#include <torch/csrc/autograd/variable.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bridge.h"
#include "exceptions.h"

namespace tch_extension {

struct BackwardResults {
  torch::autograd::variable_list gradients;  // one for each input; undefined if there is none
  std::string error;
  std::vector<size_t> constants;  // inputs whose gradient does not depend on the incoming gradients
  bool is_last = false;           // nobody reads the saved tensors after this pass
  uint64_t owned = 0;  // the first 64 incoming gradients: bits of those nobody else holds
};

// Throws what compiled autograd gets from a node or a hook of this library.
[[noreturn]] inline void refuse_compiled_autograd(const std::string& name) {
  throw c10::NotImplementedError(
      name +
          ": compiled autograd cannot trace it, because it is written in Rust; run this backward "
          "pass "
          "without compiled autograd (torch._dynamo.config.compiled_autograd = False)",
      /*backtrace=*/nullptr);
}

// Owns a Rust value and drops it exactly once.
class State {
 public:
  State(void* data, const FunctionVTable* vtable) : data_(data), vtable_(vtable) {}
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  State(State&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), vtable_(other.vtable_) {}
  State& operator=(State&&) = delete;
  ~State() { reset(); }

  // Drops the value now.
  void reset() {
    if (void* data = std::exchange(data_, nullptr)) vtable_->drop(data);
  }

  // Calls Rust. If Rust fails, this throws its error after `name`.
  void backward(std::string_view name, const FunctionNode* node, at::Tensor* const* grads,
                size_t len, BackwardResults& results) const {
    RustCall call;
    if (vtable_->backward(data_, node, grads, len, &results) != 0) call.fail(name, results.error);
  }

 private:
  void* data_;
  const FunctionVTable* vtable_;
};

}  // namespace tch_extension
