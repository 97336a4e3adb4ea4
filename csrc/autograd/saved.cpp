#include "saved.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

#include "exceptions.h"
#include "state.h"

namespace tch_extension {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

namespace {

// Packs and unpacks one saved tensor with a pair of Rust closures.
class RustSavedHooks final : public torch::autograd::SavedVariableHooks {
 public:
  RustSavedHooks(void* state, const SavedHooksVTable* vtable) : state_(state), vtable_(vtable) {}
  RustSavedHooks(const RustSavedHooks&) = delete;
  RustSavedHooks& operator=(const RustSavedHooks&) = delete;
  ~RustSavedHooks() override { vtable_->drop(state_); }

  void call_pack_hook(const at::Tensor& tensor) override {
    BackwardResults results{variable_list(1), {}, {}};
    RustCall call;
    if (vtable_->pack(state_, &tensor, &results) != 0) call.fail("", results.error);
    sizes_ = tensor.sizes().vec();
    kind_ = tensor.scalar_type();
    device_ = tensor.device();
  }

  at::Tensor call_unpack_hook() override {
    BackwardResults results{variable_list(1), {}, {}};
    {
      RustCall call;
      if (vtable_->unpack(state_, &results) != 0) call.fail("", results.error);
    }
    at::Tensor& tensor = results.gradients[0];
    if (!tensor.defined() || tensor.sizes() != sizes_ || tensor.scalar_type() != kind_ ||
        tensor.device() != device_) {
      std::ostringstream text;
      text << "the unpack hook of a saved tensor returned ";
      if (tensor.defined()) {
        text << tensor.scalar_type() << tensor.sizes() << " on " << tensor.device();
      } else {
        text << "an undefined tensor";
      }
      text << " in the place of " << kind_ << at::IntArrayRef(sizes_) << " on " << device_;
      throw std::runtime_error(text.str());
    }
    return std::move(tensor);
  }

 private:
  void* state_;
  const SavedHooksVTable* vtable_;
  std::vector<int64_t> sizes_;
  at::ScalarType kind_ = at::kFloat;
  at::Device device_ = at::kCPU;
};

bool is_regular(const at::Tensor& tensor) {
  constexpr uintptr_t kBytes = 16;
  // Tensors of Python's and of torch.func have no memory that may be asked for.
  return tensor.layout() == at::kStrided && tensor.has_storage() &&
         !tensor.unsafeGetTensorImpl()->is_python_dispatch() && tensor.is_contiguous() &&
         reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % kBytes == 0;
}

const at::TensorBase& root(const at::TensorBase& tensor) {
  return tensor.is_view() ? tensor._base() : tensor;
}

// Tells what role a saved tensor has in one call of an operator.
class Sorter {
 public:
  Sorter(const ApplyParams& params, const Present& present, const variable_list& outputs,
         const torch::autograd::Node* node)
      : params_(params), present_(present), outputs_(outputs), node_(node) {
    for (size_t i = 0; i < params.dirty_len; ++i) {
      const at::Tensor* tensor = params.inputs[params.dirty[i]];
      if (is_present(tensor)) dirty_.push_back(tensor);
    }
  }

  bool is_dirty(const at::Tensor& tensor) const {
    return std::any_of(dirty_.begin(), dirty_.end(),
                       [&](const auto* dirty) { return dirty->is_same(tensor); });
  }

  // Whether the tensor is a view of an output, or shares its base with an input that was changed in
  // place.
  bool is_alias(const at::Tensor& tensor) const {
    const at::TensorBase& base = root(tensor);
    return std::any_of(dirty_.begin(), dirty_.end(),
                       [&](const auto* dirty) { return root(*dirty).is_same(base); }) ||
           std::any_of(outputs_.begin(), outputs_.end(), [&](const auto& output) {
             return output.defined() && base.is_same(output) && output.grad_fn().get() == node_;
           });
  }

  bool is_input(const at::Tensor& tensor) const {
    return std::any_of(present_.begin(), present_.end(),
                       [&](const auto* input) { return input->is_same(tensor); });
  }

  bool is_input_or_output(const at::Tensor& tensor) const {
    return is_input(tensor) ||
           std::any_of(outputs_.begin(), outputs_.end(),
                       [&](const auto& output) { return output.is_same(tensor); });
  }

