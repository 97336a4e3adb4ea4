// What an optimizer needs to know about all its tensors, in one call: each step asks again, because
// gradients are new tensors in each step.

#include <ATen/core/Tensor.h>

#include <cstddef>

#include "../tensor/touched.h"
#include "params.h"
#include "tch_extension/c_abi.h"

using namespace tch_extension;

namespace {

constexpr int32_t kCpu = -1, kOtherDevice = -2;

bool is_strided(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && !tensor.is_nested() && tensor.has_storage();
}

// Tells orders of the same elements in memory apart; 0 for a contiguous tensor.
int32_t layout_of(const at::Tensor& tensor) {
  if (tensor.is_contiguous()) return 0;
  uint32_t hash = 2166136261u;  // FNV-1a
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    // The stride of a dimension with one element says nothing.
    if (tensor.size(dim) == 1) continue;
    for (const int64_t number : {tensor.size(dim), tensor.stride(dim)}) {
      hash = (hash ^ static_cast<uint32_t>(number)) * 16777619u;
    }
  }
  return static_cast<int32_t>(hash | 1u);
}

// Everything but the address.
OptimFact fact_of(const at::Tensor& tensor) {
  OptimFact fact{};
  fact.len = tensor.numel();
  fact.kind = static_cast<int32_t>(tensor.scalar_type());
  fact.device = tensor.is_cuda() ? tensor.get_device() : tensor.is_cpu() ? kCpu : kOtherDevice;
  fact.readiness = OptimReadiness::Ready;
  return fact;
}

OptimFact fact_of_parameter(const at::Tensor& parameter) {
  if (!parameter.defined() || !is_strided(parameter)) {
    OptimFact fact{};
    fact.readiness = OptimReadiness::NotStrided;
    return fact;
  }
  OptimFact fact = fact_of(parameter);
  if (parameter.is_inference()) {
    fact.readiness = OptimReadiness::Inference;
  } else if (!parameter.is_non_overlapping_and_dense() || parameter.is_neg() ||
             parameter.is_conj() || parameter._is_zerotensor()) {
    fact.readiness = OptimReadiness::NotDense;
  } else if (fact.device != kOtherDevice) {
    touch(parameter);
    fact.data = parameter.mutable_data_ptr();
    fact.layout = layout_of(parameter);
  }
  return fact;
}

bool has_order_of(const at::Tensor& gradient, const at::Tensor& parameter) {
  return gradient.strides().equals(parameter.strides()) ||
         (gradient.is_contiguous() && parameter.is_contiguous());
}

OptimFact fact_of_gradient(const at::Tensor& gradient, const at::Tensor& parameter) {
  if (!gradient.defined()) {
    OptimFact fact{};
    fact.readiness = OptimReadiness::Absent;
    return fact;
  }
  OptimFact fact = fact_of(gradient);
  if (!is_strided(gradient)) {
    fact.readiness = OptimReadiness::NotStrided;
  } else if (!gradient.sizes().equals(parameter.sizes())) {
    fact.readiness = OptimReadiness::OtherSize;
  } else if (gradient.is_neg() || gradient.is_conj() || gradient._is_zerotensor() ||
             !has_order_of(gradient, parameter)) {
    fact.readiness = OptimReadiness::OtherLayout;
  } else if (fact.device != kOtherDevice) {
    // Clipping writes to gradients.
    touch(gradient);
    fact.data = gradient.mutable_data_ptr();
  }
  return fact;
}

}  // namespace

// `parameters` has `count` entries, and so has `gradients`, whose entries may be null; without it,
// the gradients are those that autograd has accumulated. `facts` gets the facts of each parameter
// and of its gradient in turn.
TCH_EXTENSION_API Message tch_extension_optim_facts(const at::Tensor* const* parameters,
                                                    const at::Tensor* const* gradients,
                                                    size_t count, OptimFact* facts) {
  return guard([&] {
    const at::Tensor none;
    for (size_t i = 0; i < count; ++i) {
      const at::Tensor& parameter = *parameters[i];
      facts[2 * i] = fact_of_parameter(parameter);
      const at::Tensor* gradient = &none;
      if (gradients != nullptr && gradients[i] != nullptr) gradient = gradients[i];
      if (gradients == nullptr && parameter.defined()) gradient = &parameter.grad();
      const bool is_ready = facts[2 * i].readiness == OptimReadiness::Ready;
      facts[2 * i + 1] = fact_of_gradient(*gradient, is_ready ? parameter : *gradient);
    }
  });
}

// Makes the gradients undefined, as torch's zero_grad does.
TCH_EXTENSION_API Message tch_extension_optim_forget_gradients(const at::Tensor* const* parameters,
                                                               size_t count) {
  return guard([&] {
    for (size_t i = 0; i < count; ++i) {
      if (parameters[i]->defined() && parameters[i]->grad().defined()) {
        parameters[i]->mutable_grad() = at::Tensor();
      }
    }
  });
}

// Tells autograd that values have changed.
TCH_EXTENSION_API Message tch_extension_optim_bump_versions(const at::Tensor* const* tensors,
                                                            size_t count) {
  return guard([&] {
    for (size_t i = 0; i < count; ++i) tensors[i]->unsafeGetTensorImpl()->bump_version();
  });
}
