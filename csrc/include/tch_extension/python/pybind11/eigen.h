// Stands for pybind11's header of this name, which many include and never use: a type that no
// operator can take is refused where it is used.
#pragma once

#include <pybind11/pybind11.h>
