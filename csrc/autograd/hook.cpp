// Tensor.register_hook and Tensor.register_post_accumulate_grad_hook for hooks written in Rust.
//
// at::Tensor::register_hook is not used, because its list has no lock and never shrinks.

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../ffi.h"
#include "bridge.h"
#include "state.h"

namespace tch_extension {

struct RegisteredHook {
  uint64_t id;   // ascending, from 1
  size_t place;  // index of the gradient among the node's incoming gradients
  std::shared_ptr<State> state;
};

// The hooks of a leaf, or of all outputs of a node. Any thread may read or change the list, even
// while hooks run.
class HookList {
 public:
  uint64_t add(size_t place, std::shared_ptr<State> state) {
    std::lock_guard<std::mutex> lock(mutex_);
    hooks_.push_back({++last_, place, std::move(state)});
    return last_;
  }

  void remove(uint64_t id) {
    std::shared_ptr<State> removed;  // freed after the unlock, because that runs user code
    std::lock_guard<std::mutex> lock(mutex_);
    auto found =
        std::find_if(hooks_.begin(), hooks_.end(), [&](const auto& hook) { return hook.id == id; });
    if (found == hooks_.end()) return;
    removed = std::move(found->state);
    hooks_.erase(found);
  }

  // Calls `run` with each hook. A hook may remove another hook, which then does not run, or
  // register one, which runs from the next call on.
  template <typename Run>
  void for_each(Run&& run) const {
    const uint64_t last = this->last();
    for (auto hook = after(0); hook && hook->id <= last; hook = after(hook->id)) run(*hook);
  }

 private:
  uint64_t last() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return last_;
  }

  // The first hook with an id greater than `id`.
  std::optional<RegisteredHook> after(uint64_t id) const {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found =
        std::find_if(hooks_.begin(), hooks_.end(), [&](const auto& hook) { return hook.id > id; });
    return found == hooks_.end() ? std::nullopt : std::optional<RegisteredHook>(*found);
  }

  mutable std::mutex mutex_;
  std::vector<RegisteredHook> hooks_;  // in ascending order of id
  uint64_t last_ = 0;
};

struct HookHandle {
  std::weak_ptr<HookList> list;  // weak, so that a handle keeps nothing alive
  uint64_t id;
};

