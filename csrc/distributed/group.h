// What Rust holds of a group of ranks, a store and an operation in flight.
#pragma once

#include <memory>
#include <string>

#include "c10d.h"

namespace tch_extension {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

// The ranks that compute together. Rust has a pointer to it, and shares it between threads.
struct ProcessGroup {
  // c10d's group, whose collectives choose the backend by the tensors' device. Never null.
  c10::intrusive_ptr<c10d::ProcessGroup> group;
};

// An operation in flight. It keeps its tensors alive, and copies the results to where they belong
// once it has ended.
struct Work;

// Makes the backend for CPU tensors. `timeout` is how long an operation may take. With `loopback`,
// all ranks are on this machine. `name` is the group's.
c10::intrusive_ptr<c10d::Backend> make_gloo(const StorePtr& store, int rank, int size,
                                            std::chrono::milliseconds timeout, bool loopback,
                                            const std::string& name);

// Closes the connections of a backend that make_gloo made, so that operations in flight fail on all
// ranks at once.
void close_connections(c10d::Backend& backend);

}  // namespace tch_extension
