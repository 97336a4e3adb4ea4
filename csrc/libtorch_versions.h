// All differences between libtorch's versions that this library has to handle.
//
// The ownership of graph nodes: up to 2.11 a node is held by a shared_ptr, and libtorch's deleter
// takes a long graph apart in a loop. From 2.13 on a node is held by an intrusive_ptr, and its own
// destructor does that.
//
// The state that a random number generator keeps about a graph capture: up to 2.11 it is a flag,
// which stays set if the capture fails. From 2.13 on it is a state for each capture, which the
// graph's destructor removes.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/headeronly/version.h>

#include <memory>
#include <utility>

namespace tch_extension {

#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 13)

template <typename T>
using NodePtr = c10::intrusive_ptr<T>;

template <typename T, typename... Args>
NodePtr<T> make_node(Args&&... args) {
  return c10::make_intrusive<T>(std::forward<Args>(args)...);
}

// A node that has resources of its own to free.
class OwnNode : public torch::autograd::Node {
 public:
  // Called when the last owner goes while a weak pointer still exists. The destructor runs later.
  void release_resources() final {
    Node::release_resources();
    free_own();
  }

 protected:
  // Frees the resources of the node. A second call does nothing.
  virtual void free_own() noexcept = 0;
};

// Does nothing, because the graph's destructor cleans up. It is a template because sources without
// CUDA include this file, too.
template <typename GeneratorState>
void end_failed_capture(GeneratorState&) {}

#else

template <typename T>
using NodePtr = std::shared_ptr<T>;

template <typename T, typename... Args>
NodePtr<T> make_node(Args&&... args) {
  return NodePtr<T>(new T(std::forward<Args>(args)...), torch::autograd::deleteNode);
}

class OwnNode : public torch::autograd::Node {
 protected:
  // Called only by the node's own destructor, which here runs when the last owner goes.
  virtual void free_own() noexcept = 0;
};

// If the flag stayed set, the generator would refuse to draw random numbers outside of a capture.
template <typename GeneratorState>
void end_failed_capture(GeneratorState& generator) {
  generator.capturing_ = false;
}

#endif

}  // namespace tch_extension
