// The collective operations of a group, and what is in flight.
#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>

#include <torch/csrc/distributed/c10d/comm.hpp>

#include "../tensor/pin.h"
#include "group.h"
#include "streams.h"
#include "tch_extension/c_abi.h"

using namespace tch_extension;
using Milliseconds = std::chrono::milliseconds;

namespace tch_extension {

struct Work {
  // Null when there is nothing to wait for.
  c10::intrusive_ptr<c10d::Work> work;
  // What the operation reads and writes.
  std::vector<at::Tensor> tensors;
  // Results in memory of their own, with the tensors where they belong.
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;
  // No view of Rust's may use the memory meanwhile, and no other operation.
  std::vector<Pinned> pins;

  Work() = default;
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;
  ~Work() { release(); }

  // Ends the pins when the operation has ended, if nobody waits for it.
  void release() noexcept {
    if (pins.empty() || !work) return;
    try {
      if (work->isCompleted()) return;
      const auto future = work->getFuture();
      auto kept = std::make_shared<std::vector<Pinned>>(std::move(pins));
      future->addCallback([kept](c10::ivalue::Future&) { kept->clear(); });
    } catch (...) {
      // A message of Gloo's has no future. Nothing is written any more when its work is gone.
      work.reset();
    }
  }
};

}  // namespace tch_extension

namespace {

// src/ffi/distributed.rs has the same numbers.
enum class Op : int32_t {
  AllReduce,
  Broadcast,
  Reduce,
  AllGather,
  ReduceScatter,
  AllToAll,
  Send,
  Recv,
  Barrier,
};

}  // namespace

// src/ffi/distributed.rs mirrors it.
struct Call {
  Op op;
  int32_t reduce;   // c10d's number of the reduction
  int32_t rank;     // the root, or the peer
  int32_t tag;      // of a message
  int64_t timeout;  // milliseconds; -1 for the group's own
};

namespace {

bool is_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_neg() && !tensor.is_conj() &&
         !tensor._is_zerotensor();
}

// The values in the order of addresses, in which Gloo reads memory, whatever the strides are.
at::Tensor plain_of(const at::Tensor& tensor) {
  at::Tensor plain = tensor.detach();
  return is_plain(plain) ? plain : plain.resolve_conj().resolve_neg().contiguous();
}

// Only memory on the CPU is pinned: what is in flight on a GPU is in the order of streams.
void pin(Work& work, const at::Tensor& tensor, bool writer) {
  if (Pinned pin = pin_in_flight(tensor, writer, &work)) work.pins.push_back(std::move(pin));
}

// A tensor that the operation reads.
at::Tensor source(Work& work, const at::Tensor& tensor) {
  if (is_plain(tensor)) pin(work, tensor, /*writer=*/false);
  at::Tensor plain = plain_of(tensor);
  work.tensors.push_back(plain);
  return plain;
}

// A tensor that the operation writes, after it has read it if `reads`.
at::Tensor target(Work& work, const at::Tensor& tensor, bool reads) {
  at::assert_no_internal_overlap(tensor);
  // Also if the results get there at the end only, by a copy.
  pin(work, tensor, /*writer=*/true);
  at::Tensor plain = tensor.detach();
  if (!is_plain(plain)) {
    at::Tensor own = at::empty(plain.sizes(), plain.options().memory_format(std::nullopt));
    if (reads) own.copy_(plain);
    work.copies.emplace_back(plain, own);
    plain = own;
  }
  work.tensors.push_back(plain);
  return plain;
}

// Tells autograd that the values change.
void bump_version(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

c10d::ReduceOp reduction(const Call& call) {
  return static_cast<c10d::ReduceOp::RedOpType>(call.reduce);
}

c10::intrusive_ptr<c10d::Work> all_reduce(c10d::ProcessGroup& group, const Call& call,
                                          at::Tensor tensor) {
  c10d::AllreduceOptions options;
  options.reduceOp = reduction(call);
  options.timeout = Milliseconds(call.timeout);
  std::vector<at::Tensor> tensors{std::move(tensor)};
  return group.allreduce(tensors, options);
}

c10::intrusive_ptr<c10d::Work> broadcast(c10d::ProcessGroup& group, const Call& call,
                                         at::Tensor tensor) {
  c10d::BroadcastOptions options;
  options.rootRank = call.rank;
  options.timeout = Milliseconds(call.timeout);
  std::vector<at::Tensor> tensors{std::move(tensor)};
  return group.broadcast(tensors, options);
}

c10::intrusive_ptr<c10d::Work> reduce(c10d::ProcessGroup& group, const Call& call,
                                      at::Tensor tensor) {
  c10d::ReduceOptions options;
  options.reduceOp = reduction(call);
  options.rootRank = call.rank;
  options.timeout = Milliseconds(call.timeout);
  std::vector<at::Tensor> tensors{std::move(tensor)};
  return group.reduce(tensors, options);
}

// libtorch 2.13 has new names for the next three, which 2.11 lacks.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

c10::intrusive_ptr<c10d::Work> all_gather(c10d::ProcessGroup& group, const Call& call,
                                          at::Tensor output, at::Tensor input) {
  c10d::AllgatherOptions options;
  options.timeout = Milliseconds(call.timeout);
  // Gloo wants the shapes of the two to go together; they are contiguous.
  output = output.view(-1);
  input = input.view(-1);
  return group._allgather_base(output, input, options);
}

c10::intrusive_ptr<c10d::Work> reduce_scatter(c10d::ProcessGroup& group, const Call& call,
                                              at::Tensor output, at::Tensor input) {
  c10d::ReduceScatterOptions options;
  options.reduceOp = reduction(call);
  options.timeout = Milliseconds(call.timeout);
  output = output.view(-1);
  input = input.view(-1);
  return group._reduce_scatter_base(output, input, options);
}

c10::intrusive_ptr<c10d::Work> all_to_all(c10d::ProcessGroup& group, const Call& call,
                                          at::Tensor output, at::Tensor input,
                                          std::vector<int64_t> output_sizes,
                                          std::vector<int64_t> input_sizes) {
  c10d::AllToAllOptions options;
  options.timeout = Milliseconds(call.timeout);
  return group.alltoall_base(output, input, output_sizes, input_sizes, options);
}

#pragma GCC diagnostic pop

// ProcessGroup::barrier assigns to a static tensor, which several threads must not do at a time.
c10::intrusive_ptr<c10d::Work> barrier(c10d::ProcessGroup& group, const Call& call) {
  c10d::BarrierOptions options;
  options.timeout = Milliseconds(call.timeout);
  return group.getBackend(c10::DeviceType::CPU)->barrier(options);
}

}  // namespace

