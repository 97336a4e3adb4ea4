// An extension in the style of the tutorials of 2019: it dispatches on x.type() and checks with
// AT_CHECK.
#include <torch/extension.h>

#ifdef WITH_CUDA
torch::Tensor clip_cuda(torch::Tensor x, double most);
#endif

#define CHECK_CONTIGUOUS(x) AT_CHECK(x.is_contiguous(), #x " must be contiguous")

torch::Tensor clip_cpu(torch::Tensor x, double most) {
  auto y = torch::empty_like(x);
  AT_DISPATCH_FLOATING_TYPES(x.type(), "clip_cpu", ([&] {
                               const scalar_t* from = x.data<scalar_t>();
                               scalar_t* to = y.data<scalar_t>();
                               for (int64_t i = 0; i < x.numel(); i++) {
                                 to[i] = from[i] < most ? from[i] : static_cast<scalar_t>(most);
                               }
                             }));
  return y;
}

torch::Tensor clip(torch::Tensor x, double most) {
  CHECK_CONTIGUOUS(x);
#ifdef WITH_CUDA
  if (x.type().is_cuda()) {
    return clip_cuda(x, most);
  }
#endif
  AT_ASSERTM(!x.type().is_cuda(), "not compiled with CUDA");
  return clip_cpu(x, most);
}

// The dispatch also accepts a kind, as in this template.
template <typename Type>
int64_t size_of(const Type& type) {
  int64_t size = 0;
  AT_DISPATCH_ALL_TYPES_AND2(at::ScalarType::Half, at::ScalarType::BFloat16, type, "size_of",
                             [&] { size = sizeof(scalar_t); });
  return size;
}

int64_t element_size(torch::Tensor x) {
  AT_CHECK(size_of(x.type()) == size_of(x.scalar_type()));
  return size_of(x.type());
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("clip", &clip, "The smaller of x and a number");
  m.def("element_size", &element_size, "Bytes of an element");
}
