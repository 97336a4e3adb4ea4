// Stands for pybind11's header of this name; the real one, which libtorch brings, needs Python.
#pragma once

#include <pybind11/pybind11.h>
