// A backend of c10d's that can be given up at once and, if wanted, compares what the ranks are
// about to do before they do it.
//
// Without the comparison, ranks that differ in a shape, a kind or an operation get wrong sums, wait
// until the timeout, or end: Gloo throws on a thread of its own when a message has another size
// than expected. c10d's own ProcessGroupWrapper does not compare reductions, roots and messages.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <iterator>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "c10d.h"

namespace tch_extension {

// Tells the other ranks what this one is about to do.
class Checker {
 public:
  virtual ~Checker() = default;
  // Throws on every rank if they differ. It waits for all ranks.
  virtual void compare(const std::string& what) = 0;
  // Throws if a rank will send another number of rows than this one expects from it.
  virtual void compare_sizes(const std::vector<int64_t>& output,
                             const std::vector<int64_t>& input) = 0;
  // Announces a message to a rank, without waiting.
  virtual void announce(const std::string& what, int rank, int tag) = 0;
  // Waits for the announcement of a message; throws and closes the connection if it differs.
  virtual void expect(const std::string& what, int rank, int tag,
                      std::chrono::milliseconds timeout) = 0;
  // Makes everything that waits fail.
  virtual void end(const std::string& why) = 0;
};

// What group.cpp knows of the backends that this folder makes.
class Endable {
 public:
  virtual ~Endable() = default;
  // Makes all operations fail, those in flight and later ones, here and on the other ranks. Any
  // thread may call it at any time.
  virtual void end(const std::string& why) = 0;
  // Throws on every rank if they differ, and operations are compared.
  virtual void compare(const std::string& what) = 0;
  // Waits for what the destructor would abort. Throws if it loses something.
  virtual void leave() {}
};

inline std::string describe(const at::Tensor& tensor) {
  std::string text = std::string(c10::toString(tensor.scalar_type())) + " [";
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(tensor.size(i));
  }
  return text + "]";
}

inline std::string describe(at::TensorList tensors) {
  std::string text;
  for (const at::Tensor& tensor : tensors) text += (text.empty() ? "" : ", ") + describe(tensor);
  return text;
}

inline const char* describe(const c10d::ReduceOp& op) {
  static constexpr const char* kNames[] = {"sum",     "avg",    "product", "min",       "max",
                                           "bit and", "bit or", "bit xor", "premul sum"};
  const size_t index = op.op_;
  return index < std::size(kNames) ? kNames[index] : "unknown";
}

// A message that is received once its announcement has come and fits.
class CheckedRecv final : public c10d::Work {
 public:
  using Start = std::function<c10::intrusive_ptr<c10d::Work>(std::chrono::milliseconds)>;

  CheckedRecv(int rank, Start start) : Work(rank, c10d::OpType::RECV), start_(std::move(start)) {}

  bool wait(std::chrono::milliseconds timeout) override {
    std::exception_ptr failure;
    bool done = false;
    try {
      if (!work_) work_ = start_(timeout);
      done = work_->wait(timeout);
    } catch (...) {
      failure = std::current_exception();
    }
    finishAndThrow(failure);
    return done;
  }

  int sourceRank() const override { return work_ ? work_->sourceRank() : -1; }

 private:
  Start start_;
  c10::intrusive_ptr<c10d::Work> work_;
};

// `Base` is ProcessGroupGloo or ProcessGroupNCCL, or a class derived from one.
template <typename Base>
class Checked : public Base, public Endable {
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;

 public:
  template <typename... Args>
  explicit Checked(Args&&... args) : Base(std::forward<Args>(args)...) {}