// Starts an operation on one tensor, or from `input` to `output`; the other pointer is null. The
// sizes are those of an all-to-all, for each rank; both arrays may be empty.
TCH_EXTENSION_API Message tch_extension_group_start(
    const ProcessGroup* group, const Call* call, const at::Tensor* output, const at::Tensor* input,
    const int64_t* output_sizes, const int64_t* input_sizes, size_t sizes, Work** result) {
  return guard([&] {
    at::NoGradGuard no_grad;
    auto& inner = *group->group;
    auto work = std::make_unique<Work>();
    switch (call->op) {
      case Op::AllReduce:
        work->work = all_reduce(inner, *call, target(*work, *output, true));
        break;
      case Op::Broadcast: {
        const bool reads = inner.getRank() == call->rank;
        at::Tensor tensor = reads ? source(*work, *output) : target(*work, *output, false);
        work->work = broadcast(inner, *call, tensor);
        break;
      }
      case Op::Reduce: {
        // Gloo leaves partial sums on the other ranks.
        const bool writes = inner.getRank() == call->rank;
        at::Tensor tensor = writes ? target(*work, *output, true) : plain_of(*output).clone();
        work->tensors.push_back(tensor);
        work->work = reduce(inner, *call, tensor);
        break;
      }
      case Op::AllGather: {
        at::Tensor from = source(*work, *input);
        work->work = all_gather(inner, *call, target(*work, *output, false), from);
        break;
      }
      case Op::ReduceScatter: {
        at::Tensor from = source(*work, *input);
        work->work = reduce_scatter(inner, *call, target(*work, *output, false), from);
        break;
      }
      case Op::AllToAll: {
        at::Tensor from = source(*work, *input);
        work->work =
            all_to_all(inner, *call, target(*work, *output, false), from,
                       {output_sizes, output_sizes + sizes}, {input_sizes, input_sizes + sizes});
        break;
      }
      case Op::Send: {
        std::vector<at::Tensor> tensors{source(*work, *input)};
        work->work = inner.send(tensors, call->rank, call->tag);
        break;
      }
      case Op::Recv: {
        std::vector<at::Tensor> tensors{target(*work, *output, false)};
        work->work = inner.recv(tensors, call->rank, call->tag);
        break;
      }
      case Op::Barrier:
        work->work = barrier(inner, *call);
        break;
    }
    if (output != nullptr) bump_version(*output);
    *result = work.release();
  });
}

// Waits until the results are there; with CUDA tensors, until the current stream will have them.
// A `timeout` of 0 waits as long as the operation may take. `done` says whether it has ended; if
// not, the work can be waited for again.
TCH_EXTENSION_API Message tch_extension_work_wait(Work* work, int64_t timeout) {
  return guard([&] {
    if (work->work) TORCH_CHECK(work->work->wait(Milliseconds(timeout)), "it was aborted");
    at::NoGradGuard no_grad;
    for (auto& [to, from] : work->copies) to.copy_(from);
    for (const at::Tensor& tensor : work->tensors) use_on_current_stream(tensor);
    work->copies.clear();
    work->tensors.clear();
    work->work.reset();
    work->pins.clear();
  });
}

TCH_EXTENSION_API Message tch_extension_work_is_completed(Work* work, bool* done) {
  return guard([&] { *done = !work->work || work->work->isCompleted(); });
}

TCH_EXTENSION_API void tch_extension_work_free(Work* work) { delete work; }

// Broadcasts many tensors in few messages of at most `bytes` each.
TCH_EXTENSION_API Message tch_extension_group_broadcast_coalesced(const ProcessGroup* group,
                                                                  const at::Tensor* const* tensors,
                                                                  size_t length, size_t bytes,
                                                                  int32_t root) {
  return guard([&] {
    at::NoGradGuard no_grad;
    std::vector<at::Tensor> list;
    std::vector<Pinned> pins;
    list.reserve(length);
    for (size_t i = 0; i < length; ++i) {
      at::assert_no_internal_overlap(*tensors[i]);
      pins.push_back(pin_in_flight(*tensors[i], /*writer=*/true, &pins));
      list.push_back(tensors[i]->detach());
    }
    c10d::broadcast_coalesced(group->group, list, bytes, root);
    for (size_t i = 0; i < length; ++i) bump_version(*tensors[i]);
  });
}

// Waits for all ranks, and names those that do not come in time.
TCH_EXTENSION_API Message tch_extension_group_monitored_barrier(const ProcessGroup* group,
                                                                int64_t timeout) {
  return guard([&] {
    c10d::BarrierOptions options;
    options.timeout = Milliseconds(timeout);
    group->group->getBackend(c10::DeviceType::CPU)->monitoredBarrier(options, true);
  });
}
