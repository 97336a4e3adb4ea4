// Replaces pybind11's header of this name, for sources that were written for Python.
#pragma once

#include <tch_extension/pybind/module.h>
