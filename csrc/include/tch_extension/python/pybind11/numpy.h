// Replaces pybind11's header of this name, which many sources include and never use. Its names are
// declared, and using one gives an error that says that it needs Python.
#pragma once

#include <pybind11/pybind11.h>
