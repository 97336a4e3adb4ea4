// The functions of libtorch's engine that Rust calls: grad, backward, anomaly mode, and questions
// about a tensor's graph.

#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>

#include <cstring>
#include <exception>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "../ffi.h"
#include "bridge.h"
#include "exceptions.h"
#include "lists.h"

namespace tch_extension {
namespace {

// Collects warnings instead of printing them.
class Kept final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override { warnings_.push_back(warning); }
  const std::vector<c10::Warning>& warnings() const { return warnings_; }

 private:
  std::vector<c10::Warning> warnings_;
};

// Whether a warning has the wording with which libtorch reports a node that failed, or a node whose
// backward pass made the node that failed.
bool is_trace(const std::string& text) {
  return text.find("Error detected in ") == 0 ||
         text.find("Previous calculation was induced by") != std::string::npos;
}

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& caught) {
    return caught.what_without_backtrace();
  } catch (const std::exception& caught) {
    return caught.what();
  } catch (...) {
    return "a C++ exception of unknown type";
  }
}

// Runs a backward pass. In anomaly mode, libtorch warns which forward pass made the node that
// failed; here that warning becomes part of the error. The engine's other threads pass their
// warnings to the calling thread.
template <typename Body>
void with_traces(Body&& body) {
  if (!torch::autograd::AnomalyMode::is_enabled()) return body();
  Kept kept;
  std::exception_ptr error;
  {
    c10::WarningUtils::WarningHandlerGuard guard(&kept);
    try {
      body();
    } catch (...) {
      error = std::current_exception();
    }
  }
  // If libtorch called this Rust, the exception has to stay what it is, and libtorch's caller
  // prints warnings.
  const bool adds_traces = error != nullptr && RustCall::innermost() == nullptr;
  std::string traces;
  for (const auto& warning : kept.warnings()) {
    if (adds_traces && is_trace(warning.msg())) {
      traces += "\n" + warning.msg();
    } else {
      c10::warn(warning);
    }
  }
  if (!traces.empty()) throw std::runtime_error(text_of(error) + traces);
  if (error != nullptr) std::rethrow_exception(error);
}

std::optional<bool> optional_bool(int value) {
  return value < 0 ? std::nullopt : std::optional<bool>(value != 0);
}

}  // namespace
}  // namespace tch_extension

using namespace tch_extension;

// torch.autograd.grad. `grad_outputs` has outputs_len entries, or grad_outputs_len is 0 and ones
// are used (for scalar outputs only). `retain_graph` is -1 for the value of create_graph. `results`
// has room for inputs_len pointers; an unused input gets null.
TCH_EXTENSION_API Message tch_extension_grad(const at::Tensor* const* outputs, size_t outputs_len,
                                             const at::Tensor* const* inputs, size_t inputs_len,
                                             const at::Tensor* const* grad_outputs,
                                             size_t grad_outputs_len, int retain_graph,
                                             bool create_graph, bool allow_unused,
                                             at::Tensor** results) {
  return guard([&] {
    with_traces([&] {
      release_to(results,
                 torch::autograd::grad(tensors(outputs, outputs_len), tensors(inputs, inputs_len),
                                       tensors(grad_outputs, grad_outputs_len),
                                       optional_bool(retain_graph), create_graph, allow_unused));
    });
  });
}

// torch.autograd.backward: adds to the `grad` of `inputs`, or of all leaves if inputs_len is 0.
TCH_EXTENSION_API Message tch_extension_backward(const at::Tensor* const* outputs,
                                                 size_t outputs_len,
                                                 const at::Tensor* const* grad_outputs,
                                                 size_t grad_outputs_len,
                                                 const at::Tensor* const* inputs, size_t inputs_len,
                                                 int retain_graph, bool create_graph) {
  return guard([&] {
    with_traces([&] {
      torch::autograd::backward(
          tensors(outputs, outputs_len), tensors(grad_outputs, grad_outputs_len),
          optional_bool(retain_graph), create_graph, tensors(inputs, inputs_len));
    });
  });
}

// Tensor.retain_grad.
TCH_EXTENSION_API Message tch_extension_retain_grad(const at::Tensor* tensor) {
  return guard([&] { tensor->retain_grad(); });
}

// The name of the node that made the tensor, or null for a leaf. The caller frees it like a
// message.
TCH_EXTENSION_API Message tch_extension_grad_fn(const at::Tensor* tensor, char** name) {
  return guard([&] {
    const auto& node = tensor->grad_fn();
    *name = node ? strdup(node->name().c_str()) : nullptr;
  });
}

struct tch_extension::AnomalySetting {
  bool enabled;
  bool check_nan;
};

// The setting holds for the whole process. Returns the previous setting.
TCH_EXTENSION_API AnomalySetting tch_extension_set_anomaly_mode(AnomalySetting setting) {
  using torch::autograd::AnomalyMode;
  const AnomalySetting before{AnomalyMode::is_enabled(), AnomalyMode::should_check_nan()};
  AnomalyMode::set_enabled(setting.enabled, setting.check_nan);
  return before;
}
