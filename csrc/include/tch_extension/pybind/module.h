// PYBIND11_MODULE without Python: each `m.def` registers an operator with libtorch's dispatcher.
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

// Hidden visibility: every extension keeps its own copy, whatever the others in the process were
// compiled with.
#pragma GCC visibility push(hidden)
namespace tch_extension {
namespace pybind {

// The reason why the modules of this shared library could not be registered; empty if they were.
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

// Registers the operators of one PYBIND11_MODULE. Its destructor deregisters them.
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
    // In the dispatcher, overloads have names: here the first has none, and the others count from
    // 2.
    const size_t nth = ++overloads_[name];
    const std::string full = nth == 1 ? name : name + ".overload" + std::to_string(nth);
    using Guard = typename Guards<Extra...>::Type;
    using Function = Kernel<F, Guard, R, Args...>;
    auto kernel = std::make_unique<Function>(std::move(function), name_ + "::" + name, arguments);
    // The dispatcher treats the kernel as composed of other operators, so autograd differentiates
    // it as under Python.
    library().def(Schema<R, Args...>::make(full, arguments));
    library().impl(full.c_str(),
                   torch::dispatch(c10::DispatchKey::CompositeImplicitAutograd,
                                   torch::CppFunction::makeFromBoxedFunctor(std::move(kernel))));
  }

 private:
  torch::Library& library() {
    // It is a fragment, because the same source may register other operators of this namespace with
    // TORCH_LIBRARY. It is made late, so that a module without functions takes no namespace.
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

// Accepts what a Python module would store and discards it, because there is no module from which
// it could be read.
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
    static_assert(!std::is_member_function_pointer_v<Function>,
                  "tch_extension: m.def takes functions and function objects; a method cannot "
                  "become an operator");
    using Signature = tch_extension::pybind::Callable<Function>;
    registrar_->def(prefix_ + name, Function(std::forward<F>(function)),
                    static_cast<typename Signature::Pointer>(nullptr), extra...);
    return *this;
  }

  // Namespaces do not nest, so the operators' names begin with the submodule's name.
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
// Selects one of several functions of the same name.
template <typename... Args>
static constexpr OverloadCast<Args...> overload_cast{};

}  // namespace without_python
}  // namespace pybind11

namespace tch_extension {
namespace pybind {

// Runs the body of a PYBIND11_MODULE. It lives as long as the shared library.
class Module {
 public:
  Module(const char* name, void (*body)(pybind11::module_&), const char* file,
         uint32_t line) noexcept {
    // A static initialiser must not throw, because the dynamic loader cannot unwind.
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
    // If one operator cannot be registered, none of the module's operators is.
    registrar_.reset();
    load_error() = message;
#ifndef TCH_EXTENSION_ASKS_FOR_LOAD_ERROR
    // If the module is linked into a program, nobody asks for the error, so print it.
    std::fprintf(stderr, "%s\n", message);
#endif
  }

  std::unique_ptr<Registrar> registrar_;
};

}  // namespace pybind
}  // namespace tch_extension
#pragma GCC visibility pop

// A loader calls this after dlopen. It returns why the library's modules are not registered, or
// null.
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
