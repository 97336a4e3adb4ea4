// The CPU kernels: libtorch's threads share the elements.

#include "kernels.h"

#include <ATen/Parallel.h>

namespace {

template <typename Element>
void for_each(const Element& element) {
  at::parallel_for(0, element.count(), 4096, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) element(index);
  });
}

}  // namespace

extern "C" void extension_lltm_forward_cpu(const LltmForward* params) noexcept {
  if (params->c.kind == kTchExtensionFloat) for_each(extension::ForwardElement<float>(*params));
  if (params->c.kind == kTchExtensionDouble) for_each(extension::ForwardElement<double>(*params));
}

extern "C" void extension_lltm_backward_cpu(const LltmBackward* params) noexcept {
  if (params->new_c.kind == kTchExtensionFloat)
    for_each(extension::BackwardElement<float>(*params));
  if (params->new_c.kind == kTchExtensionDouble)
    for_each(extension::BackwardElement<double>(*params));
}
