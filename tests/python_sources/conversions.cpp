// Every type of function that PYBIND11_MODULE accepts here. What goes in must come out.
#include <pybind11/cast.h>
#include <pybind11/eigen.h>
#include <pybind11/functional.h>
#include <pybind11/numpy.h>
#include <pybind11/operators.h>
#include <pybind11/pybind11.h>
#include <pybind11/pytypes.h>
#include <pybind11/stl.h>
#include <torch/extension.h>

#include <array>
#include <cmath>
#include <complex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace {

int64_t sum(const std::vector<int>& values) {
  int64_t total = 0;
  for (const int value : values) total += value;
  return total;
}

void add_one_(torch::Tensor& tensor) { tensor.add_(1); }

torch::Tensor& double_(torch::Tensor& tensor) { return tensor.mul_(2); }

std::string describe(torch::Tensor) { return "one tensor"; }
std::string describe(torch::Tensor, torch::Tensor) { return "two tensors"; }

struct Scale {
  double factor;
  torch::Tensor operator()(const torch::Tensor& tensor) const { return tensor * factor; }
};

// The number of calls that are running.
int depth = 0;
struct Depth {
  Depth() { ++depth; }
  ~Depth() { --depth; }
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace pybind11::literals;
  m.doc() = "conversions";
  m.attr("__version__") = "1.0";
  m.attr("constant") = py::int_(3);
  m.attr("dev") = py::str("text");

  m.def("int32", [](int value) { return value; });
  m.def("uint32", [](unsigned value) { return value; });
  m.def("uint64", [](size_t value) { return value; });
  m.def("int64", [](int64_t value) { return value; });
  m.def("long", [](long value) { return value; });
  m.def("uint8", [](uint8_t value) { return value; });
  m.def("float32", [](float value) { return value; });
  m.def("float64", [](double value) { return value; });
  m.def("boolean", [](bool value) { return !value; });
  m.def("string", [](const std::string& text) { return text + "!"; });
  m.def("string_by_value", [](std::string text) { return text + "?"; });
  m.def("chars", [](const char* text) { return std::string(text); });
  m.def("kind", [](torch::Tensor tensor, torch::Dtype kind) { return tensor.to(kind); });
  m.def("kind_of", [](torch::Tensor tensor) { return tensor.scalar_type(); });
  m.def("device", [](torch::Device device) { return device; });
  m.def("scalar", [](torch::Tensor tensor, at::Scalar scalar) { return tensor * scalar; });
  m.def("complex", [](std::complex<double> value) { return std::conj(value); });

  m.def("sum", &sum);
  m.def("ints", [](std::vector<int64_t> values) { return values; });
  m.def("floats", [](std::vector<float> values) { return values; });
  m.def("doubles", [](const std::vector<double>& values) { return values; });
  m.def("booleans", [](std::vector<bool> values) { return values; });
  m.def("strings", [](std::vector<std::string> values) { return values; });
  m.def("reshape",
        [](torch::Tensor tensor, at::IntArrayRef shape) { return tensor.reshape(shape); });
  m.def("cat", [](torch::TensorList tensors) { return torch::cat(tensors); });
  m.def("cat_vector",
        [](const std::vector<torch::Tensor>& tensors) { return torch::cat(tensors); });
  m.def("present", [](const std::vector<std::optional<torch::Tensor>>& tensors) {
    std::vector<bool> present;
    for (const auto& tensor : tensors) present.push_back(tensor.has_value());
    return present;
  });
  m.def("swap", [](std::array<torch::Tensor, 2> pair) {
    return std::array<torch::Tensor, 2>{pair[1], pair[0]};
  });

  m.def("or_zeros", [](const c10::optional<torch::Tensor>& tensor) {
    return tensor.has_value() ? *tensor : torch::zeros({2});
  });
  m.def("or_seven", [](std::optional<int> value) { return value.value_or(7); });
  m.def("sum_dims",
        [](torch::Tensor tensor, at::OptionalIntArrayRef dims) { return tensor.sum(dims); });

  m.def("nothing", [] {});
  m.def("pair", [](torch::Tensor tensor) { return std::make_pair(tensor, tensor.numel()); });
  m.def("triple",
        [](torch::Tensor tensor) { return std::make_tuple(tensor, 2.5, std::vector<int>{1, 2}); });
  m.def("add_one_", &add_one_);
  m.def("double_", &double_, py::return_value_policy::reference);

  m.def("scale", Scale{3});
  m.def("describe", py::overload_cast<torch::Tensor>(&describe));
  m.def("describe", py::overload_cast<torch::Tensor, torch::Tensor>(&describe));
  m.def("depth", [] { return depth; }, py::call_guard<Depth, py::gil_scoped_release>());
  m.def(
      "no_grad", [](torch::Tensor tensor) { return tensor * 2; },
      py::call_guard<torch::NoGradGuard>());
  m.def("wrapped", torch::wrap_pybind_function(&sum));

  m.def(
      "defaults",
      [](torch::Tensor, int count, double eps, std::string mode, std::optional<double> maybe,
         torch::Dtype kind, std::vector<int64_t> dims, bool flag) {
        return mode + " " + std::to_string(count) + " " + std::to_string(eps) + " " +
               (maybe ? std::to_string(*maybe) : "none") + " " + torch::toString(kind) + " " +
               std::to_string(dims.size()) + (flag ? " yes" : " no");
      },
      "A function with a default of each sort", "tensor"_a, "count"_a = 3, py::arg("eps") = 1,
      py::arg("mode") = "mean", py::arg("maybe") = py::none(), py::kw_only(),
      py::arg("kind") = torch::kDouble, py::arg("dims") = std::vector<int64_t>{0, 1},
      py::arg("flag").noconvert() = true);

  // A schema cannot have a tensor or NaN as a default.
  m.def(
      "hidden",
      [](torch::Tensor tensor, torch::Tensor bias, torch::Tensor scale, double limit) {
        TORCH_CHECK(!bias.defined());
        return std::isnan(limit) ? tensor * scale : tensor * limit;
      },
      py::arg("tensor"), py::arg("bias") = torch::Tensor(), py::arg("scale") = torch::full({}, 3),
      py::arg("limit") = std::nan(""));
  m.def(
      "default_first", [](int a, int b, int c) { return a - b - c; }, py::arg("a") = 5,
      py::arg("b"), py::arg("c") = 1);
  m.def(
      "unnamed", [](torch::Tensor, int second) { return second; }, py::doc("d"), py::arg().none(),
      py::arg() = 2, py::keep_alive<0, 1>());
  m.def("literal", []() -> const char* { return "abc"; });

  m.def("fails", [](torch::Tensor tensor) {
    TORCH_CHECK(tensor.dim() == 2, "expected 2 dimensions, got ", tensor.dim());
    return tensor;
  });
  m.def("throws", [](int) -> int { throw py::value_error("not that"); });
  m.def("throws_a_number", [] { throw 42; });

  auto sub = m.def_submodule("sub", "a submodule");
  sub.def("negate", [](torch::Tensor tensor) { return -tensor; });
}
