// What checkpoint needs in order to run a function a second time exactly as the first time.

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <unordered_set>
#include <utility>
#include <vector>

#include "../ffi.h"
#include "../libtorch_versions.h"
#include "bridge.h"

namespace tch_extension {

// The state that a function's result depends on besides its arguments.
struct Surroundings {
  struct Random {
    at::Generator generator;
    at::Tensor state;
  };

  struct Autocast {
    at::DeviceType device;
    bool enabled;
    at::ScalarType kind;
  };

  std::vector<Random> random;
  std::vector<Autocast> autocast;

  Surroundings() {
    for (auto device : {at::kCPU, at::kCUDA}) {
      autocast.push_back({device, at::autocast::is_autocast_enabled(device),
                          at::autocast::get_autocast_dtype(device)});
    }
  }

  void enter() {
    for (auto& [generator, state] : random) {
      std::lock_guard<std::mutex> lock(generator.mutex());
      generator.set_state(state);
    }
    for (const auto& [device, enabled, kind] : autocast) {
      at::autocast::set_autocast_enabled(device, enabled);
      at::autocast::set_autocast_dtype(device, kind);
    }
  }
};

namespace {

Surroundings::Random random_of(at::Generator generator) {
  std::lock_guard<std::mutex> lock(generator.mutex());
  return {generator, generator.get_state()};
}

}  // namespace

}  // namespace tch_extension

using namespace tch_extension;

// Records the current state: the random state of the CPU and of the tensors' CUDA devices, and the
// autocast settings.
TCH_EXTENSION_API Message tch_extension_surroundings(const at::Tensor* const* tensors, size_t len,
                                                     Surroundings** result) {
  return guard([&] {
    auto made = std::make_unique<Surroundings>();
    std::vector<at::Device> devices{at::Device(at::kCPU)};
    for (size_t i = 0; i < len; ++i) {
      if (tensors[i] == nullptr || !tensors[i]->defined() || !tensors[i]->is_cuda()) continue;
      const at::Device device = tensors[i]->device();
      if (std::find(devices.begin(), devices.end(), device) == devices.end())
        devices.push_back(device);
    }
    for (auto device : devices) {
      made->random.push_back(random_of(at::globalContext().defaultGenerator(device)));
    }
    *result = made.release();
  });
}

// Switches to the state in `surroundings`. `before` receives the previous state of the same random
// generators. If this fails, the previous state is restored.
TCH_EXTENSION_API Message tch_extension_enter(Surroundings* surroundings, Surroundings** before) {
  return guard([&] {
    auto made = std::make_unique<Surroundings>();
    for (const auto& random : surroundings->random)
      made->random.push_back(random_of(random.generator));
    try {
      surroundings->enter();
    } catch (...) {
      made->enter();
      throw;
    }
    *before = made.release();
  });
}

TCH_EXTENSION_API Message tch_extension_restore(Surroundings* surroundings) {
  return guard([&] { surroundings->enter(); });
}

TCH_EXTENSION_API void tch_extension_free_surroundings(Surroundings* surroundings) {
  delete surroundings;
}

// Returns the previous setting.
TCH_EXTENSION_API bool tch_extension_set_autocast_cache(bool enabled) {
  const bool before = at::autocast::is_autocast_cache_enabled();
  at::autocast::set_autocast_cache_enabled(enabled);
  return before;
}

// The tensor's version counter, or 0 if the tensor has none.
TCH_EXTENSION_API int64_t tch_extension_version(const at::Tensor* tensor) {
  return tensor->defined() && !tensor->is_inference() ? tensor->_version() : 0;
}

// Whether `outputs` depend on a leaf by a path that does not go through `inputs`.
TCH_EXTENSION_API Message tch_extension_reaches_other_leaf(const at::Tensor* const* outputs,
                                                           size_t outputs_len,
                                                           const at::Tensor* const* inputs,
                                                           size_t inputs_len, bool* found) {
  return guard([&] {
    using torch::autograd::impl::gradient_edge;
    std::vector<NodePtr<torch::autograd::Node>>
        held;  // keeps the nodes alive: otherwise a leaf's node dies with its last user
    std::unordered_set<torch::autograd::Node*> seen;
    for (size_t i = 0; i < inputs_len; ++i) {
      if (inputs[i] == nullptr || !inputs[i]->defined() || !inputs[i]->requires_grad()) continue;
      held.push_back(gradient_edge(*inputs[i]).function);
      seen.insert(held.back().get());
    }
    std::vector<torch::autograd::Node*> open;
    auto visit = [&](torch::autograd::Node* node) {
      if (node != nullptr && seen.insert(node).second) open.push_back(node);
    };
    for (size_t i = 0; i < outputs_len; ++i) {
      if (outputs[i] == nullptr || !outputs[i]->defined() || !outputs[i]->requires_grad()) continue;
      held.push_back(gradient_edge(*outputs[i]).function);
      visit(held.back().get());
    }
    *found = false;
    while (!open.empty()) {
      auto* node = open.back();
      open.pop_back();
      if (dynamic_cast<torch::autograd::AccumulateGrad*>(node) != nullptr) {
        *found = true;
        return;
      }
      for (const auto& edge : node->next_edges()) visit(edge.function.get());
    }
  });
}
