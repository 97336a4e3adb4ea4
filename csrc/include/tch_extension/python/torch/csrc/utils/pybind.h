// Replaces libtorch's header of this name.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <utility>

namespace py = pybind11;

namespace torch {

// Under Python, these functions translate exceptions and release Python's lock. Here the
// dispatcher's caller translates exceptions, and there is no lock.
template <typename F>
F wrap_pybind_function(F&& function) {
  return std::forward<F>(function);
}
template <typename F>
F wrap_pybind_function_no_gil(F&& function) {
  return std::forward<F>(function);
}

}  // namespace torch