  void set_checker(std::shared_ptr<Checker> checker) { checker_ = std::move(checker); }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return checked("broadcast from " + std::to_string(options.rootRank), tensors,
                   [&] { return Base::broadcast(tensors, options); });
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return checked(name("all_reduce", options.reduceOp), tensors,
                   [&] { return Base::allreduce(tensors, options); });
  }

  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override {
    return checked(name("all_reduce_coalesced", options.reduceOp), tensors,
                   [&] { return Base::allreduce_coalesced(tensors, options); });
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return checked(name("reduce", options.reduceOp) + " to " + std::to_string(options.rootRank),
                   tensors, [&] { return Base::reduce(tensors, options); });
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override {
    return checked("all_gather", inputs, [&] { return Base::allgather(outputs, inputs, options); });
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override {
    return checked("all_gather_into", input,
                   [&] { return Base::_allgather_base(output, input, options); });
  }

  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    return checked("all_gather_into_coalesced", inputs,
                   [&] { return Base::allgather_into_tensor_coalesced(outputs, inputs, options); });
  }

  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    return checked(name("reduce_scatter", options.reduceOp), outputs,
                   [&] { return Base::reduce_scatter(outputs, inputs, options); });
  }

  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    return checked(name("reduce_scatter_into", options.reduceOp), input,
                   [&] { return Base::_reduce_scatter_base(output, input, options); });
  }

  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    return checked(name("reduce_scatter_coalesced", options.reduceOp), inputs,
                   [&] { return Base::reduce_scatter_tensor_coalesced(outputs, inputs, options); });
  }

  // The ranks may have different numbers of rows, but what a rank sends must be what the other one
  // expects.
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes,
                        const c10d::AllToAllOptions& options) override {
    const Entry entry(*this);
    require_life();
    if (Checker* checker = entry.checker()) {
      const bool equal = output_sizes.empty() && input_sizes.empty();
      int64_t elements = 1;  // of a row; a rank may have no rows
      for (int64_t dim = 1; dim < input.dim(); ++dim) elements *= input.size(dim);
      const std::string part = equal
                                   ? describe(input)
                                   : std::string("rows of ") + c10::toString(input.scalar_type()) +
                                         " with " + std::to_string(elements) + " elements";
      checker->compare("all_to_all of " + part);
      if (!equal) checker->compare_sizes(output_sizes, input_sizes);
    }
    const auto alone = lock_start();
    return Base::alltoall_base(output, input, output_sizes, input_sizes, options);
  }

  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return checked("barrier", at::TensorList{}, [&] { return Base::barrier(options); });
  }

  WorkPtr send(Tensors& tensors, int rank, int tag) override {
    const Entry entry(*this);
    require_life();
    Checker* checker = entry.checker();
    if (checker != nullptr && checks_messages(tensors)) {
      checker->announce(describe(tensors), rank, tag);
    }
    return Base::send(tensors, rank, tag);
  }

  WorkPtr recv(Tensors& tensors, int rank, int tag) override {
    const Entry entry(*this);
    require_life();
    if (entry.checker() == nullptr || !checks_messages(tensors))
      return Base::recv(tensors, rank, tag);
    // The group keeps this backend alive as long as the work.
    auto start = [this, tensors, rank, tag](std::chrono::milliseconds timeout) mutable {
      try {
        checker_->expect(describe(tensors), rank, tag, timeout);
      } catch (const std::exception& error) {
        // The sender waits until its message is received, which it never will be.
        end(error.what());
        throw;
      }
      const Entry start(*this);
      require_life();
      return Base::recv(tensors, rank, tag);
    };
    return c10::make_intrusive<CheckedRecv>(this->getRank(), std::move(start));
  }

  void compare(const std::string& what) override {
    const Entry entry(*this);
    require_life();
    if (Checker* checker = entry.checker()) checker->compare(what);
  }

  void end(const std::string& why) override {
    {
      const std::lock_guard<std::mutex> lock(why_mutex_);
      if (ended_) return;
      why_ = why;
      ended_ = true;
    }
    if (checker_) checker_->end(why);
    end_base(why);
  }

 protected:
  // Makes what is in flight fail.
  virtual void end_base(const std::string& why) = 0;
  // An operation is about to start on the current stream.
  virtual void starting() {}
  // Held while `Base` starts an operation, which waits for no other rank.
  virtual std::unique_lock<std::recursive_mutex> lock_start() { return {}; }

 private:
  static std::string name(const char* name, const c10d::ReduceOp& op) {
    return std::string(name) + "(" + describe(op) + ")";
  }

  // NCCL's messages must be started in order, so that none can wait for its announcement.
  static bool checks_messages(at::TensorList tensors) {
    return !tensors.empty() && tensors[0].is_cpu();
  }

  // Held while an operation is started: operations that start at the same time would have another
  // order on each rank. `Base` starts some operations by others, which are not compared again.
  class Entry {
   public:
    explicit Entry(Checked& backend) : backend_(backend), lock_(backend.mutex_) {
      backend_.depth_ += 1;
    }
    ~Entry() { backend_.depth_ -= 1; }
    Entry(const Entry&) = delete;
    Entry& operator=(const Entry&) = delete;

    // What compares the operation with those of the other ranks, or null.
    Checker* checker() const { return backend_.depth_ == 1 ? backend_.checker_.get() : nullptr; }

   private:
    Checked& backend_;
    std::unique_lock<std::recursive_mutex> lock_;
  };

  void require_life() {
    if (ended_) {
      const std::lock_guard<std::mutex> why_lock(why_mutex_);
      TORCH_CHECK(false, "the group has failed: ", why_);
    }
    starting();
  }

  template <typename Described, typename Start>
  WorkPtr checked(std::string what, const Described& tensors, Start&& start) {
    const Entry entry(*this);
    require_life();
    if (Checker* checker = entry.checker()) {
      const std::string of = describe(tensors);
      checker->compare(what + (of.empty() ? "" : " of ") + of);
    }
    const auto alone = lock_start();
    return start();
  }

  std::recursive_mutex mutex_;
  int depth_ = 0;
  std::mutex why_mutex_;
  std::atomic<bool> ended_{false};
  std::string why_;
  std::shared_ptr<Checker> checker_;
};

}  // namespace tch_extension
