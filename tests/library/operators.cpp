// Operators with all types, as another project would register them. This file is compiled when the
// tests run.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <chrono>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

namespace {

using at::Scalar;
using at::Tensor;
using std::optional;
using std::string;

template <typename T>
string text(const T& value) {
  std::ostringstream out;
  out << value;
  return out.str();
}

template <typename T>
string text(const optional<T>& value) {
  return value ? text(*value) : "None";
}

template <typename List>
string list(const List& values) {
  string result = "[";
  for (const auto& value : values) result += text(value) + " ";
  return result + "]";
}

string sum(const Tensor& x) { return "T" + text(x.sum().item<double>()); }

string tensors(const Tensor& x, const optional<Tensor>& y, at::TensorList many,
               const c10::List<optional<Tensor>>& some) {
  string result = sum(x) + " " + (y ? sum(*y) : "None") + " [";
  for (const auto& one : many) result += sum(one) + " ";
  result += "] [";
  for (size_t i = 0; i < some.size(); ++i) {
    const optional<Tensor> one = some.get(i);
    result += (one ? sum(*one) : "None") + " ";
  }
  return result + "]";
}

string numbers(int64_t i, const c10::SymInt& s, double f, bool b, const Scalar& n,
               at::IntArrayRef is, c10::SymIntArrayRef ss, at::IntArrayRef pair,
               at::ArrayRef<double> fs, std::array<bool, 2> bs) {
  return text(i) + " " + text(s) + " " + text(f) + " " + text(b) + " " + text(n) + " " + list(is) +
         " " + list(ss) + " " + list(pair) + " " + list(fs) + " " + list(bs);
}

string others(c10::string_view t, c10::List<string> ts, at::Device d, at::ScalarType k,
              at::Layout l, at::MemoryFormat m) {
  string result = string(t) + " [";
  for (size_t i = 0; i < ts.size(); ++i) result += string(ts.get(i)) + " ";
  return result + "] " + text(d) + " " + text(k) + " " + text(l) + " " + text(m);
}

string options(optional<int64_t> i, at::OptionalIntArrayRef is, optional<double> f,
               optional<c10::string_view> t, optional<Scalar> n, optional<at::Device> d,
               optional<at::ScalarType> k, optional<bool> b, optional<at::Generator> g) {
  return text(i) + " " + (is ? list(*is) : "None") + " " + text(f) + " " +
         (t ? string(*t) : "None") + " " + text(n) + " " + text(d) + " " + text(k) + " " + text(b) +
         " " + (g ? "G" : "None");
}

string defaults(int64_t i, double f, c10::string_view t, at::IntArrayRef is, bool b) {
  return text(i) + " " + text(f) + " " + string(t) + " " + list(is) + " " + text(b);
}

std::tuple<Tensor, std::vector<Tensor>, int64_t, double, bool, string> first_results(
    const Tensor& x) {
  return {x.mul(2), {x, x.mul(3)}, 7, 0.5, true, "words"};
}

std::tuple<Scalar, std::vector<int64_t>, std::vector<double>, at::Device, at::ScalarType,
           optional<int64_t>>
second_results(const Tensor& x) {
  return {Scalar(1.5), {1, 2, 3}, {0.5, 1.5}, x.device(), x.scalar_type(), std::nullopt};
}

std::tuple<Tensor, int64_t, Tensor, double, Tensor, bool, string> seven_results(const Tensor& x) {
  return {x, 2, x.mul(3), 0.25, x.mul(5), true, "seven"};
}

// Returns any number of tensors, which no C++ function type can express.
void boxed_multiples(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const Tensor x = torch::jit::pop(*stack).toTensor();
  const auto count = static_cast<int64_t>(op.schema().returns().size());
  for (int64_t i = 1; i <= count; ++i) stack->emplace_back(x.mul(i));
}

c10::List<optional<Tensor>> some_tensors(const Tensor& x) {
  c10::List<optional<Tensor>> result;
  result.push_back(x);
  result.push_back(std::nullopt);
  return result;
}

void nothing(const Tensor&) {}

// These kernels write through pointers, so neither the graph nor a version counter knows of it.
void scale(const Tensor& x, double by, const Tensor& out) {
  TORCH_CHECK(x.is_contiguous() && x.scalar_type() == at::kDouble,
              "scale: x must be contiguous doubles");
  for (int64_t i = 0; i < x.numel(); ++i) out.data_ptr<double>()[i] = by * x.data_ptr<double>()[i];
}
Tensor scaled(const Tensor& x, double by) {
  Tensor out = at::empty_like(x.detach());
  scale(x, by, out);
  return out;
}
Tensor& scale_(Tensor& x, double by) {
  scale(x, by, x);
  return x;
}
void scale_out(const Tensor& x, double by, Tensor& out) { scale(x, by, out); }

Tensor power(const Tensor& x, int64_t n, double scale, const Scalar& shift, at::IntArrayRef,
             c10::string_view, bool, optional<double>, const optional<Tensor>&,
             optional<at::ScalarType>) {
  return x.detach().pow(n).mul(scale).add(shift);
}

Tensor cube(const Tensor& x) { return x.mul(x).mul(x); }
Tensor doubled(const Tensor& x) { return x.mul(2); }
Tensor cloned(const Tensor& x) { return x.clone(); }

void fail(int64_t how) {
  TORCH_CHECK(how != 0, "how must not be ", how);
  if (how == 1) throw std::runtime_error("a runtime error");
  TORCH_CHECK(how != 3, "on\n  two lines\n");
  throw 1;
}

Tensor same(const Tensor& x) { return x; }

// The time that the dispatcher itself needs for a call of `same`, in nanoseconds.
double time_of_same(const Tensor& x, int64_t calls) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("tch_test::same", "");
  const auto start = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < calls; ++i) {
    torch::jit::Stack stack{x};
    op.callBoxed(stack);
  }
  const std::chrono::duration<double, std::nano> time = std::chrono::steady_clock::now() - start;
  return time.count() / static_cast<double>(calls);
}

