// Makes an operator from a C++ function: its schema, and a kernel that calls the function.
#pragma once

#include <ATen/core/function_schema.h>
#include <ATen/core/stack.h>
#include <tch_extension/pybind/convert.h>
#include <tch_extension/pybind/signature.h>
#include <torch/library.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

// Hidden visibility: every extension keeps its own copy, whatever the others in the process were
// compiled with.
#pragma GCC visibility push(hidden)
namespace tch_extension {
namespace pybind {

// The signature of anything that can be called.
template <typename F>
struct Callable : Callable<decltype(&F::operator())> {};
template <typename R, typename... Args>
struct Callable<R (*)(Args...)> {
  using Pointer = R (*)(Args...);
};
template <typename R, typename... Args>
struct Callable<R (*)(Args...) noexcept> : Callable<R (*)(Args...)> {};
template <typename C, typename R, typename... Args>
struct Callable<R (C::*)(Args...)> : Callable<R (*)(Args...)> {};
template <typename C, typename R, typename... Args>
struct Callable<R (C::*)(Args...) const> : Callable<R (*)(Args...)> {};
template <typename C, typename R, typename... Args>
struct Callable<R (C::*)(Args...) noexcept> : Callable<R (*)(Args...)> {};
template <typename C, typename R, typename... Args>
struct Callable<R (C::*)(Args...) const noexcept> : Callable<R (*)(Args...)> {};

// A `Tensor&` may be changed in place. The schema marks such arguments with (a!), (b!), ...
template <typename T>
constexpr bool is_mutable = std::is_same_v<T, at::Tensor&>;

inline std::string alias(size_t index) {
  TORCH_CHECK(index < 26, "more than 26 arguments are torch::Tensor&");
  return std::string("Tensor(") + static_cast<char>('a' + index) + "!)";
}

template <typename T>
struct Results {
  static std::string type(bool has_mutable) {
    // A returned reference is taken to be the first argument that is a reference.
    return is_mutable<T> && has_mutable ? alias(0) : type_name<T>();
  }
  static void push(torch::jit::Stack& stack, const Value<T>& result) {
    stack.push_back(give<T>(result));
  }
};
template <>
struct Results<void> {
  static std::string type(bool) { return "()"; }
};
template <typename... T>
struct Results<std::tuple<T...>> {
  static std::string type(bool) {
    std::string all;
    ((all += (all.empty() ? "" : ", ") + type_name<T>()), ...);
    return "(" + all + ")";
  }
  static void push(torch::jit::Stack& stack, const std::tuple<T...>& results) {
    std::apply([&stack](const auto&... result) { (stack.push_back(give<T>(result)), ...); },
               results);
  }
};
template <typename First, typename Second>
struct Results<std::pair<First, Second>> : Results<std::tuple<First, Second>> {};

// The kernel that the dispatcher calls with a stack of values. It calls the function with them.
template <typename F, typename Guard, typename R, typename... Args>
class Kernel final : public c10::OperatorKernel {
 public:
  Kernel(F function, std::string op, std::array<Described, sizeof...(Args)> described)
      : function_(std::move(function)), op_(std::move(op)), described_(std::move(described)) {}

  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
    call(*stack, std::index_sequence_for<Args...>());
  }

 private:
  template <size_t... I>
  void call(torch::jit::Stack& stack, std::index_sequence<I...>) {
    constexpr size_t count = sizeof...(Args);
    // The braces make sure that the arguments are taken in order.
    std::tuple<Held<Args>...> held{
        take<Args>(given(torch::jit::peek(stack, I, count), described_[I]),
                   Place{op_, described_[I].name})...};
    torch::jit::drop(stack, count);
    [[maybe_unused]] Guard guard;
    if constexpr (std::is_void_v<R>) {
      function_(pass<Args>(std::get<I>(held))...);
    } else {
      Results<std::conditional_t<is_mutable<R>, R, Value<R>>>::push(
          stack, function_(pass<Args>(std::get<I>(held))...));
    }
  }

  static const c10::IValue& given(const c10::IValue& value, const Described& described) {
    return described.hidden && value.isNone() ? *described.fallback : value;
  }

  F function_;
  std::string op_;
  std::array<Described, sizeof...(Args)> described_;
};

template <typename R, typename... Args>
struct Schema {
  // `name` includes the overload's name.
  static c10::FunctionSchema make(const std::string& name,
                                  const std::array<Described, sizeof...(Args)>& described) {
    std::string text;
    size_t mutables = 0;
    size_t index = 0;
    [[maybe_unused]] const auto add = [&](const std::string& type) {
      text += (text.empty() ? "" : ", ") + type;
      text += described[index].hidden && type.back() != '?' ? "? arg" : " arg";
      text += std::to_string(index++);
    };
    (add(is_mutable<Args> ? alias(mutables++) : type_name<Args>()), ...);
    using Result = std::conditional_t<is_mutable<R> || std::is_void_v<R>, R, Value<R>>;
    text = name + "(" + text + ") -> " + Results<Result>::type(mutables > 0);
    auto schema = torch::schema(text.c_str());
    std::vector<c10::Argument> arguments;
    for (size_t i = 0; i < sizeof...(Args); ++i) {
      const auto& parsed = schema.arguments()[i];
      const auto& wanted = described[i];
      arguments.emplace_back(
          wanted.name, parsed.type(), parsed.real_type(), parsed.N(),
          wanted.hidden ? std::optional(c10::IValue()) : wanted.fallback, wanted.keyword_only,
          parsed.alias_info() ? std::optional(*parsed.alias_info()) : std::nullopt);
    }
    return schema.cloneWithArguments(std::move(arguments));
  }
};

}  // namespace pybind
}  // namespace tch_extension
#pragma GCC visibility pop
