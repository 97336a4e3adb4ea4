// Memory that an operation in flight reads or writes on another thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

namespace tch_extension {

struct Pin;

struct Unpin {
  void operator()(Pin* pin) const;
};

using Pinned = std::unique_ptr<Pin, Unpin>;

// Pins a tensor's memory on the CPU until the result is destroyed, as a view of Rust's does. Pins
// with one `operation`, which is any address, may overlap. Null if there is nothing to pin. Throws
// if the memory is in use: a writer is alone.
Pinned pin_in_flight(const at::Tensor& tensor, bool writer, const void* operation);

}  // namespace tch_extension
