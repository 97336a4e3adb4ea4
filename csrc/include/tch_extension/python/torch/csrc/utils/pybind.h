// Stands for libtorch's header of this name.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <utility>

namespace py = pybind11;

namespace torch {

// They translate exceptions for Python and release its lock; the dispatcher's caller does the
// former.
template <typename F>
F wrap_pybind_function(F&& function) {
  return std::forward<F>(function);
}
template <typename F>
F wrap_pybind_function_no_gil(F&& function) {
  return std::forward<F>(function);
}

}  // namespace torch
