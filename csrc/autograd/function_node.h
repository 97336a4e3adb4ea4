// A graph node whose backward is a Rust function.
//
// torch::autograd::Function<T> is not used: it cannot take absent tensors, gives every operator the
// same name and would hide the Rust state in an IValue.
#pragma once

#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/custom_function.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "../libtorch_versions.h"
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
  void release_variables() override;

  // Edges lead from the present inputs only.
  void set_inputs(const ApplyParams& params, const Present& present);
  // What zeros are made of, where the node's own metadata do not say it.
  void set_outputs(const torch::autograd::variable_list& outputs);
  void set_saved(std::vector<Saved> saved) {
    if (!saved.empty()) saved_ = std::make_shared<const std::vector<Saved>>(std::move(saved));
  }

  at::Tensor unpack(size_t slot) const;
  bool needs_input_grad(size_t input) const {
    return input < edge_of_input_.size() && edge_of_input_[input] != kNoEdge &&
           task_should_compute_output(edge_of_input_[input]);
  }

  // How many exist: the leak tests' measure.
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
  std::string_view name_;  // static
  bool materialize_grads_;
  bool double_backward_;
  c10::SmallVector<size_t, 8> edge_of_input_;
  std::vector<torch::autograd::VariableInfo>
      output_info_;     // empty where every output is like its metadata
  SavedList saved_;     // guarded by mutex_; null where nothing is saved
  bool freed_ = false;  // guarded by mutex_
};

}  // namespace tch_extension