namespace {

using torch::autograd::FunctionPreHook;
using torch::autograd::variable_list;

std::string describe(const at::Tensor& tensor) {
  std::ostringstream text;
  text << tensor.scalar_type() << tensor.sizes() << " on " << tensor.device();
  if (tensor.layout() != at::kStrided) text << ", " << tensor.layout();
  return text.str();
}

// The object that the engine calls for a list of hooks.
class Hooks final : public FunctionPreHook {
 public:
  variable_list operator()(const variable_list& grads) override {
    variable_list results(grads);
    list_->for_each([&](const RegisteredHook& hook) {
      if (hook.place < results.size() && results[hook.place].defined())
        run(hook, results[hook.place]);
    });
    return results;
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {
    refuse_compiled_autograd("register_hook");
  }

  const std::shared_ptr<HookList>& list() const { return list_; }

 private:
  static void run(const RegisteredHook& hook, at::Tensor& grad) {
    BackwardResults results{variable_list(1), {}, {}};
    at::Tensor* pointer = std::make_unique<at::Tensor>(grad).release();  // Rust owns it now
    hook.state->backward("register_hook", nullptr, &pointer, 1, results);
    at::Tensor& replaced = results.gradients[0];
    if (!replaced.defined()) return;
    if (replaced.sizes() != grad.sizes() || replaced.scalar_type() != grad.scalar_type() ||
        replaced.device() != grad.device() || replaced.layout() != grad.layout()) {
      throw std::runtime_error("register_hook: the hook returned a gradient of " +
                               describe(replaced) + " instead of one of " + describe(grad));
    }
    grad = std::move(replaced);
  }

  std::shared_ptr<HookList> list_ = std::make_shared<HookList>();
};

// libtorch calls this when the `grad` of a leaf is complete. Each leaf has room for one such
// object.
class PostAccumulateHooks final : public torch::autograd::PostAccumulateGradHook {
 public:
  void operator()(const torch::autograd::Variable& leaf) override {
    list_->for_each([&](const RegisteredHook& hook) {
      BackwardResults results{{}, {}, {}};
      at::Tensor* pointer = std::make_unique<at::Tensor>(leaf).release();  // Rust owns it now
      hook.state->backward("register_post_accumulate_grad_hook", nullptr, &pointer, 1, results);
    });
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {
    refuse_compiled_autograd("register_post_accumulate_grad_hook");
  }

  const std::shared_ptr<HookList>& list() const { return list_; }

 private:
  std::shared_ptr<HookList> list_ = std::make_shared<HookList>();
};

// libtorch's own lists of hooks have no lock. This lock at least keeps two registrations from
// running at once.
std::mutex& registration() {
  static std::mutex mutex;
  return mutex;
}

std::shared_ptr<HookList> list_in(std::vector<std::unique_ptr<FunctionPreHook>>& hooks) {
  for (const auto& hook : hooks) {
    if (auto* ours = dynamic_cast<Hooks*>(hook.get())) return ours->list();
  }
  auto added = std::make_unique<Hooks>();
  auto list = added->list();
  hooks.push_back(std::move(added));
  return list;
}

std::shared_ptr<HookList> list_of(const at::Tensor& tensor) {
  std::lock_guard<std::mutex> lock(registration());
  const auto& node = tensor.grad_fn();
  // Hooks in this list stay with the tensor's current value, because a later change in place makes
  // a new node.
  return list_in(node ? node->tensor_pre_hooks() : torch::autograd::impl::hooks(tensor));
}

std::shared_ptr<HookList> post_accumulate_list_of(const at::Tensor& leaf) {
  using torch::autograd::impl::post_acc_grad_hooks;
  std::lock_guard<std::mutex> lock(registration());
  auto& place = post_acc_grad_hooks(leaf);
  if (auto* ours = dynamic_cast<PostAccumulateHooks*>(place.get())) return ours->list();
  if (place != nullptr)
    throw std::runtime_error(
        "the leaf has a post-accumulate hook that this crate did not register, and libtorch allows "
        "one only");
  auto added = std::make_unique<PostAccumulateHooks>();
  auto list = added->list();
  torch::autograd::impl::set_post_acc_grad_hooks(leaf, std::move(added));
  return list;
}

}  // namespace
}  // namespace tch_extension

using namespace tch_extension;

// Takes ownership of `state` even on failure. `tensor` must be defined and require grad.
TCH_EXTENSION_API Message tch_extension_register_hook(const at::Tensor* tensor, void* state,
                                                      const FunctionVTable* vtable,
                                                      HookHandle** handle) {
  State owned(state, vtable);  // first, so that the state is dropped if anything below throws
  return guard([&] {
    auto made = std::make_unique<HookHandle>();
    auto shared = std::make_shared<State>(std::move(owned));
    auto list = list_of(*tensor);
    made->list = list;
    made->id = list->add(tensor->output_nr(), std::move(shared));
    *handle = made.release();
  });
}

// Takes ownership of `state` even on failure. `tensor` must be a leaf that requires grad.
TCH_EXTENSION_API Message tch_extension_register_post_accumulate_grad_hook(
    const at::Tensor* tensor, void* state, const FunctionVTable* vtable, HookHandle** handle) {
  State owned(state, vtable);
  return guard([&] {
    auto made = std::make_unique<HookHandle>();
    auto shared = std::make_shared<State>(std::move(owned));
    auto list = post_accumulate_list_of(*tensor);
    made->list = list;
    made->id = list->add(/*place=*/0, std::move(shared));
    *handle = made.release();
  });
}

// Does nothing if the hook was already removed, or if the tensor and its graph are gone.
TCH_EXTENSION_API Message tch_extension_remove_hook(const HookHandle* handle) {
  return guard([&] {
    if (auto list = handle->list.lock()) list->remove(handle->id);
  });
}

TCH_EXTENSION_API void tch_extension_free_hook(HookHandle* handle) { delete handle; }
