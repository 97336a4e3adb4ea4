// PYBIND11_MODULE without Python: each `m.def` becomes an operator of libtorch's dispatcher.
#pragma once

#include <tch_extension/pybind/operator.h>
#include <tch_extension/pybind/unsupported.h>

#include <cctype>
#include <cstdio>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

// Every extension keeps its own copy, whatever others in the process were compiled with.
#pragma GCC visibility push(hidden)
namespace tch_extension {
namespace pybind {

// Why the modules of this shared library could not be registered; empty when they were.
inline std::string& load_error() {
  static std::string error;
  return error;
}

inline bool is_identifier(const std::string& name) {
  if (name.empty() || std::isdigit(static_cast<unsigned char>(name[0])) != 0) {
    return false;
  }
  for (const unsigned char letter : name) {
    if (std::isalnum(letter) == 0 && letter != '_') {
      return false;
    }
  }
  return true;
}

// The operators of one PYBIND11_MODULE. They go when it goes.
class Registrar {
 public:
  Registrar(std::string name, const char* file, uint32_t line)
      : name_(std::move(name)), file_(file), line_(line) {
    TORCH_CHECK(is_identifier(name_), "PYBIND11_MODULE: `", name_,
                "` cannot be a namespace of operators; write "
                "letters, digits and _");
    TORCH_CHECK(name_ != "aten" && name_ != "prim", "PYBIND11_MODULE: the name `", name_,
                "` is libtorch's own");
  }

  template <typename F, typename R, typename... Args, typename... Extra>
  void def(const std::string& name, F function, R (*)(Args...), const Extra&... extra) {
    constexpr size_t named = named_arguments<Extra...>;
    static_assert(named == 0 || named == sizeof...(Args),
                  "tch_extension: m.def: name every argument with py::arg, or none");
    TORCH_CHECK(is_identifier(name), "m.def: `", name,
                "` cannot be an operator's name; write letters, digits and _");
    const auto arguments = Description<Args...>::of(extra...);
    // Overloads have names in the dispatcher: the first has none, and others count from 2.
    const size_t nth = ++overloads_[name];
    const std::string full = nth == 1 ? name : name + ".overload" + std::to_string(nth);
    using Guard = typename Guards<Extra...>::Type;
    using Function = Kernel<F, Guard, R, Args...>;
    auto kernel = std::make_unique<Function>(std::move(function), name_ + "::" + name, arguments);
    // Composed of other operators as far as autograd is concerned, which differentiates it as under
    // Python.
    library().def(Schema<R, Args...>::make(full, arguments));
    library().impl(full.c_str(),
                   torch::dispatch(c10::DispatchKey::CompositeImplicitAutograd,
                                   torch::CppFunction::makeFromBoxedFunctor(std::move(kernel))));
  }

 private:
  torch::Library& library() {
    // A fragment: the same source may register other operators of this namespace with
    // TORCH_LIBRARY. And late: a module without functions takes no namespace.
    if (!library_) {
      library_ = std::make_unique<torch::Library>(torch::Library::FRAGMENT, name_, std::nullopt,
                                                  file_, line_);
    }
    return *library_;
  }

  std::string name_;
  const char* file_;
  uint32_t line_;
  std::map<std::string, size_t> overloads_;
  std::unique_ptr<torch::Library> library_;
};

}  // namespace pybind
}  // namespace tch_extension

namespace pybind11 {
inline namespace without_python {

// Takes what a Python module would keep, and forgets it: there is no module to read it from.
struct ignored {
  template <typename T>
  const ignored& operator=(T&&) const {
    return *this;
  }
};

class module_ {
 public:
  explicit module_(tch_extension::pybind::Registrar& registrar, std::string prefix = "")
      : registrar_(&registrar), prefix_(std::move(prefix)) {}

  template <typename F, typename... Extra>
  module_& def(const char* name, F&& function, const Extra&... extra) {
    using Function = std::decay_t<F>;
    static_assert(
        !std::is_member_function_pointer_v<Function>,
        "tch_extension: m.def takes functions and function objects; a method has no operator");
    using Signature = tch_extension::pybind::Callable<Function>;
    registrar_->def(prefix_ + name, Function(std::forward<F>(function)),
                    static_cast<typename Signature::Pointer>(nullptr), extra...);
    return *this;
  }

  // Namespaces do not nest: the operators' names begin with the submodule's.
  module_ def_submodule(const char* name, const char* = nullptr) {
    return module_(*registrar_, prefix_ + name + "_");
  }

  ignored attr(const char*) const { return {}; }
  ignored doc() const { return {}; }

 private:
  tch_extension::pybind::Registrar* registrar_;
  std::string prefix_;
};
using module = module_;

template <typename... Args>
struct OverloadCast {
  template <typename R>
  constexpr auto operator()(R (*function)(Args...)) const {
    return function;
  }
};
// One of several functions of a name.
template <typename... Args>
static constexpr OverloadCast<Args...> overload_cast{};

}  // namespace without_python
}  // namespace pybind11

namespace tch_extension {
namespace pybind {

// Lives as long as the shared library.
class Module {
 public:
  Module(const char* name, void (*body)(pybind11::module_&), const char* file,
         uint32_t line) noexcept {
    // Static initialisers must not throw: the loader cannot unwind.
    try {
      registrar_ = std::make_unique<Registrar>(name, file, line);
      pybind11::module_ module(*registrar_);
      body(module);
    } catch (const c10::Error& error) {
      fail(error.what_without_backtrace());
    } catch (const std::exception& error) {
      fail(error.what());
    } catch (...) {
      fail("a C++ exception of unknown type");
    }
  }

 private:
  void fail(const char* message) noexcept {
    // All or nothing.
    registrar_.reset();
    load_error() = message;
#ifndef TCH_EXTENSION_ASKS_FOR_LOAD_ERROR
    // Nobody asks in a program that has the module built in.
    std::fprintf(stderr, "%s\n", message);
#endif
  }

  std::unique_ptr<Registrar> registrar_;
};

}  // namespace pybind
}  // namespace tch_extension
#pragma GCC visibility pop

// What a loader asks after dlopen: why the library's modules are not registered, or null.
extern "C" __attribute__((weak, visibility("default"))) const char* tch_extension_load_error() {
  const auto& error = tch_extension::pybind::load_error();
  return error.empty() ? nullptr : error.c_str();
}

#define TCH_EXTENSION_TEXT_(text) #text
#define TCH_EXTENSION_TEXT(text) TCH_EXTENSION_TEXT_(text)
#define TCH_EXTENSION_JOIN_(left, right) left##right
#define TCH_EXTENSION_JOIN(left, right) TCH_EXTENSION_JOIN_(left, right)

#define PYBIND11_MODULE(name, variable, ...)                                                     \
  static void TCH_EXTENSION_JOIN(tch_extension_module_body_, name)(::pybind11::module_&);        \
  static const ::tch_extension::pybind::Module TCH_EXTENSION_JOIN(tch_extension_module_, name)(  \
      TCH_EXTENSION_TEXT(name), &TCH_EXTENSION_JOIN(tch_extension_module_body_, name), __FILE__, \
      __LINE__);                                                                                 \
  static void TCH_EXTENSION_JOIN(tch_extension_module_body_,                                     \
                                 name)([[maybe_unused]] ::pybind11::module_ & variable)
