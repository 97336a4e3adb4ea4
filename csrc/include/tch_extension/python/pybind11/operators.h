// Replaces pybind11's header of this name. The real one, which comes with libtorch, needs Python.
#pragma once

#include <pybind11/pybind11.h>
