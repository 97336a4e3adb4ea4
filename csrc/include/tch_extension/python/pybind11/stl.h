// Stands for pybind11's header of this name: its conversions are always there.
#pragma once

#include <pybind11/pybind11.h>
