// The functions through which Rust makes and asks a Ddp.
#include <ATen/core/grad_mode.h>

#include "reducer.h"
#include "tch_extension/c_abi.h"

using namespace tch_extension;

namespace tch_extension {

struct Work;  // csrc/distributed/collectives.cpp

// What a Rust hook says about its bucket.
struct HookCall {
  std::string error;
  Work* work = nullptr;  // in flight; C++ owns it
};

}  // namespace tch_extension

// csrc/distributed/collectives.cpp
TCH_EXTENSION_API Message tch_extension_work_wait(Work* work, int64_t timeout);
TCH_EXTENSION_API void tch_extension_work_free(Work* work);
// csrc/autograd/bridge.cpp
TCH_EXTENSION_API void tch_extension_free_message(Message message);

namespace {

class RustHook final : public CommHook {
 public:
  RustHook(void* state, const CommHookVTable* vtable) : state_(state), vtable_(vtable) {}
  ~RustHook() override { vtable_->drop(state_); }

 protected:
  Finish start(c10d::GradBucket& bucket) override {
    HookCall call;
    const int failed = vtable_->run(state_, &bucket, &call);
    const std::shared_ptr<Work> work(call.work, [](Work* work) {
      if (work != nullptr) tch_extension_work_free(work);
    });
    TORCH_CHECK(failed == 0, "the communication hook: ", call.error);
    at::Tensor buffer = bucket.getBuffer();
    return [buffer, work] {
      if (!work) return buffer;
      if (const Message message = tch_extension_work_wait(work.get(), 0)) {
        const std::string text = message;
        tch_extension_free_message(message);
        TORCH_CHECK(false, text);
      }
      return buffer;
    };
  }

 private:
  void* const state_;
  const CommHookVTable* const vtable_;
};

std::vector<std::string> names_of(const DdpTensors& tensors) {
  std::vector<std::string> names;
  for (size_t i = 0; i < tensors.parameters.length; ++i) {
    names.emplace_back(tensors.names[i], tensors.name_lengths[i]);
  }
  return names;
}

void hand_over(const ProcessGroup& group, const TensorList& states) {
  at::NoGradGuard no_grad;
  std::vector<at::Tensor> list = states.copy();
  for (auto& tensor : list) tensor = tensor.detach();
  if (!list.empty()) c10d::broadcast_coalesced(group.group, list, kBroadcastBytes, 0);
  for (size_t i = 0; i < states.length; ++i) {
    if (!states.tensors[i]->is_inference()) {
      states.tensors[i]->unsafeGetTensorImpl()->bump_version();
    }
  }
}

// A timer's numbers, or 0 if there are none.
int64_t number(const at::DDPLoggingData& data, const char* name) {
  const auto entry = data.ints_map.find(name);
  return entry == data.ints_map.end() ? 0 : std::max<int64_t>(entry->second, 0);
}

}  // namespace

std::vector<at::Tensor> TensorList::copy() const {
  std::vector<at::Tensor> list;
  list.reserve(length);
  for (size_t i = 0; i < length; ++i) list.push_back(*tensors[i]);
  return list;
}

// Hands the values of rank 0 to the other ranks, and makes a Ddp. The tensors were checked, also
// against those of the other ranks, except if `options->verify` asks for it. Takes ownership of
// `hook`, which may be null, even on failure.
TCH_EXTENSION_API Message tch_extension_ddp_new(const ProcessGroup* group,
                                                const DdpTensors* tensors,
                                                const DdpOptions* options, void* hook,
                                                const CommHookVTable* vtable,
                                                std::shared_ptr<Ddp>** result) {
  std::unique_ptr<CommHook> owned;
  if (hook != nullptr) owned = std::make_unique<RustHook>(hook, vtable);
  return guard([&] {
    const auto parameters = tensors->parameters.copy();
    if (options->verify) {
      c10d::verify_params_across_processes(group->group, parameters, std::nullopt);
    }
    hand_over(*group, tensors->states);
    *result = new std::shared_ptr<Ddp>(
        std::make_shared<Ddp>(group->group, parameters, names_of(*tensors), tensors->frozen.copy(),
                              tensors->buffers.copy(), *options, std::move(owned)));
  });
}

