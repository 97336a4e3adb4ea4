// What Rust holds of a group of ranks, a store and an operation in flight.
#pragma once

#include <memory>

#include "c10d.h"

// How a group is made; src/ffi/distributed.rs mirrors it.
struct GroupParts {
  int32_t rank;
  int32_t size;
  int64_t timeout;  // of an operation, in milliseconds
  const char* name;
  size_t name_length;
  bool loopback;        // all ranks are on this machine
  bool check;           // compare what the ranks do before they do it
  bool abort_on_error;  // NCCL's errors become exceptions, instead of ending the process
  int32_t device;       // the index of the GPU of this rank, or -1
};

namespace tch_extension {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

// The ranks that compute together. Rust has a pointer to it, and shares it between threads.
struct ProcessGroup {
  // c10d's group, whose collectives choose the backend by the tensors' device. Never null.
  c10::intrusive_ptr<c10d::ProcessGroup> group;
};

class Checker;

// What compares the operations of the ranks.
std::shared_ptr<Checker> make_checker(const StorePtr& store, const GroupParts& parts);

// The backend for CPU tensors. It is also an Endable. `checker` may be null.
c10::intrusive_ptr<c10d::Backend> make_gloo(const StorePtr& store, const GroupParts& parts,
                                            const std::shared_ptr<Checker>& checker);

// The backend for CUDA tensors on the GPU of `parts`. It is also an Endable. `checker` may be null.
// Throws if this build has none.
c10::intrusive_ptr<c10d::Backend> make_nccl(const StorePtr& store, const GroupParts& parts,
                                            const std::shared_ptr<Checker>& checker);

}  // namespace tch_extension
