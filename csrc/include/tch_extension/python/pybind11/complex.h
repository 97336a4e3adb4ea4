// Replaces pybind11's header of this name. Its conversions are always available here.
#pragma once

#include <pybind11/pybind11.h>
