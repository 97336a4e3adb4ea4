// Names that need a Python interpreter. They are declared here so that the compiler says why they
// cannot be used, instead of `not declared`.
#pragma once

#include <stdexcept>

#if defined(__has_attribute) && !defined(__CUDACC__)
#if __has_attribute(unavailable)
#define TCH_EXTENSION_UNAVAILABLE(why) __attribute__((unavailable(why)))
#endif
#endif
#ifndef TCH_EXTENSION_UNAVAILABLE
#define TCH_EXTENSION_UNAVAILABLE(why)
#endif

// Hidden visibility: every extension keeps its own copy, whatever the others in the process were
// compiled with.
#pragma GCC visibility push(hidden)
namespace pybind11 {

#define TCH_EXTENSION_NO_CLASS(name)                                                          \
  template <typename T, typename... Options>                                                  \
  class name {                                                                                \
    static_assert(                                                                            \
        !sizeof(T*),                                                                          \
        "tch_extension: py::" #name                                                           \
        " needs Python: operators take tensors, numbers and strings; offer functions "        \
        "with m.def, or register the class with TORCH_LIBRARY and torch::CustomClassHolder"); \
                                                                                              \
   public:                                                                                    \
    template <typename... Args>                                                               \
    explicit name(Args&&...) {}                                                               \
    template <typename... Args>                                                               \
    name& def(Args&&...) {                                                                    \
      return *this;                                                                           \
    }                                                                                         \
    template <typename... Args>                                                               \
    name& value(Args&&...) {                                                                  \
      return *this;                                                                           \
    }                                                                                         \
  }
TCH_EXTENSION_NO_CLASS(class_);
TCH_EXTENSION_NO_CLASS(enum_);
TCH_EXTENSION_NO_CLASS(array_t);
#undef TCH_EXTENSION_NO_CLASS

inline namespace without_python {

// tch_extension compiles sources written for Python without Python: there are no Python objects.
// Let the function take and return tensors, numbers, strings, and std::vector, std::optional and
// std::tuple of them.
#define TCH_EXTENSION_NO_OBJECT(name)                                                      \
  class TCH_EXTENSION_UNAVAILABLE(                                                         \
      "tch_extension: there is no Python here, and so no Python objects; take and return " \
      "tensors, numbers, "                                                                 \
      "strings, std::vector, std::optional and std::tuple") name
TCH_EXTENSION_NO_OBJECT(object);
TCH_EXTENSION_NO_OBJECT(handle);
TCH_EXTENSION_NO_OBJECT(dict);
TCH_EXTENSION_NO_OBJECT(list);
TCH_EXTENSION_NO_OBJECT(tuple);
TCH_EXTENSION_NO_OBJECT(set);
TCH_EXTENSION_NO_OBJECT(bytes);
TCH_EXTENSION_NO_OBJECT(function);
TCH_EXTENSION_NO_OBJECT(args);
TCH_EXTENSION_NO_OBJECT(kwargs);
TCH_EXTENSION_NO_OBJECT(buffer);
TCH_EXTENSION_NO_OBJECT(capsule);
TCH_EXTENSION_NO_OBJECT(array);
#undef TCH_EXTENSION_NO_OBJECT

// The types that modules set their attributes to. Nobody reads such attributes here, and no
// function can take or return these types.
#define TCH_EXTENSION_CONSTANT(name) \
  struct name {                      \
    template <typename T>            \
    explicit name(const T&) {}       \
  }
TCH_EXTENSION_CONSTANT(str);
TCH_EXTENSION_CONSTANT(int_);
TCH_EXTENSION_CONSTANT(float_);
TCH_EXTENSION_CONSTANT(bool_);
#undef TCH_EXTENSION_CONSTANT

// Exceptions that pybind11 would translate to Python's by type. Here only their message remains.
struct builtin_exception : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct value_error : builtin_exception {
  using builtin_exception::builtin_exception;
};
struct type_error : builtin_exception {
  using builtin_exception::builtin_exception;
};
struct index_error : builtin_exception {
  using builtin_exception::builtin_exception;
};
struct key_error : builtin_exception {
  using builtin_exception::builtin_exception;
};

}  // namespace without_python
}  // namespace pybind11
#pragma GCC visibility pop
