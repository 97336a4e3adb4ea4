// Stands for pybind11's header of this name in sources that were written for Python.
#pragma once

#include <tch_extension/pybind/module.h>
