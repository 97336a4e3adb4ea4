// How an operator's entry points start the kernels that a plan names.
#pragma once

#include "kernels.h"
#include "tch_extension/launch.h"

namespace tch_extension::norm {

// Starts the forward kernel that the plan names; false if the plan does not fit the arrays.
template <typename Norm>
bool start_forward(const NormForward& params, cudaStream_t stream) {
  switch (params.plan.way) {
    case NormWay::Registers:
    case NormWay::Cluster:
      return params.plan.loads == NormLoads::Shifted
                 ? start_forward_shifted<Norm>(params, stream)
                 : start_forward_registers<Norm>(params, stream);
    case NormWay::Passes:
      return start_forward_passes<Norm>(params, stream);
    default:
      return false;
  }
}

// The same for the first kernel of the backward.
template <typename Norm>
bool start_backward(const NormBackward& params, cudaStream_t stream) {
  switch (params.plan.way) {
    case NormWay::Registers:
      return start_backward_registers<Norm>(params, stream);
    case NormWay::Ring:
      return start_backward_ring<Norm>(params, stream);
    case NormWay::Cluster:
      return params.plan.loads == NormLoads::Shifted ? start_backward_ring<Norm>(params, stream)
                                                     : start_backward_cluster<Norm>(params, stream);
    case NormWay::InPlace:
      return start_backward_in_place<Norm>(params, stream);
    case NormWay::Few:
      return start_backward_few<Norm>(params, stream);
    case NormWay::Passes:
    case NormWay::FewPasses:
      return start_backward_passes<Norm>(params, stream);
    case NormWay::Automatic:
      return false;
  }
  return false;
}

// The gradients of weight and bias, after the backward's first kernel.
template <typename Norm>
bool start_parameter_gradients(const NormBackward& params, cudaStream_t stream) {
  return params.plan.way == NormWay::FewPasses ? start_backward_few<Norm>(params, stream)
                                               : start_finish(params, stream);
}

// Calls `start`, which returns whether the plan fits the arrays.
template <typename Params>
LaunchStatus launch_if_fits(const char* kernel, const Params& params, cudaStream_t stream,
                            bool (*start)(const Params&, cudaStream_t)) {
  if (params.columns == 0) return {kernel, nullptr};
  return start(params, stream)
             ? launch_status(kernel)
             : LaunchStatus{kernel, "internal error: the plan does not fit the arrays"};
}

// The same where weight and bias must have the kind of the rows.
template <typename Params>
LaunchStatus launch(const char* kernel, const Params& params, cudaStream_t stream,
                    bool (*start)(const Params&, cudaStream_t)) {
  if (params.kind != params.parameter_kind)
    return {kernel, "internal error: the parameters have another kind than the rows"};
  return launch_if_fits(kernel, params, stream, start);
}

}  // namespace tch_extension::norm
