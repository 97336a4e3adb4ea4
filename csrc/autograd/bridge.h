// The data structures that Rust's autograd::Function and libtorch's engine exchange.
// src/ffi/autograd.rs mirrors them.
//
// `at::Tensor*` is torch-sys's C_tensor*. A null pointer means an absent tensor, and so does an
// undefined tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>

#include "tch_extension/c_abi.h"

namespace tch_extension {

class FunctionNode;

// Collects the gradients that a Rust backward pass returns.
struct BackwardResults;

// The functions through which the engine calls Rust, for an operator or for a hook. For a hook,
// `node` is null, and there is one gradient and one result, both of the hook's tensor. Neither
// function unwinds.
struct FunctionVTable {
  // Returns 0 on success. Otherwise it has called tch_extension_set_backward_error. Rust takes
  // ownership of the handles in `grads` in both cases; entries may be null.
  int (*backward)(const void* state, const FunctionNode* node, at::Tensor* const* grads,
                  size_t grads_len, BackwardResults* results);
  // Called once for each state, from the thread that releases the last reference to the graph.
  void (*drop)(void* state);
};

// The functions through which a saved tensor is packed and unpacked by Rust closures. None of them
// unwinds.
struct SavedHooksVTable {
  // Makes a new state for one saved tensor, from the hooks that are active now. `drop` frees it.
  void* (*start)(const void* hooks);
  // Returns 0 on success; otherwise `results` has the error. The tensor is borrowed.
  int (*pack)(void* state, const at::Tensor* tensor, BackwardResults* results);
  // Returns 0 on success, and the tensor is in `results` at index 0; otherwise `results` has the
  // error.
  int (*unpack)(const void* state, BackwardResults* results);
  void (*drop)(void* state);
};

struct ApplyParams {
  const char* name;  // the operator's name: UTF-8, not null-terminated, of static lifetime
  size_t name_len;
  at::Tensor* const* inputs;  // [inputs_len], entries may be null
  size_t inputs_len;
  at::Tensor* const*
      outputs;  // [outputs_len], made by the forward pass with grad mode off; entries may be null
  size_t outputs_len;
  at::Tensor* const* saved;  // [saved_len], entries may be null
  size_t saved_len;
  const size_t* dirty;  // [dirty_len], indices of inputs that the forward pass changed in place
  size_t dirty_len;
  const size_t* non_differentiable;  // [non_differentiable_len], indices of outputs
  size_t non_differentiable_len;
  const char* trace;  // where the forward pass was called, in anomaly mode; otherwise null
  size_t trace_len;
  const void* saved_hooks;  // passed to `saved_hooks_vtable->start`; null when no hooks are active
  const SavedHooksVTable* saved_hooks_vtable;
  bool needs_graph;        // as tch_extension_begin_forward decided
  bool materialize_grads;  // an absent incoming gradient becomes zeros
  bool double_backward;    // the backward pass consists of differentiable operations
  bool without_autocast;   // autocast casts nothing in the backward pass
};

}  // namespace tch_extension