Tensor calls_cuda_only(const Tensor& x) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("tch_test::cuda_only", "");
  return op.typed<Tensor(const Tensor&)>().call(x);
}

Tensor first(at::TensorList many) { return many[0].clone(); }

// Registers an operator at run time, as another thread might while a library is loaded.
void register_operator(c10::string_view name) {
  auto* library = new torch::Library(torch::Library::FRAGMENT, "tch_meanwhile", std::nullopt,
                                     __FILE__, __LINE__);
  library->def((string(name) + "(int x) -> int").c_str());
}

void boxed_nothing(const c10::OperatorHandle&, torch::jit::Stack* stack) { stack->clear(); }

}  // namespace

TORCH_LIBRARY(tch_test, m) {
  m.def("tensors(Tensor x, Tensor? y, Tensor[] many, Tensor?[] some) -> str", tensors);
  m.def(
      "numbers(int i, SymInt s, float f, bool b, Scalar n, int[] ints, SymInt[] syms, int[2] pair, "
      "float[] "
      "fs, "
      "bool[2] bs)"
      " -> str",
      numbers);
  m.def("others(str t, str[] ts, Device d, ScalarType k, Layout l, MemoryFormat m) -> str", others);
  m.def(
      "options(int? i=None, int[]? ints=None, float? f=None, str? t=None, Scalar? n=None, Device? "
      "d=None, "
      "ScalarType? k=None, bool? b=None, Generator? g=None) -> str",
      options);
  m.def("defaults(int i=3, float f=0.25, str t='text', int[2] ints=[4, 5], *, bool b=True) -> str",
        defaults);
  m.def("first_results(Tensor x) -> (Tensor, Tensor[], int, float, bool, str)", first_results);
  m.def("second_results(Tensor x) -> (Scalar, int[], float[], Device, ScalarType, int?)",
        second_results);
  m.def("seven_results(Tensor x) -> (Tensor, int, Tensor, float, Tensor, bool, str)",
        seven_results);
  const auto multiples = [] {
    return torch::CppFunction::makeFromBoxedFunction<&boxed_multiples>();
  };
  m.def("two_multiples(Tensor x) -> (Tensor, Tensor)", multiples());
  m.def(
      "twelve_multiples(Tensor x) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, "
      "Tensor, "
      "Tensor, "
      "Tensor, Tensor, Tensor)",
      multiples());
  m.def(
      "thirteen_multiples(Tensor x) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, "
      "Tensor, "
      "Tensor, "
      "Tensor, Tensor, Tensor, Tensor)",
      multiples());
  m.def("some_tensors(Tensor x) -> Tensor?[]", some_tensors);
  m.def("nothing(Tensor x) -> ()", nothing);
  m.def("takes_a_dict(Dict(str, int) d) -> ()",
        torch::CppFunction::makeFromBoxedFunction<&boxed_nothing>());
  m.def("twice.int(int x) -> int", [](int64_t x) { return 2 * x; });
  m.def("twice.float(float x) -> float", [](double x) { return 2 * x; });
  m.def("thrice.only(int x) -> int", [](int64_t x) { return 3 * x; });
  m.def("fail(int how) -> ()", fail);
  m.def("scaled(Tensor x, float by) -> Tensor");
  m.def(
      "power(Tensor x, int n, float scale=0.5, *, Scalar shift=1, int[2] pair=3, str mode='up', "
      "bool "
      "flag=True, "
      "float? maybe=None, Tensor? other=None, ScalarType? dtype=None) -> Tensor",
      power);
  m.def("scale_(Tensor(a!) x, float by) -> Tensor(a!)");
  m.def("scale_out(Tensor x, float by, *, Tensor(a!) out) -> ()");
  m.def("cube(Tensor x) -> Tensor", cube);
  m.def("raw_scaled(Tensor x, float by) -> Tensor", scaled);
  m.def("raw_scale_(Tensor(a!) x, float by) -> Tensor(a!)", scale_);
  m.def("composite_scale_(Tensor(a!) x, Tensor by) -> Tensor(a!)",
        [](Tensor& x, const Tensor& by) -> Tensor& { return x.mul_(by); });
  m.def("doubled(Tensor x) -> Tensor");
  m.def("same(Tensor(a) x) -> Tensor(a)", same);
  m.def("same_and_raw(Tensor x, float by) -> (Tensor, Tensor)",
        [](const Tensor& x, double by) { return std::tuple<Tensor, Tensor>(x, scaled(x, by)); });
  m.def("no_text() -> str", []() { return string("a\xff"); });
  m.def("time_of_same(Tensor x, int calls) -> float", time_of_same);
  m.def("cuda_only(Tensor x) -> Tensor");
  m.def("cuda_and_xla_only(Tensor x) -> Tensor");
  m.def("without_kernels(Tensor x) -> Tensor");
  m.def("calls_cuda_only(Tensor x) -> Tensor", calls_cuda_only);
  m.def("first(Tensor[] many) -> Tensor");
  m.def("first_without_kernels(Tensor[] many) -> Tensor");
  m.def("register_operator(str name) -> ()", register_operator);
}

TORCH_LIBRARY_IMPL(tch_test, CPU, m) {
  m.impl("scaled", scaled);
  m.impl("scale_", scale_);
  m.impl("scale_out", scale_out);
  m.impl("doubled", doubled);
  m.impl("first", first);
}

TORCH_LIBRARY_IMPL(tch_test, Autograd, m) { m.impl("doubled", doubled); }

TORCH_LIBRARY_IMPL(tch_test, CUDA, m) {
  m.impl("cuda_only", cloned);
  m.impl("cuda_and_xla_only", cloned);
}

TORCH_LIBRARY_IMPL(tch_test, XLA, m) { m.impl("cuda_and_xla_only", cloned); }

TORCH_LIBRARY_IMPL(tch_test, Meta, m) { m.impl("cuda_only", cloned); }
