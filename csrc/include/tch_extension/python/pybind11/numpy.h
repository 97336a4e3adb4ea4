// Stands for pybind11's header of this name, which many include and never use: what is named here
// of it says that it needs Python.
#pragma once

#include <pybind11/pybind11.h>
