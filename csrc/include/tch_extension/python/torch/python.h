// Replaces libtorch's header of this name, which has the Python bindings of its C++ frontend.
#pragma once

#include <torch/csrc/utils/pybind.h>
#include <torch/types.h>
