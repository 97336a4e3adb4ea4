// Operators that throw, and a caller that tells exceptions by their types, as Python does. This
// file is compiled when the tests run.

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/library.h>

#include <atomic>
#include <exception>
#include <stdexcept>
#include <string>

namespace {

using c10::DispatchKey;
using std::string;

std::atomic<int64_t> alive{0};

// An exception that this file alone knows.
struct Own : std::exception {
  explicit Own(int64_t number) : number(number), text("no luck " + std::to_string(number)) {
    ++alive;
  }
  Own(const Own& other) : number(other.number), text(other.text) { ++alive; }
  ~Own() override { --alive; }
  const char* what() const noexcept override { return text.c_str(); }

  int64_t number;
  string text;
};

// Like Python's error below libtorch: without a text.
struct Silent : Own {
  using Own::Own;
  const char* what() const noexcept override { return ""; }
};

void fail(const at::Tensor&, int64_t number) { throw Own(number); }
void fail_silently(const at::Tensor&, int64_t number) { throw Silent(number); }
void fail_as_usual(const at::Tensor&) { throw std::runtime_error("as usual"); }

template <typename Run>
string thrown_by(Run&& run) {
  try {
    run();
  } catch (const Silent& error) {
    return "Silent " + std::to_string(error.number);
  } catch (const Own& error) {
    return "Own " + std::to_string(error.number);
  } catch (const c10::IndexError& error) {
    return "IndexError";
  } catch (const c10::NotImplementedError& error) {
    return "NotImplementedError";
  } catch (const std::runtime_error& error) {
    return string("runtime_error ") + error.what();
  } catch (const std::exception& error) {
    return string("exception ") + error.what();
  }
  return "nothing";
}

int64_t living() { return alive; }

// A mode like those that Python defines: it sees every operator, and it refuses to multiply.
constexpr auto kMode = DispatchKey::TESTING_ONLY_GenericMode;

void refuse_mul(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard once(kMode);
  if (op.schema().name() == "aten::mul") throw Silent(70);
  op.callBoxed(stack);
}

string thrown_by_backward(const at::Tensor& loss, bool in_mode) {
  return thrown_by([&] {
    if (!in_mode) return torch::autograd::backward({loss}, {});
    const c10::impl::IncludeDispatchKeyGuard mode(kMode);
    torch::autograd::backward({loss}, {});
  });
}

string thrown_by_call(c10::string_view name, const at::Tensor& x) {
  return thrown_by([&] {
    torch::jit::Stack stack{x};
    c10::Dispatcher::singleton().findSchemaOrThrow(string(name).c_str(), "").callBoxed(stack);
  });
}

int64_t enter_dual_level() {
  return static_cast<int64_t>(torch::autograd::ForwardADLevel::get_next_idx());
}
void exit_dual_level(int64_t level) { torch::autograd::ForwardADLevel::release_idx(level); }

}  // namespace

TORCH_LIBRARY(tch_thrown, m) {
  m.def("fail", &fail);
  m.def("fail_silently", &fail_silently);
  m.def("fail_as_usual", &fail_as_usual);
  m.def("cuda_only(Tensor x) -> Tensor");
  m.def("thrown_by_backward", &thrown_by_backward);
  m.def("thrown_by_call", &thrown_by_call);
  m.def("living", &living);
  m.def("enter_dual_level", &enter_dual_level);
  m.def("exit_dual_level", &exit_dual_level);
}

TORCH_LIBRARY_IMPL(tch_thrown, CUDA, m) {
  m.impl("cuda_only", [](const at::Tensor& x) { return x; });
}

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse_mul>());
}
