// Gradients on their way into flat buffers.
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/scalar_tensor.h>

#include "../ffi.h"
#include "tch_extension/c_abi.h"

using namespace tch_extension;

// Writes the gradient of a leaf, times `factor`, to `into`, or adds it there, and makes the leaf's
// gradient undefined. `into` has the leaf's size, kind and device.
TCH_EXTENSION_API Message tch_extension_take_gradient(const at::Tensor* leaf,
                                                      const at::Tensor* into, double factor,
                                                      bool adds) {
  return guard([&] {
    at::NoGradGuard no_grad;
    const at::Tensor gradient = leaf->grad();
    TORCH_CHECK(gradient.defined(), "expected a gradient, got none");
    TORCH_CHECK(gradient.layout() == at::kStrided, "expected a dense gradient, got one of layout ",
                gradient.layout(), "; sparse embeddings need an optimizer of their own");
    if (adds) {
      into->add_(gradient, factor);
    } else if (factor == 1) {
      into->copy_(gradient);
    } else {
      // A number that takes no part in the choice of the result's kind.
      at::Tensor number = at::scalar_tensor(factor, at::kDouble);
      number.unsafeGetTensorImpl()->set_wrapped_number(true);
      at::Tensor to = *into;
      at::mul_out(to, gradient, number);
    }
    leaf->mutable_grad() = at::Tensor();
  });
}
