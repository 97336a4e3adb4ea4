// What m.def can be told about a function: py::arg, defaults, docs, guards.
#pragma once

#include <tch_extension/pybind/convert.h>

#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

// Hidden visibility: every extension keeps its own copy, whatever the others in the process were
// compiled with.
#pragma GCC visibility push(hidden)
namespace pybind11 {
// The inline namespace gives these classes their own symbols, because the real pybind11 may be in
// the same process.
inline namespace without_python {

struct none {};

template <typename T>
struct arg_v;

// An argument's name.
struct arg {
  constexpr explicit arg(const char* name = nullptr) : name(name) {}
  template <typename T>
  arg_v<std::decay_t<T>> operator=(T&& value) const;
  arg& noconvert(bool = true) { return *this; }
  arg& none(bool = true) { return *this; }
  const char* name;
};

// An argument's name and default.
template <typename T>
struct arg_v : arg {
  arg_v(const arg& base, T value) : arg(base), value(std::move(value)) {}
  template <typename Value>
  arg_v(const char* name, Value&& value, const char* = nullptr)
      : arg(name), value(std::forward<Value>(value)) {}
  arg_v& noconvert(bool = true) { return *this; }
  arg_v& none(bool = true) { return *this; }
  T value;
};
template <typename Value>
arg_v(const char*, Value&&, const char*) -> arg_v<std::decay_t<Value>>;
template <typename Value>
arg_v(const char*, Value&&) -> arg_v<std::decay_t<Value>>;

template <typename T>
arg_v<std::decay_t<T>> arg::operator=(T&& value) const {
  return {*this, std::forward<T>(value)};
}

// The arguments after it can only be given by name.
struct kw_only {};
struct pos_only {};

// Guards that are constructed before each call and destroyed after it.
template <typename... Guards>
struct call_guard {
  using Type = std::tuple<Guards...>;
};

// Options for the Python side of a function, which does not exist here. They are ignored.
struct doc {
  explicit doc(const char*) {}
};
struct name {
  explicit name(const char*) {}
};
template <size_t Nurse, size_t Patient>
struct keep_alive {};
class options {
 public:
  options& disable_function_signatures() { return *this; }
  options& enable_function_signatures() { return *this; }
  options& disable_user_defined_docstrings() { return *this; }
  options& enable_user_defined_docstrings() { return *this; }
};

// There is no interpreter here, so there is no lock to release or acquire.
struct gil_scoped_release {
  gil_scoped_release() {}
  ~gil_scoped_release() {}
};
struct gil_scoped_acquire {
  gil_scoped_acquire() {}
  ~gil_scoped_acquire() {}
};

enum class return_value_policy : uint8_t {
  automatic,
  automatic_reference,
  take_ownership,
  copy,
  move,
  reference,
  reference_internal
};

namespace literals {
constexpr arg operator""_a(const char* name, size_t) { return arg(name); }
}  // namespace literals

}  // namespace without_python
}  // namespace pybind11

namespace tch_extension {
namespace pybind {

// What is known about one argument.
struct Described {
  std::string name;
  bool keyword_only = false;
  std::optional<c10::IValue> fallback;
  // If true, the schema cannot hold the default. The schema then has the default None, and the
  // kernel replaces None by `fallback`.
  bool hidden = false;
};

// When libtorch deregisters an operator, it finds the schema by comparing it. If a default does not
// equal itself (NaN) or cannot be compared (a tensor), libtorch would abort the process.
inline bool is_comparable(const c10::IValue& value) {
  try {
    return !value.isTensor() && !value.isTensorList() && value == value;
  } catch (const std::exception&) {
    return false;
  }
}

template <typename T>
struct IsArg : std::is_base_of<pybind11::arg, T> {};
template <typename... Extra>
constexpr size_t named_arguments = (size_t{0} + ... + size_t{IsArg<Extra>::value});

// The types of the call_guard among the extras; none if there is no call_guard.
template <typename... Extra>
struct Guards {
  using Type = std::tuple<>;
};
template <typename... Types, typename... Rest>
struct Guards<pybind11::call_guard<Types...>, Rest...> {
  using Type = std::tuple<Types...>;
};
template <typename First, typename... Rest>
struct Guards<First, Rest...> : Guards<Rest...> {};

// The index of the argument that an extra names: the number of extras before it that name one.
template <size_t Index, typename... Extra>
constexpr size_t position() {
  constexpr bool names[] = {IsArg<Extra>::value..., false};
  size_t count = 0;
  for (size_t i = 0; i < Index; ++i) {
    count += names[i] ? 1 : 0;
  }
  return count;
}

// Collects what the extras say about the arguments.
template <typename... Parameters>
class Description {
 public:
  template <typename... Extra>
  static std::array<Described, sizeof...(Parameters)> of(const Extra&... extra) {
    Description description;
    for (size_t i = 0; i < sizeof...(Parameters); ++i) {
      description.arguments_[i].name = "arg" + std::to_string(i);
    }
    description.add_all<Extra...>(std::index_sequence_for<Extra...>(), extra...);
    description.drop_unusable();
    return description.arguments_;
  }

 private:
  template <typename... Extra, size_t... I>
  void add_all(std::index_sequence<I...>, const Extra&... extra) {
    (add<position<I, Extra...>()>(extra), ...);
  }

  template <size_t I>
  void add(const pybind11::arg& arg) {
    if (arg.name != nullptr) {
      arguments_[I].name = arg.name;
    }
    arguments_[I].keyword_only = keyword_only_;
  }
  template <size_t I, typename T>
  void add(const pybind11::arg_v<T>& arg) {
    using Parameter = std::tuple_element_t<I, std::tuple<Held<Parameters>...>>;
    add<I>(static_cast<const pybind11::arg&>(arg));
    if constexpr (std::is_same_v<T, pybind11::none> || std::is_same_v<T, std::nullopt_t>) {
      arguments_[I].fallback = c10::IValue();
    } else {
      static_assert(std::is_constructible_v<Parameter, const T&>,
                    "tch_extension: m.def: the default in py::arg(...) = does not convert to the "
                    "argument's type");
      arguments_[I].fallback = c10::IValue(boxed<Parameter>(arg.value));
      arguments_[I].hidden = !is_comparable(*arguments_[I].fallback);
    }
  }
  template <size_t I>
  void add(const pybind11::kw_only&) {
    keyword_only_ = true;
  }
  template <typename Parameter, typename T>
  static Boxed<Parameter> boxed(const T& value) {
    if constexpr (std::is_floating_point_v<Parameter> && std::is_arithmetic_v<T>) {
      // Convert directly, not through a float, so that 1e-5 is exactly 1e-5 in the schema.
      return static_cast<double>(value);
    } else {
      return Converter<Parameter>::box(static_cast<Parameter>(value));
    }
  }
  // Docs, policies and guards say nothing about an argument.
  template <size_t I, typename T, typename = std::enable_if_t<!IsArg<T>::value>>
  void add(const T&) {}

  // Drops a default that is followed by an argument without one. Python could use such a default by
  // naming the arguments that follow, but a schema must not have it.
  void drop_unusable() {
    bool required = false;
    for (size_t i = sizeof...(Parameters); i-- > 0;) {
      auto& argument = arguments_[i];
      if (argument.keyword_only) {
        continue;
      }
      required = required || !argument.fallback;
      if (required) {
        argument.fallback.reset();
        argument.hidden = false;
      }
    }
  }

  std::array<Described, sizeof...(Parameters)> arguments_;
  bool keyword_only_ = false;
};

}  // namespace pybind
}  // namespace tch_extension
#pragma GCC visibility pop
