// What crosses between Rust's autograd::Function and libtorch's engine. src/ffi/autograd.rs mirrors
// it.
//
// `at::Tensor*` is what torch-sys calls C_tensor*. A null pointer, like an undefined tensor, stands
// for an absent tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>

#include "tch_extension/c_abi.h"

namespace tch_extension {

class FunctionNode;

// Collects the gradients that a Rust backward returns.
struct BackwardResults;

// How the engine calls into Rust, for an operator or for a hook (then `node` is null, and the one
// gradient and the one result are the tensor's). Neither entry unwinds.
struct FunctionVTable {
  // 0: success. Otherwise it has called tch_extension_set_backward_error. The handles in `grads`
  // become Rust's in any case; entries may be null.
  int (*backward)(const void* state, const FunctionNode* node, at::Tensor* const* grads,
                  size_t grads_len, BackwardResults* results);
  // Called once for each state, from whichever thread lets go of the graph last.
  void (*drop)(void* state);
};

// How a saved tensor is packed and unpacked by Rust closures. No entry unwinds.
struct SavedHooksVTable {
  // A new state for one saved tensor, from the hooks that are in force; dropped by `drop`.
  void* (*start)(const void* hooks);
  // 0: success; otherwise `results` has the error. The tensor is borrowed.
  int (*pack)(void* state, const at::Tensor* tensor, BackwardResults* results);
  // 0: success, and the tensor is in `results` at place 0; otherwise the error is.
  int (*unpack)(const void* state, BackwardResults* results);
  void (*drop)(void* state);
};

struct ApplyParams {
  const char* name;  // of the operator, UTF-8, not terminated, of static lifetime
  size_t name_len;
  at::Tensor* const* inputs;  // [inputs_len], entries may be null
  size_t inputs_len;
  at::Tensor* const*
      outputs;  // [outputs_len], as the forward made them with grad mode off; may be null
  size_t outputs_len;
  at::Tensor* const* saved;  // [saved_len], entries may be null
  size_t saved_len;
  const size_t* dirty;  // [dirty_len], indices of inputs that the forward changed in place
  size_t dirty_len;
  const size_t* non_differentiable;  // [non_differentiable_len], indices of outputs
  size_t non_differentiable_len;
  const char* trace;  // where the forward was called, in anomaly mode; otherwise null
  size_t trace_len;
  const void* saved_hooks;  // for `saved_hooks_vtable->start`; null when none are in force
  const SavedHooksVTable* saved_hooks_vtable;
  bool needs_graph;        // as tch_extension_begin_forward decided it
  bool materialize_grads;  // an absent incoming gradient becomes zeros
  bool double_backward;    // the backward is itself made of differentiable operations
};

}  // namespace tch_extension
