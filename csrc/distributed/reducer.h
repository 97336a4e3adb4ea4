// c10d's Reducer with what a program without Python needs around it: which gradients are the
// averages of all ranks, and which are this rank's own.
#pragma once

#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../libtorch_versions.h"
#include "comm_hooks.h"
#include "group.h"
// After group.h, which defines c10d's macros.
#include <torch/csrc/distributed/c10d/logger.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

namespace tch_extension {

// The bytes of a message of broadcast_coalesced, as in Python's DistributedDataParallel, which may
// be on the other ranks: all of a group must send the same messages.
inline constexpr size_t kBroadcastBytes = size_t{250} << 20;

// src/ffi/distributed/ddp.rs mirrors it.
struct DdpOptions {
  int64_t bucket_bytes;
  int64_t first_bucket_bytes;
  // The kind to which gradients are rounded for the transfer, as in kind.h; -1 for none.
  int32_t compress;
  bool find_unused_parameters;
  bool gradient_as_bucket_view;
  bool static_graph;
  bool broadcast_buffers;
  // Compare the parameters by libtorch's own collectives, as Python does.
  bool verify;
};

// A list of borrowed tensors.
struct TensorList {
  const at::Tensor* const* tensors;  // [length]
  size_t length;

  std::vector<at::Tensor> copy() const;
};

// The tensors of a model. src/ffi/distributed/ddp.rs mirrors it.
struct DdpTensors {
  TensorList parameters;     // those that are trained
  const char* const* names;  // of the parameters: UTF-8, not null-terminated
  const size_t* name_lengths;
  TensorList frozen;
  TensorList buffers;
  TensorList states;  // all that rank 0 hands to the other ranks, in this order
};

// A Rust closure that communicates a bucket.
struct CommHookVTable {
  // Returns 0 on success, or else has called tch_extension_ddp_hook_fail. It does not unwind.
  int (*run)(void* state, const c10d::GradBucket* bucket, struct HookCall* call);
  void (*drop)(void* state);
};

// What the logger has measured: nanoseconds, averaged over the passes that were sampled.
// src/ffi/distributed/ddp.rs mirrors it.
struct DdpStatistics {
  int64_t iteration;  // the pass that was sampled last
  int64_t forward;
  int64_t backward;
  int64_t communication;
  int64_t overlap;
  bool rebuilt;
  bool can_be_static;
};

// A Reducer whose protected members answer questions, and whose hooks are ours.
class Reducer final : public c10d::Reducer {
 public:
  using c10d::Reducer::Reducer;

  // Takes away the hooks that the constructor registered, because Ddp has its own.
  void take_hooks_away();
  // Makes `nodes` the accumulators of the parameters.
  void set_accumulators(const std::vector<NodePtr<torch::autograd::Node>>& nodes);

  // Whether a backward pass is expected, or running, whose gradients are to be averaged.
  bool awaits_gradients() const;
  // Whether the reductions of all buckets were started in this pass.
  bool has_started_all() const;
  // The parameters that the graph of the last forward pass did not lead to.
  std::vector<size_t> unused_parameters() const;
  // Whether the next call of rebuild_buckets may rebuild them.
  bool may_rebuild() const;
  // A timer records events, whose times must not be asked for if a capture has recorded them.
  void set_timing(bool on);

 private:
  std::unique_ptr<c10d::Timer> held_timer_;
};

// The tensors of a model on one rank, and the reduction of their gradients.
class Ddp final : public std::enable_shared_from_this<Ddp> {
 public:
  Ddp(c10::intrusive_ptr<c10d::ProcessGroup> group, std::vector<at::Tensor> parameters,
      std::vector<std::string> names, std::vector<at::Tensor> frozen,
      std::vector<at::Tensor> buffers, DdpOptions options, std::unique_ptr<CommHook> hook);
  ~Ddp();
  Ddp(const Ddp&) = delete;
  Ddp& operator=(const Ddp&) = delete;

  // Before the forward pass.
  void begin(bool synchronise, bool capturing);
  // After it. Replaces the outputs if their graph must tell when the backward pass begins.
  void end(std::vector<at::Tensor>& outputs);
  // Throws unless no reduction is unfinished and no gradient is of this rank only. For a step, also
  // unless a reduction has ended since the last one.
  void check(bool for_step);
  // The next step needs a reduction of its own.
  void mark_stepped();
  // Called by the graph that `end` made, when a backward pass reaches the outputs.
  void backward_begins();

  c10d::Logger& logger() { return *logger_; }
  // Whether all passes so far used the same parameters.
  bool graph_is_static() { return reducer_->ddp_graph_static(); }
  void set_sample_rate(int passes) { reducer_->set_ddp_runtime_logging_sample_rate(passes); }

 private:
  void add_hooks();
  void remove_hooks();
  // Called by the engine when a gradient was added to.
  void arrive(size_t index);
  void follow_stream(bool capturing);
  bool delay_is_queued();
  // Notes that the reduction of this pass ended well.
  void note_end();
  void refuse_in_hook() const;
  void check_tensors() const;
  // The following need the lock.
  void settle();
  void check_finished();
  std::string missing() const;
  // The parameters with gradients that were added to and not averaged since.
  std::string local() const;

  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const std::vector<at::Tensor> parameters_;
  const std::vector<std::string> names_;
  const std::vector<at::Tensor> frozen_;
  const std::vector<at::Tensor> buffers_;
  const std::vector<at::TensorOptions> layouts_;
  const DdpOptions options_;
  const bool is_on_several_devices_;
  CommHook* hook_ = nullptr;  // the Reducer owns it
  std::shared_ptr<Reducer> reducer_;
  std::shared_ptr<c10d::Logger> logger_;
  std::vector<NodePtr<torch::autograd::Node>> accumulators_;
  std::vector<uintptr_t> hooks_;

  // Of the current forward pass.
  bool synchronises_ = false;
  // Whether the last forward pass was synchronised, without which Python broadcasts no buffers.
  bool buffers_are_due_ = true;

  std::mutex mutex_;  // of what follows
  uint64_t pass_ = 0;
  std::vector<uint64_t> last_pass_;  // in which the parameter's gradient arrived
  std::vector<bool> is_local_;       // whether it was added to and not averaged since
  size_t arrived_ = 0;               // gradients in this pass
  bool is_open_ = false;             // the reduction of this pass has not ended
  bool end_is_queued_ = false;       // its end will be noted
  bool has_ended_ = false;           // it has ended, and well
  bool is_synchronised_ = false;     // a reduction has ended since the last step
  bool delay_is_queued_ = false;     // in the first pass of a static graph
};

}  // namespace tch_extension
