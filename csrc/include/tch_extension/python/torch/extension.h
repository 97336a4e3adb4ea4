// Replaces libtorch's header of this name, and includes the same things except Python. Put this
// folder first on the include path, and sources written for torch.utils.cpp_extension compile
// unchanged.
#pragma once

#include <torch/all.h>
#include <torch/python.h>