  // An output that already had a graph was replaced by a detached tensor. If that output was saved,
  // this returns the tensor that replaced it.
  const at::Tensor& as_returned(const at::Tensor& tensor) const {
    if (is_input(tensor)) return tensor;
    for (size_t i = 0; i < params_.outputs_len; ++i) {
      if (is_present(params_.outputs[i]) && params_.outputs[i]->is_same(tensor)) return outputs_[i];
    }
    return tensor;
  }

 private:
  const ApplyParams& params_;
  const Present& present_;
  const variable_list& outputs_;
  const torch::autograd::Node* node_;
  c10::SmallVector<const at::Tensor*, 2> dirty_;
};

Saved save_one(const at::Tensor& given, const Sorter& sorter, const torch::autograd::Node* node) {
  const at::Tensor& tensor = sorter.as_returned(given);
  // If an output whose grad_fn is this node were saved whole, the node would own itself through a
  // reference cycle. For a view that was changed in place, the grad_fn leads to this node in two
  // steps; SavedVariable has a flag for that case.
  const bool is_dirty_view = sorter.is_dirty(tensor) && tensor.is_view() && tensor.requires_grad();
  const bool is_output = is_dirty_view || tensor.grad_fn().get() == node;
  // A tensor that shares memory with such an output would make a cycle, too. Saving only its data
  // avoids that, and keeps the same version counter.
  if (!is_output && !sorter.is_dirty(tensor) && sorter.is_alias(tensor)) {
    return {SavedVariable(tensor.tensor_data(), false), History::kAlias};
  }
  return {SavedVariable(tensor, is_output, is_dirty_view),
          sorter.is_input_or_output(tensor) ? History::kKept : History::kIntermediate};
}

}  // namespace

std::vector<Saved> save(const ApplyParams& params, const Present& present,
                        const variable_list& outputs, const torch::autograd::Node* node) {
  const Sorter sorter(params, present, outputs, node);
  std::vector<Saved> saved;
  saved.reserve(params.saved_len);
  for (size_t i = 0; i < params.saved_len; ++i) {
    if (!is_present(params.saved[i])) {
      saved.push_back({SavedVariable(), History::kKept});
      continue;
    }
    saved.push_back(save_one(*params.saved[i], sorter, node));
    if (params.saved_hooks != nullptr) {
      const auto* vtable = params.saved_hooks_vtable;
      saved.back().variable.register_hooks(
          std::make_unique<RustSavedHooks>(vtable->start(params.saved_hooks), vtable));
    }
    // Also hooks that libtorch has set, in Python.
    saved.back().is_to_be_regular =
        saved.back().variable.has_hooks() && is_regular(*params.saved[i]);
  }
  return saved;
}

at::Tensor as_saved(const Saved& saved, at::Tensor unpacked) {
  if (!saved.is_to_be_regular || is_regular(unpacked)) return unpacked;
  return unpacked.clone(at::MemoryFormat::Contiguous);
}

void check_history(const Saved& saved, size_t slot) {
  if (saved.history == History::kKept) return;
  const std::string text = "saved tensor " + std::to_string(slot);
  if (saved.history == History::kIntermediate) {
    throw std::runtime_error(
        text +
        " is neither an input nor an output, so a derivative through it would be silently wrong; "
        "compute it again from the inputs when Context::create_graph() is true");
  }
  throw std::runtime_error(
      text +
      " shares memory with an output or with an input that was changed in place, so it "
      "has no history of its own for a "
      "second derivative; save that tensor itself, or a copy");
}

void free_saved(SavedList saved) noexcept {
  // The list of the outermost call that runs in this thread, or null. It is a plain pointer, so
  // that it can still be used while a thread ends.
  thread_local std::vector<SavedList>* waiting = nullptr;
  if (saved == nullptr) return;
  if (waiting != nullptr) {
    waiting->push_back(std::move(saved));
    return;
  }
  std::vector<SavedList> lists;
  lists.push_back(std::move(saved));
  waiting = &lists;
  while (!lists.empty()) {
    const SavedList next = std::move(lists.back());
    lists.pop_back();
  }
  waiting = nullptr;
}

}  // namespace tch_extension
