// Stands for libtorch's header of this name, the bindings of its C++ frontend.
#pragma once

#include <torch/csrc/utils/pybind.h>
#include <torch/types.h>