// A graph of a forward pass keeps what it needs.
TCH_EXTENSION_API Message tch_extension_ddp_free(std::shared_ptr<Ddp>* ddp) {
  return guard([&] { delete ddp; });
}

// `capturing` is whether the current stream is being captured.
TCH_EXTENSION_API Message tch_extension_ddp_begin(const std::shared_ptr<Ddp>* ddp, bool synchronise,
                                                  bool capturing) {
  return guard([&] { (*ddp)->begin(synchronise, capturing); });
}

// Replaces the outputs in place.
TCH_EXTENSION_API Message tch_extension_ddp_end(const std::shared_ptr<Ddp>* ddp,
                                                at::Tensor* const* outputs, size_t length) {
  return guard([&] {
    std::vector<at::Tensor> list;
    for (size_t i = 0; i < length; ++i) list.push_back(*outputs[i]);
    (*ddp)->end(list);
    for (size_t i = 0; i < length; ++i) *outputs[i] = list[i];
  });
}

TCH_EXTENSION_API Message tch_extension_ddp_check(const std::shared_ptr<Ddp>* ddp, bool for_step) {
  return guard([&] { (*ddp)->check(for_step); });
}

TCH_EXTENSION_API Message tch_extension_ddp_mark_stepped(const std::shared_ptr<Ddp>* ddp) {
  return guard([&] { (*ddp)->mark_stepped(); });
}

TCH_EXTENSION_API Message tch_extension_ddp_set_sample_rate(const std::shared_ptr<Ddp>* ddp,
                                                            int32_t passes) {
  return guard([&] { (*ddp)->set_sample_rate(passes); });
}

// Calls `take` with the size in bytes of each bucket.
TCH_EXTENSION_API Message tch_extension_ddp_statistics(const std::shared_ptr<Ddp>* ddp,
                                                       DdpStatistics* result, void* context,
                                                       void (*take)(void*, int64_t)) {
  return guard([&] {
    auto& logger = (*ddp)->logger();
    const at::DDPLoggingData data = logger.get_ddp_logging_data();
    result->iteration = number(data, "iteration");
    result->forward = number(data, "avg_forward_compute_time");
    result->backward = number(data, "avg_backward_compute_time");
    result->communication = number(data, "avg_backward_comm_time");
    result->overlap = number(data, "avg_backward_compute_comm_overlap_time");
    result->rebuilt = number(data, "has_rebuilt_buckets") != 0;
    result->can_be_static = (*ddp)->graph_is_static();
    for (const int64_t bytes : logger.get_bucket_sizes()) take(context, bytes);
  });
}

// Of the bucket that a hook got.
TCH_EXTENSION_API size_t tch_extension_ddp_bucket_index(const c10d::GradBucket* bucket) {
  return bucket->getIndex();
}

TCH_EXTENSION_API bool tch_extension_ddp_bucket_is_last(const c10d::GradBucket* bucket) {
  return bucket->isLast();
}

// `buffer` is a new handle, and so is each gradient that `take` gets.
TCH_EXTENSION_API Message tch_extension_ddp_bucket_tensors(const c10d::GradBucket* bucket,
                                                           at::Tensor** buffer, void* context,
                                                           void (*take)(void*, at::Tensor*)) {
  return guard([&] {
    at::NoGradGuard no_grad;
    const auto gradients = bucket->getGradients();
    *buffer = new at::Tensor(bucket->getBuffer());
    for (const auto& gradient : gradients) take(context, new at::Tensor(gradient));
  });
}

TCH_EXTENSION_API void tch_extension_ddp_hook_fail(HookCall* call, const char* text,
                                                   size_t length) {
  call->error.assign(text, length);
}

// Takes ownership of the work.
TCH_EXTENSION_API void tch_extension_ddp_hook_pending(HookCall* call, Work* work) {
  call->work = work;
}
