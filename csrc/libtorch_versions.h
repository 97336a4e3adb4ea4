// The one place where libtorch's versions differ for this library.
//
// Who owns graph nodes, and how they are freed: up to 2.11 a node is held by shared_ptr, and a
// deleter of libtorch's takes a long graph apart in a loop. From 2.13 on it is held by
// intrusive_ptr, and the node's own destructor does that.
//
// What a generator of random numbers keeps of a graph's capture: up to 2.11 a flag, which stays set
// when the capture fails. From 2.13 on a state for each capture, which the graph's destructor
// removes.
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

// A node with something of its own to free.
class OwnNode : public torch::autograd::Node {
 public:
  // Runs when the last owner goes while somebody still holds a weak pointer: the destructor then
  // comes later.
  void release_resources() final {
    Node::release_resources();
    free_own();
  }

 protected:
  // Frees what the node itself holds; does nothing the second time.
  virtual void free_own() noexcept = 0;
};

// A template, because sources without CUDA include this file, too. The graph's destructor does what
// is needed.
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
  // Called by the node's own destructor only: here that comes with the last owner.
  virtual void free_own() noexcept = 0;
};

// With the flag set, the generator would refuse to draw random numbers outside of a capture.
template <typename GeneratorState>
void end_failed_capture(GeneratorState& generator) {
  generator.capturing_ = false;
}

#endif

}  // namespace tch_extension
