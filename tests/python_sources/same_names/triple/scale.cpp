#include "scale.h"

#include <ATen/ops/empty_like.h>

int total = 0;

at::Tensor scale(const at::Tensor& x) {
  ++calls();
  ++total;
  if (x.numel() == 0) {
    throw Refused("triple");
  }
#ifdef WITH_CUDA
  if (x.is_cuda()) {
    return scale_cuda(x);
  }
#endif
  at::Tensor y = at::empty_like(x);
  for (int64_t i = 0; i < x.numel(); ++i) {
    y.mutable_data_ptr<double>()[i] = scaled(x.const_data_ptr<double>()[i]);
  }
  return y;
}
