// Levels of torch.func.
//
// torch.func.grad within torch.func.grad makes two levels. An operation runs at the inner level
// first, and then, below autograd, at the outer level, and each level records a graph of its own.
// Grad mode holds for all levels: if an operator switched it off for its forward pass, the outer
// level would record nothing, and its derivative would silently be zero. So among levels an
// operator leaves grad mode as it is.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/alias.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <optional>

namespace tch_extension {

enum class Level {
  kOnly,    // no transform is active, or what runs is below all of them
  kWithin,  // an operation that runs at one level
  kAbove,   // a transform is active, and an operation would begin at the innermost level
};

inline Level level(const c10::impl::LocalDispatchKeySet& keys) {
  // An operation passes the front mode, runs at the innermost level, which excludes the front mode,
  // and passes the back mode to the next level.
  const auto active = keys.included_ - keys.excluded_;
  if (active.has(c10::DispatchKey::FuncTorchDynamicLayerFrontMode)) return Level::kAbove;
  if (active.has(c10::DispatchKey::FuncTorchDynamicLayerBackMode)) return Level::kWithin;
  return Level::kOnly;
}

inline Level level() { return level(c10::impl::tls_local_dispatch_key_set()); }

inline bool is_below_autograd(const c10::impl::LocalDispatchKeySet& keys) {
  return keys.excluded_.has(c10::DispatchKey::AutogradFunctionality);
}

// Whether an operation that runs now becomes part of the graph.
inline bool records_graph() {
  return at::GradMode::is_enabled() && !is_below_autograd(c10::impl::tls_local_dispatch_key_set());
}

// While it lives, operations do not become part of the graph, except that above all levels they
// become part of each level's graph: there is no way to leave out one.
class WithoutGraph {
 public:
  WithoutGraph() {
    switch (level()) {
      case Level::kOnly:
        mode_.emplace(false);
        break;
      case Level::kWithin:
        below_.emplace(c10::autograd_dispatch_keyset);
        break;
      case Level::kAbove:
        break;
    }
  }

 private:
  std::optional<at::AutoGradMode> mode_;
  std::optional<c10::impl::ExcludeDispatchKeyGuard> below_;
};

// The same data as a tensor that a node can be attached to. It has no graph of its own, or, above
// all levels, one that the node replaces.
inline at::Tensor without_graph(const at::Tensor& tensor) {
  if (level() == Level::kOnly) return tensor.detach();
  const WithoutGraph without_graph;
  return at::alias(tensor);  // detach would take it out of the graphs of the other levels, too
}

}  // namespace tch_extension
