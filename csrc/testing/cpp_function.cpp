// An operator that does nothing, written in C++ with torch::autograd::Function. Our bridge is
// measured against it.

#include <torch/csrc/autograd/custom_function.h>

#include <memory>

#include "../ffi.h"
#include "tch_extension/c_abi.h"

using namespace tch_extension;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

namespace {

struct Identity : torch::autograd::Function<Identity> {
  static at::Tensor forward(AutogradContext*, const at::Tensor& x) { return x.detach(); }
  static variable_list backward(AutogradContext*, variable_list grads) { return {grads[0]}; }
};

}  // namespace

// The caller owns the result.
TCH_EXTENSION_API Message tch_extension_cpp_identity(const at::Tensor* x, at::Tensor** result) {
  return guard([&] { *result = std::make_unique<at::Tensor>(Identity::apply(*x)).release(); });
}
