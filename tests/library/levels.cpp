// What torch.func.grad does in Python, in C++: derivatives of an operator within nested levels.
// This file is compiled when the tests run.

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/library.h>
#include <torch/version.h>

#include <optional>
#include <string>

// libtorch exports these, but their headers include one that it lacks.
namespace at::functorch {

enum class TransformType { Torch, Vmap, Grad, Jvp, Functionalize };
enum class RandomnessType;

struct DynamicLayer {
  ~DynamicLayer() {}  // not trivial, so that it is returned in memory
  alignas(16) char more_than_its_size[512];
};

int64_t initAndPushDynamicLayer(TransformType type, std::optional<c10::SymInt> batch_size,
                                std::optional<RandomnessType> randomness,
                                std::optional<bool> grad_mode, std::optional<bool> forward_mode,
                                std::optional<bool> functionalize_views
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
                                ,
                                std::optional<bool> inference_mode
#endif
);
DynamicLayer popDynamicLayerAndDeleteMetadata();
Tensor makeTensorWrapper(const Tensor& tensor, int64_t level, bool is_immutable);
Tensor unwrapIfDead(const Tensor& tensor);

}  // namespace at::functorch

namespace {

using at::Tensor;

// A level, as torch.func.grad makes one.
class Level {
 public:
  Level()
      : id_(at::functorch::initAndPushDynamicLayer(at::functorch::TransformType::Grad, std::nullopt,
                                                   std::nullopt, at::GradMode::is_enabled(),
                                                   std::nullopt, std::nullopt
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
                                                   ,
                                                   std::nullopt
#endif
                                                   )) {
  }
  Level(const Level&) = delete;
  Level& operator=(const Level&) = delete;
  ~Level() { at::functorch::popDynamicLayerAndDeleteMetadata(); }

  Tensor input(const Tensor& x) const {
    return at::functorch::makeTensorWrapper(x, id_, /*is_immutable=*/false).requires_grad_();
  }

 private:
  int64_t id_;
};

Tensor first(const Tensor& y, const Tensor& x) {
  return torch::autograd::grad({y}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
}

// torch.func.grad(f)(x)
template <typename Function>
Tensor grad(const Function& f, const Tensor& x) {
  Tensor result;
  {
    const Level level;
    const Tensor input = level.input(x);
    result = first(f(input), input);
  }
  return at::functorch::unwrapIfDead(result);
}

// sum(op(x) * x)
struct Loss {
  explicit Loss(c10::string_view name)
      : op(c10::Dispatcher::singleton().findSchemaOrThrow(std::string(name).c_str(), "")) {}

  Tensor operator()(const Tensor& x) const {
    torch::jit::Stack stack{x};
    op.callBoxed(stack);
    return stack.back().toTensor().mul(x).sum();
  }

  c10::OperatorHandle op;
};

Tensor second(c10::string_view name, const Tensor& x) {
  const Loss loss(name);
  return grad([&](const Tensor& b) { return grad(loss, b).sum(); }, x);
}

Tensor third(c10::string_view name, const Tensor& x) {
  const Loss loss(name);
  const auto second = [&](const Tensor& c) {
    return grad([&](const Tensor& b) { return grad(loss, b).sum(); }, c).sum();
  };
  return grad(second, x);
}

// The outer derivative by the graph of the tensors, without a level.
Tensor second_outside(c10::string_view name, const Tensor& x) {
  const Tensor leaf = x.detach().requires_grad_();
  return first(grad(Loss(name), leaf).sum(), leaf).detach();
}

}  // namespace

TORCH_LIBRARY(tch_levels, m) {
  m.def("second", &second);
  m.def("third", &third);
  m.def("second_outside", &second_outside);
}
