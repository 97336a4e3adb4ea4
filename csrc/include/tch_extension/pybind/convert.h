// Converts the arguments and results of C++ functions from and to the dispatcher's values, with one
// `Converter` for each type.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>

#include <array>
#include <complex>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

// Hidden visibility: every extension keeps its own copy, whatever the others in the process were
// compiled with.
#pragma GCC visibility push(hidden)
namespace tch_extension {
namespace pybind {

// The argument and the operator that an error message names.
struct Place {
  const std::string& op;
  const std::string& argument;
};

// `Boxed` is the dispatcher's type that represents T, and `type()` is its name in a schema.
template <typename T, typename = void>
struct Converter {
  static_assert(
      !sizeof(T*),
      "tch_extension: PYBIND11_MODULE without Python: no operator can take or return this type. "
      "Tensors, "
      "numbers, bool, std::string, torch::Dtype, torch::Device, at::Scalar, and std::optional, "
      "std::vector and std::array of them can be arguments; std::tuple and std::pair, too, "
      "results. "
      "Objects of Python (py::object, py::dict, py::array, ...) and classes cannot.");
  using Boxed = int64_t;
  static std::string type() { return "int"; }
  static Boxed box(const T&) { return 0; }
  static T unbox(const Boxed&, const Place&);
};

template <typename T>
using Value = std::remove_cv_t<std::remove_reference_t<T>>;
template <typename T>
using Boxed = typename Converter<T>::Boxed;

// The converter of a type that the dispatcher has itself.
template <typename T>
struct Same {
  using Boxed = T;
  static const T& box(const T& value) { return value; }
  static const T& unbox(const T& value, const Place&) { return value; }
};

#define TCH_EXTENSION_SAME(cpp, schema)          \
  template <>                                    \
  struct Converter<cpp> : Same<cpp> {            \
    static std::string type() { return schema; } \
  }
TCH_EXTENSION_SAME(at::Tensor, "Tensor");
TCH_EXTENSION_SAME(bool, "bool");
TCH_EXTENSION_SAME(double, "float");
TCH_EXTENSION_SAME(int64_t, "int");
TCH_EXTENSION_SAME(std::string, "str");
TCH_EXTENSION_SAME(at::ScalarType, "ScalarType");
TCH_EXTENSION_SAME(at::Layout, "Layout");
TCH_EXTENSION_SAME(at::MemoryFormat, "MemoryFormat");
TCH_EXTENSION_SAME(at::Device, "Device");
TCH_EXTENSION_SAME(at::Scalar, "Scalar");
TCH_EXTENSION_SAME(at::Generator, "Generator");
TCH_EXTENSION_SAME(c10::complex<double>, "complex");
#undef TCH_EXTENSION_SAME

// The converter of int, unsigned, size_t and so on. A number that does not fit is an error, as in
// Python.
template <typename T>
struct Converter<T, std::enable_if_t<std::is_integral_v<T>>> {
  using Boxed = int64_t;
  static std::string type() { return "int"; }
  static int64_t box(T value) {
    if constexpr (std::is_unsigned_v<T> && sizeof(T) == sizeof(int64_t)) {
      TORCH_CHECK(value <= static_cast<T>(std::numeric_limits<int64_t>::max()), "a result of ",
                  value, " is larger than an operator's int can be");
    }
    return static_cast<int64_t>(value);
  }
  static T unbox(int64_t value, const Place& place) {
    const T narrow = static_cast<T>(value);
    const bool fits = static_cast<int64_t>(narrow) == value && (value < 0) == (narrow < T{0});
    TORCH_CHECK(fits, place.op, ": ", place.argument, ": expected an integer from ",
                +std::numeric_limits<T>::min(), " to ", +std::numeric_limits<T>::max(), ", got ",
                value);
    return narrow;
  }
};

template <typename T>
struct Converter<T, std::enable_if_t<std::is_floating_point_v<T>>> {
  using Boxed = double;
  static std::string type() { return "float"; }
  static double box(T value) { return static_cast<double>(value); }
  static T unbox(double value, const Place&) { return static_cast<T>(value); }
};

template <typename T>
struct Converter<std::complex<T>> {
  using Boxed = c10::complex<double>;
  static std::string type() { return "complex"; }
  static Boxed box(const std::complex<T>& value) { return {value.real(), value.imag()}; }
  static std::complex<T> unbox(const Boxed& value, const Place&) {
    return {static_cast<T>(value.real()), static_cast<T>(value.imag())};
  }
};

template <typename T>
struct Converter<std::optional<T>> {
  using Boxed = std::optional<pybind::Boxed<T>>;
  static std::string type() { return Converter<T>::type() + "?"; }
  static Boxed box(const std::optional<T>& value) {
    return value ? Boxed(Converter<T>::box(*value)) : std::nullopt;
  }
  static std::optional<T> unbox(const Boxed& value, const Place& place) {
    return value ? std::optional<T>(Converter<T>::unbox(*value, place)) : std::nullopt;
  }
};

template <typename T>
struct Converter<std::vector<T>> {
  using Boxed = c10::List<pybind::Boxed<T>>;
  static std::string type() { return Converter<T>::type() + "[]"; }
  static Boxed box(const std::vector<T>& values) {
    Boxed list;
    list.reserve(values.size());
    for (const auto& value : values) {
      list.push_back(Converter<T>::box(value));
    }
    return list;
  }
  static std::vector<T> unbox(const Boxed& list, const Place& place) {
    std::vector<T> values;
    values.reserve(list.size());
    for (size_t i = 0; i < list.size(); ++i) {
      values.push_back(Converter<T>::unbox(list.get(i), place));
    }
    return values;
  }
};

template <typename T, size_t N>
struct Converter<std::array<T, N>> {
  using Boxed = c10::List<pybind::Boxed<T>>;
  static std::string type() { return Converter<T>::type() + "[]"; }
  static Boxed box(const std::array<T, N>& values) {
    return Converter<std::vector<T>>::box({values.begin(), values.end()});
  }
  static std::array<T, N> unbox(const Boxed& list, const Place& place) {
    TORCH_CHECK(list.size() == N, place.op, ": ", place.argument, ": expected a list of ", N,
                ", got one of ", list.size());
    auto values = Converter<std::vector<T>>::unbox(list, place);
    std::array<T, N> array;
    std::move(values.begin(), values.end(), array.begin());
    return array;
  }
};

// Holds an argument while the function runs. For a view such as at::IntArrayRef, it holds the data
// that is viewed.
template <typename T>
struct Holder {
  using Held = T;
  static T& view(Held& held) { return held; }
};
template <typename T>
struct Holder<c10::ArrayRef<T>> {
  using Held = std::vector<T>;
  static c10::ArrayRef<T> view(Held& held) { return held; }
};
template <typename T>
struct Holder<std::optional<c10::ArrayRef<T>>> {
  using Held = std::optional<std::vector<T>>;
  static std::optional<c10::ArrayRef<T>> view(Held& held) {
    return held ? std::optional<c10::ArrayRef<T>>(*held) : std::nullopt;
  }
};
template <typename T>
struct Holder<c10::OptionalArrayRef<T>> {
  using Held = std::optional<std::vector<T>>;
  static c10::OptionalArrayRef<T> view(Held& held) {
    return held ? c10::OptionalArrayRef<T>(*held) : c10::OptionalArrayRef<T>();
  }
};
template <>
struct Holder<std::string_view> {
  using Held = std::string;
  static std::string_view view(Held& held) { return held; }
};
template <>
struct Holder<const char*> {
  using Held = std::string;
  static const char* view(Held& held) { return held.c_str(); }
};
template <typename T>
using Held = typename Holder<Value<T>>::Held;

template <typename T>
std::string type_name() {
  return Converter<Held<T>>::type();
}

// Converts one argument of a call.
template <typename T>
Held<T> take(const c10::IValue& value, const Place& place) {
  using Type = Boxed<Held<T>>;
  if constexpr (std::is_same_v<Type, double>) {
    // A whole number may come as an integer.
    return Converter<Held<T>>::unbox(
        value.isInt() ? static_cast<double>(value.toInt()) : value.toDouble(), place);
  } else if constexpr (std::is_same_v<Type, at::Tensor>) {
    TORCH_CHECK(value.isTensor(), place.op, ": ", place.argument, ": expected a tensor, got ",
                value.tagKind());
    return value.toTensor();
  } else {
    return Converter<Held<T>>::unbox(value.to<Type>(), place);
  }
}

// Passes a held argument on as the parameter T: a reference stays a reference, a value is moved,
// and a view is made here.
template <typename T>
decltype(auto) pass(Held<T>& held) {
  if constexpr (!std::is_same_v<Held<T>, Value<T>>) {
    return Holder<Value<T>>::view(held);
  } else if constexpr (std::is_lvalue_reference_v<T>) {
    return static_cast<Value<T>&>(held);
  } else {
    return std::move(held);
  }
}

template <typename T>
c10::IValue give(const Value<T>& value) {
  if constexpr (std::is_same_v<Held<T>, Value<T>>) {
    return c10::IValue(Converter<Value<T>>::box(value));
  } else if constexpr (std::is_same_v<Value<T>, const char*>) {
    TORCH_CHECK(value != nullptr, "a result is a null const char*");
    return c10::IValue(std::string(value));
  } else {
    return c10::IValue(Converter<Held<T>>::box(Held<T>(value.begin(), value.end())));
  }
}

}  // namespace pybind
}  // namespace tch_extension
#pragma GCC visibility pop
