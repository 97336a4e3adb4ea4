// A graph node whose backward pass is a Rust function.
//
// torch::autograd::Function<T> is not used: it cannot take absent tensors, it gives every operator
// the same name, and it would hide the Rust state in an IValue.
#pragma once

#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/custom_function.h>

#include <atomic>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "../libtorch_versions.h"
#include "levels.h"
#include "saved.h"
#include "state.h"
#include "wrap.h"

namespace tch_extension {

class FunctionNode final : public OwnNode {
 public:
  FunctionNode(State state, const ApplyParams& params);
  ~FunctionNode() override;

  std::string name() const override { return std::string(name_) + "Backward"; }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override;
  // Compiled autograd asks every node for what its graph depends on. It refuses this node, because
  // the state of the backward pass is a Rust value, which nobody can compare: a graph that was
  // compiled with one value would silently serve another.
  void compiled_args(torch::autograd::CompiledNodeArgs& args) const override;
  void release_variables() override;
  // The engine calls this before a backward pass that keeps no graph.
  void will_release_variables() override { is_last_.store(true, std::memory_order_relaxed); }

  // Adds an edge for each input that is present, and none for an absent input.
  void set_inputs(const ApplyParams& params, const Present& present);
  // Records each output's shape and kind, from which zeros are made. Needed only if the node's own
  // metadata do not tell.
  void set_outputs(const torch::autograd::variable_list& outputs);
  void set_saved(std::vector<Saved> saved) {
    if (!saved.empty()) saved_ = std::make_shared<const std::vector<Saved>>(std::move(saved));
  }

  at::Tensor unpack(size_t slot) const;
  // Whether a backward pass that runs now is differentiable and has to be part of the graph.
  bool creates_graph() const { return double_backward_ && records_graph(); }
  bool needs_input_grad(size_t input) const {
    return input < edge_of_input_.size() && edge_of_input_[input] != kNoEdge &&
           task_should_compute_output(edge_of_input_[input]);
  }

  // The number of nodes that are alive. Tests use it to find leaks.
  static int64_t live();

 protected:
  void free_own() noexcept override;

 private:
  static constexpr size_t kNoEdge = SIZE_MAX;

  torch::autograd::variable_list materialize(torch::autograd::variable_list&& grads) const;
  void refuse_where_not_differentiable(const torch::autograd::variable_list& grads,
                                       BackwardResults& results);
  void refuse_second_derivative(const torch::autograd::variable_list& grads,
                                torch::autograd::variable_list& results, const char* why);
  torch::autograd::variable_list by_edge(torch::autograd::variable_list&& gradients) const;

  State state_;
  std::string_view name_;  // of static lifetime
  bool materialize_grads_;
  bool double_backward_;
  bool without_autocast_;
  c10::SmallVector<size_t, 8> edge_of_input_;
  std::vector<torch::autograd::VariableInfo>
      output_info_;                   // empty if the node's own metadata tell what zeros to make
  SavedList saved_;                   // guarded by mutex_; null if nothing is saved
  bool freed_ = false;                // guarded by mutex_
  std::atomic<bool> is_last_{false};  // for the next pass only: one that fails may be repeated
};

}  // namespace tch_extension
