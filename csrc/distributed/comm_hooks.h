// What a Reducer does with a bucket in place of c10d's own all-reduce.
#pragma once

#include "c10d.h"
#include "streams.h"
// After c10d.h, which defines c10d's macros.
#include <deque>
#include <functional>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <utility>

namespace tch_extension {

// A hook starts an operation for each bucket in `start`, and ends it in `finish`, which the Reducer
// calls in the same order at the end of the backward pass, on the stream of the backward pass.
class CommHook : public c10d::CommHookInterface {
 public:
  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) final {
    pending_.push_back(start(bucket));
    // The waiting is done in parseHookResult. A future of c10d's would call back on the thread or
    // on a stream of the transport.
    auto done = c10::make_intrusive<c10::ivalue::Future>(c10::NoneType::get());
    done->markCompleted(c10::IValue());
    return done;
  }

  at::Tensor parseHookResult(const c10::IValue&) final {
    TORCH_CHECK(!pending_.empty(), "internal error: a bucket was not sent");
    Finish finish = std::move(pending_.front());
    pending_.pop_front();
    return finish();
  }

  // Forgets what a backward pass that failed has left.
  void reset() { pending_.clear(); }

 protected:
  // Waits and returns the averages.
  using Finish = std::function<at::Tensor()>;
  virtual Finish start(c10d::GradBucket& bucket) = 0;

 private:
  std::deque<Finish> pending_;
};

// Rounds gradients to a half kind for the transfer.
class CompressHook final : public CommHook {
 public:
  CompressHook(c10::intrusive_ptr<c10d::ProcessGroup> group, at::ScalarType kind)
      : group_(std::move(group)), kind_(kind) {}

 protected:
  Finish start(c10d::GradBucket& bucket) override;

 private:
  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const at::ScalarType kind_;
};

}  // namespace tch_extension
